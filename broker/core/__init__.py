"""The broker's brain: a state machine without I/O, clocks or randomness. Events in, instructions out."""
