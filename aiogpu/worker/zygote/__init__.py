"""From a fresh interpreter to a worker: what is imported once and forked for each."""
