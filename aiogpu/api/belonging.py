"""Whose a handle is: that of an event loop, and of the node that this had then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiogpu.api.handle import Handle
from aiogpu.errors import MisuseError
from aiogpu.serialization.references import closed_node_error

if TYPE_CHECKING:
    from aiogpu.client.port import ValueStore


def check_loop(handle: object, loop: asyncio.AbstractEventLoop) -> None:
    """Raise `MisuseError` if a handle belongs to another event loop than this."""
    if isinstance(handle, Handle) and handle.get_loop() is not loop:
        raise MisuseError(
            f"the handle of {handle.task_name} belongs to another event loop, and to "
            f"its node; await it there and pass the value."
        )


def check_node(
    handle: object, loop: asyncio.AbstractEventLoop, far: ValueStore | None
) -> None:
    """The same, and if it belongs to a node that this loop had before.

    Args:
        handle: what is to be sent.
        loop: of who sends it.
        far: who knows its values, where another process keeps them.
    """
    check_loop(handle, loop)
    if isinstance(handle, Handle) and handle.far is not far:
        raise closed_node_error(handle.task_name)


def check_sender(handle: object) -> None:
    """Raise `MisuseError` if it is not for the code that runs to send a handle."""
    from aiogpu.api.session import session_of

    loop = asyncio._get_running_loop()
    if loop is None:
        return
    session = session_of(loop)
    if session is None:
        check_loop(handle, loop)
    else:
        check_node(handle, loop, session.far)
