"""The OpenAI-compatible HTTP front, a process of its own."""
