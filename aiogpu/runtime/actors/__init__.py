"""The actors of a node: calls, restarts, names, ends."""
