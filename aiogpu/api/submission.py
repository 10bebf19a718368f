"""Who takes a call: the running loop's node, or that of the task whose code calls.

On an inline node plain code of a task has no event loop, and may run one of its own;
the node is the one that its program has opened all the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiogpu.api.loop_sessions import session_of, sessions
from aiogpu.api.session import Session, current_session
from aiogpu.client.current import host_of_task

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.api.stream import Stream
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Host


def session_of_caller(what: str = ".remote()") -> Session:
    """The session of the program to which the code belongs that asks.

    Args:
        what: what it calls, for the message.

    Raises:
        NoLoopError: no event loop is running in this thread.
        NodeError: this is a task that has no node.
    """
    host = host_of_task.get()
    if host is None:
        return current_session(what)
    loop = asyncio._get_running_loop() or host.program
    session = session_of(loop)
    if session is None:
        from aiogpu.api.session import session_beside

        session = session_beside(host, loop) or session_of(host.program)
    return session or current_session(what)


def may_use(session: Session) -> bool:
    """Whether the code that runs works with a session, which is open, or with none."""
    own = session_of(asyncio._get_running_loop())
    is_own = own in (None, session) or host_of_task.get() is not None
    return session.is_open and is_own


def host_beside_loop() -> Host | None:
    """The host of the task whose code asks, if no loop with a session runs it."""
    host = host_of_task.get()
    if host is None:
        return None
    loop = asyncio._get_running_loop()
    if loop is None:
        return host
    return None if loop is host.program or host.engine(loop) is not None else host


_get_running_loop: Final = asyncio._get_running_loop


def submit(site: Site, payload: bytes) -> Handle[Any]:
    """Start a task on the running loop's node; see `RemoteFunction.remote`."""
    session = sessions.get(_get_running_loop())  # type: ignore[arg-type]
    if session is None:
        if host_beside_loop() is not None:
            from aiogpu.api.blocking import submit_in_task

            return submit_in_task(site, payload)  # type: ignore[no-any-return]
        session = session_of_caller()
    return session.submit(site, payload)


def stream(site: Site, payload: bytes) -> Stream[Any]:
    """The same for a generator; see `RemoteGenerator.remote`."""
    session: Session | None = session_of(_get_running_loop())
    if session is None:
        if host_beside_loop() is not None:
            from aiogpu.api.blocking_stream import stream_in_task

            return stream_in_task(site, payload)  # type: ignore[no-any-return]
        session = session_of_caller()
    stream = session.new_stream(site.spec.name, session, site.window)
    session.start(site, payload, stream.inflow)
    return stream
