"""Decides which task runs when, on which shares, in which worker.

No asyncio, no socket, no clock, no randomness: time is an argument. To the core a task
is an id and a spec; it never sees a function, a payload or a byte.
"""
