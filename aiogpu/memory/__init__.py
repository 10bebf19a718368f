"""Shares: memory that the driver and its workers both map."""
