"""Starting the workers of all stages, as many as the broker wants, and ending those that are too many."""
