"""The waiting tasks, and their order."""
