"""What users see of a node: its status, why a task waits, and what has run."""
