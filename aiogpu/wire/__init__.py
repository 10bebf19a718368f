"""The protocol between processes: messages, their encoding, and who may send which.

Bytes in, messages out. It does no I/O, and knows no resource and no policy.
"""
