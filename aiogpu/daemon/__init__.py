"""A node in its own process: starting it, finding it, stopping it."""
