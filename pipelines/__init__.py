"""What runs: graphs of stages as data, and the models they name."""
