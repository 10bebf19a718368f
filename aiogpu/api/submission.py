"""Who takes a call: the running loop's node, or that of the task whose code calls."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.api.caller import host_beside_loop, session_of_caller
from aiogpu.api.session import sessions
from aiogpu.api.sessions import session_of

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.api.stream import Stream
    from aiogpu.runtime.calls import Site

_get_running_loop: Final = asyncio._get_running_loop


def submit(site: Site, payload: bytes) -> Handle[Any]:
    """Start a task on the running loop's node; see `RemoteFunction.remote`."""
    session = sessions.get(_get_running_loop())  # type: ignore[arg-type]
    if session is None:
        host = host_beside_loop()
        if host is not None:
            from aiogpu.api.blocking import submit_to

            return submit_to(host, site, payload)  # type: ignore[no-any-return]
        session = session_of_caller()
    return session.submit(site, payload)


def stream(site: Site, payload: bytes) -> Stream[Any]:
    """The same for a generator; see `RemoteGenerator.remote`."""
    session = session_of(_get_running_loop())
    if session is None:
        host = host_beside_loop()
        if host is not None:
            from aiogpu.api.blocking_stream import stream_by

            start = partial(host.submit, site, payload)
            return stream_by(host, site.spec.name, site.window, start)  # type: ignore[no-any-return]
        session = session_of_caller()
    stream = session.new_stream(site.spec.name, session, site.window)
    session.start(site, payload, stream.inflow)
    return stream
