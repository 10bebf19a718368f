"""A Ray cluster as an engine."""
