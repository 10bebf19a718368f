"""A Ray cluster as an engine: Ray places, moves and heals; the API stays as it is."""
