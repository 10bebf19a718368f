"""The node as a process of its own: started, met, asked to stop."""
