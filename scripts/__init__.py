"""Commands for people who work on the project; nothing here is installed."""
