"""The states of a program's tie to a node."""

from __future__ import annotations

from enum import Enum


class SessionState(Enum):
    """Where a session is."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "forked"
    """This process is a fork of the one that opened it."""
