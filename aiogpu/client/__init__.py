"""The client side of a node, the same in every process."""
