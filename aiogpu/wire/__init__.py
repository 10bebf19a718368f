"""The protocol between processes: messages, their encoding, and their directions.

Bytes in, messages out. No I/O, no resources, no policy.
"""
