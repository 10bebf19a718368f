"""NVIDIA's management library: what GPUs there are, what is on them, are they well."""
