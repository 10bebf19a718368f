"""Real work: each kind in a module that imports its library, as users write it."""
