"""The node's resources, and the leases that hold them."""
