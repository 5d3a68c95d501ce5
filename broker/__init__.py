"""Who decides: the broker, its clients and its front."""
