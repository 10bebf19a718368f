"""What `breakpoint()` does in a worker; imported by the first breakpoint only."""
