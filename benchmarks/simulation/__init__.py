"""A trace of very many tasks through the core, in simulated time; and other rules."""
