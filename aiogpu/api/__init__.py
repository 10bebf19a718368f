"""Faces: what users import. Knows options, handles and sessions, not engines."""
