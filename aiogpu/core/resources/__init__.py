"""What the node has, and who holds what of it."""
