"""The callers of a node: its own tasks, and programs that have joined it."""
