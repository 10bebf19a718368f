"""Moves: processes, sockets, pipes and time, on the driver's side.

Where the core's decisions meet the world. It runs no user code.
"""
