"""The client side of a node: requests, handles' references, and the current task."""
