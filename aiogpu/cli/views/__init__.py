"""The commands that show a node and its tasks, and change nothing but by a key."""
