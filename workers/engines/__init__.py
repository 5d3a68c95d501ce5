"""The stage engines, each imported only by the worker that runs it."""
