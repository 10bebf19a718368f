"""Sessions of code that runs as a task where the engine itself is no process of ours.

Such a task's process is, to its engine, one program more: each event loop in it has a
session, as that of a program has, and plain code one of its thread's own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiogpu.api.session import Session, sessions
from aiogpu.api.session_state import SessionState

if TYPE_CHECKING:
    from aiogpu.engines.family import Host


def session_beside(host: Host, loop: asyncio.AbstractEventLoop) -> Session | None:
    """The session of a task's code on a loop, if its host has an engine for that."""
    session = sessions.get(loop)
    if session is None:
        engine = host.engine(loop)
        if engine is None:
            return None
        for closed in [one for one in sessions if one.is_closed()]:
            del sessions[closed]
        session = Session(engine, loop)
        session._state = SessionState.OPEN
    return session
