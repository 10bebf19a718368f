"""The devices of a node: assigned to leases, watched, guarded and released."""
