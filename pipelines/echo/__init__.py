"""A branching graph of function stages without any model, for trying things out and for tests."""
