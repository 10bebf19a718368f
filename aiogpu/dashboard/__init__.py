"""The dashboard in the browser: a process of its own that views a node."""
