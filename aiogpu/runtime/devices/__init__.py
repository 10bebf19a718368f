"""The devices of a node: what is bound to a lease, seen, enforced and released."""
