"""Which code asks for an actor: a program's, or a task's that shares its process.

On an inline node plain code of a task has no event loop, and may run one of its own;
the node is the one that its program has opened all the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiogpu.api.session import Session
from aiogpu.api.sessions import current_session, session_of
from aiogpu.engines.family import host_of_task

if TYPE_CHECKING:
    from aiogpu.engines.family import Host


def session_of_caller() -> Session:
    """The session of the program to which the code belongs that asks.

    Raises:
        NoLoopError: no event loop is running in this thread.
        NodeError: this is a task that has no node.
    """
    host = host_beside_loop()
    session = None if host is None else session_of(host.program)
    return session or current_session()


def host_beside_loop() -> Host | None:
    """The host of the task whose code asks, if the program's loop does not run it."""
    host = host_of_task.get()
    if host is None or asyncio._get_running_loop() is host.program:
        return None
    return host
