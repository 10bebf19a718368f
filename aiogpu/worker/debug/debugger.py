"""Makes the breakpoints of a worker, and the debugger that a terminal asks for."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from aiogpu.worker.debug.breakpoints import Breakpoints, Session
from aiogpu.worker.debug.prompt import PromptSession
from aiogpu.worker.debug.terminal import PATIENCE, Terminal

if TYPE_CHECKING:
    from aiogpu.worker.connection import Channel
    from aiogpu.worker.interrupts import Interrupts


def breakpoints(
    channel: Channel, interrupts: Interrupts, dropped: Container[int]
) -> Breakpoints:
    """Return the breakpoints of this worker; see `Breakpoints`."""
    return Breakpoints(channel, interrupts, dropped, _open_session)


def _open_session(
    breakpoints: Breakpoints, terminal: Terminal, task: int, number: int
) -> Session | None:
    message = terminal.receive(PATIENCE) or {}
    listen = message.get("listen", "")
    if listen is None:
        return PromptSession(breakpoints, terminal, task)
    if not listen:
        terminal.close()
        return None
    # Late: few programs use it.
    from aiogpu.worker.debug.adapter import AdapterSession

    host, port = listen
    session = AdapterSession(breakpoints, terminal, task)
    return session if session.listen(host, port, number) else None
