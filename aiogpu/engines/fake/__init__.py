"""Runs tasks and actors in this process, for tests and debuggers."""
