"""What `omni-broker` can be told to do: one module per command.

Modules import nothing heavy at their head, so that `start` is up in a moment.
"""
