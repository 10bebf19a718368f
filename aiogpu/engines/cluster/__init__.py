"""A Ray cluster behind the port: what is sent there, and what runs it there."""
