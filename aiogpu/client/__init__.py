"""How any process talks to its node: what it asks, what it holds, who serves it."""
