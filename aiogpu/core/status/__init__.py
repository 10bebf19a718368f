"""What users see of the node: status, and why a task waits."""
