"""The node's resources, and who holds them."""
