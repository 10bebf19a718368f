"""The session of each event loop: begun, found again, inherited by forks.

A `.remote()` without one opens an embedded node with the defaults, which closes with
its loop. A fork of the program inherits an inert session: it neither works nor harms
the parent's.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from typing import Final

from aiogpu.api.address import default_address, refuse_in_worker
from aiogpu.api.session import FROM_A_THREAD, Session, sessions, shut_down
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.registry import create_engine
from aiogpu.errors import NoLoopError

_get_running_loop: Final = asyncio._get_running_loop
_log: Final = logging.getLogger(__name__)


def start_session(
    address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
) -> Session:
    """Make a session and begin to open it; calls may be made at once."""
    session = Session(create_engine(address, options, loop), loop)
    session.start_opening()
    return session


def current_session(what: str = ".remote()") -> Session:
    """The running loop's session; one is opened if there is none.

    Args:
        what: who needs it, for the message.

    Raises:
        NoLoopError: no event loop is running in this thread.
    """
    loop = _get_running_loop()
    session = sessions.get(loop)  # type: ignore[arg-type]
    if session is not None:
        return session
    refuse_in_worker("the node")
    if loop is not None and loop in shut_down:
        shut_down.discard(loop)
        _log.warning(
            "! %s opens a node with the defaults, since the program's own was shut "
            "down. Make the call before the end of `async with aiogpu.init(...)`, or "
            "open another node by aiogpu.init().",
            what,
        )
    if loop is None:
        for inherited in sessions.values():
            if inherited.is_forked:
                raise inherited.unusable()
        raise no_loop(what)
    return start_session(default_address(), NodeOptions(), loop)


def no_loop(what: str) -> NoLoopError:
    """The error for what is called where it has no event loop."""
    if any(session.is_open for session in sessions.values()):
        return NoLoopError(
            f"{what} needs the program's event loop, which runs in another thread. "
            f"{FROM_A_THREAD}"
        )
    return NoLoopError(
        f"{what} needs a running event loop, and there is none in this thread. Call it "
        f"inside an `async def`: a program runs that by aiogpu.run(main()), a server "
        f"and a notebook run it on the loop that they have."
    )


def session_of(loop: asyncio.AbstractEventLoop | None) -> Session | None:
    """The session of that loop, None if it has none."""
    return sessions.get(loop)  # type: ignore[arg-type]


def _disown_all() -> None:
    for session in sessions.values():
        session.disown()


def _abandon_all() -> None:
    for session in list(sessions.values()):
        session.abandon()


os.register_at_fork(after_in_child=_disown_all)
atexit.register(_abandon_all)
