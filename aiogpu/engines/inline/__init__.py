"""Runs tasks and actors in this process, on its loop's thread: for tests, debuggers."""
