"""The session of each event loop, and checks that code runs on the loop that it must.

A handle belongs to one event loop and to the node that this loop had then. Below
handles, so that these can ask without knowing what a session is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiogpu.errors import MisuseError
from aiogpu.serialization.references import closed_node_error

if TYPE_CHECKING:
    from aiogpu.client.interface import ValueStore

sessions: Final[dict[asyncio.AbstractEventLoop, Any]] = {}
"""One `api.session.Session` for each event loop that has a node."""


def session_of(loop: asyncio.AbstractEventLoop | None) -> Any:
    """The session of that loop, None if it has none."""
    return sessions.get(loop)  # type: ignore[arg-type]


def check_thread(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Refuse a call from another thread than an event loop's, if that has a node.

    Raises:
        NoLoopError: another thread runs this.
    """
    session = sessions.get(loop)
    if session is not None:
        session.check_thread(what)


def check_loop(handle: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Raise `MisuseError` if a handle belongs to another event loop than this."""
    if _is_of_a_loop(handle) and handle.get_loop() is not loop:
        raise MisuseError(
            f"the handle of {handle.task_name} belongs to another event loop, and to "
            f"its node; await it there and pass the value."
        )


def check_node(
    handle: Any, loop: asyncio.AbstractEventLoop, far: ValueStore | None
) -> None:
    """The same, and if it belongs to a node that this loop had before.

    Args:
        handle: what is to be sent.
        loop: of who sends it.
        far: who knows its values, where another process keeps them.
    """
    check_loop(handle, loop)
    if _is_of_a_loop(handle) and handle.far is not far:
        raise closed_node_error(handle.task_name)


def check_sender(handle: object) -> None:
    """Raise `MisuseError` if it is not for the code that runs to send a handle."""
    loop = asyncio._get_running_loop()
    if loop is None:
        return
    session = session_of(loop)
    if session is None:
        check_loop(handle, loop)
    else:
        check_node(handle, loop, session.far)


def _is_of_a_loop(handle: object) -> bool:
    return isinstance(handle, asyncio.Future)
