"""The driver's half of zygotes: start, watch, replace."""
