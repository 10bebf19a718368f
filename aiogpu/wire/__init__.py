"""Speaks: messages, frames, payloads, failures; what crosses between processes.

Pure: bytes in, messages out. It never sees a resource or a policy, and does no I/O.
"""
