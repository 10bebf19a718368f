"""The calls of an actor: one after the other, in threads, or as coroutines."""
