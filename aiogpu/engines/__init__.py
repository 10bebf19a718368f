"""Engines: run tasks and actors locally, inline, on a joined node, or on Ray."""
