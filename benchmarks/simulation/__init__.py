"""A trace of very many tasks through the core, in simulated time, beside other rules."""
