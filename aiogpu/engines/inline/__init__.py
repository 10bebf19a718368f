"""Runs tasks in the calling process, on its loop's thread: for tests and debuggers."""
