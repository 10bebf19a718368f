"""Decides which task runs when, on which devices, in which worker."""
