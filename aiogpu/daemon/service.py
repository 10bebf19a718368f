"""A node that programs share, from its start to its end: opened, met, drained, gone.

What it does with its clients is the engine's business. Asked to stop, it lets what
runs end for a while; asked twice, it stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import aiogpu
from aiogpu.core.model.text import span, terms
from aiogpu.daemon.notify import Notifier
from aiogpu.daemon.pidfile import Claim, Record, start_time
from aiogpu.daemon.place import Place, check_socket
from aiogpu.daemon.plan import Plan
from aiogpu.daemon.readiness import Ready
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import NodeClosedError, NodeStartError
from aiogpu.runtime.callers.programs import BACKLOG

if TYPE_CHECKING:
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.observe.metrics import MetricsServer
    from aiogpu.observe.status import NodeStatus

_log: Final = logging.getLogger("aiogpu.daemon")

SEEN_WITHIN: Final = 10.0
"""Seconds that the loop has to answer a fetch of metrics."""


class Node(Protocol):
    """What serves."""

    async def open(self) -> None:
        """Be ready for clients; raises `NodeError` or `DeviceError` if it cannot."""
        ...

    async def serve(self, listening: socket.socket, logs: str, limits: Limits) -> None:
        """Let clients come in by that socket; what tasks print is logged there."""
        ...

    async def drain(self, patience: float) -> str:
        """Refuse new work, and let what runs end, and leases, for so many seconds.

        Says what is left then, in words; "" for nothing.
        """
        ...

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        ...

    async def seen(self) -> tuple[NodeStatus, Mapping[str, int]]:
        """Who holds what, and how many attempts at tasks have ended how."""
        ...

    async def close(self) -> None:
        """Stop all tasks and leave nothing behind."""
        ...

    def hasten(self) -> None:
        """Give nobody time to stop; `close` is under way, or comes next."""
        ...


MakeNode = Callable[[NodeOptions, asyncio.AbstractEventLoop], Node]


def make_node(options: NodeOptions, loop: asyncio.AbstractEventLoop) -> Node:
    """This machine."""
    from aiogpu.engines.local import LocalEngine

    return LocalEngine(options, loop)


class Service:
    """One node at its place.

    Args:
        plan: what it is to be.
        notifier: how the service manager is told.
        make: makes the node.
    """

    def __init__(
        self, plan: Plan, notifier: Notifier, make: MakeNode = make_node
    ) -> None:
        self._plan = plan
        self._notifier = notifier
        self._make = make
        self._node: Node | None = None
        self._metrics: MetricsServer | None = None
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    def ask_to_stop(self, why: str) -> None:
        """Have it drain and end; asked once more, end at once.

        Args:
            why: the signal's name, for the log.
        """
        if not self._asked.is_set():
            _log.info("%s: no new work from now on", why)
            self._asked.set()
        elif not self._hurried.is_set():
            _log.info("%s again: at once", why)
            self._hurried.set()
            if self._node is not None:
                self._node.hasten()

    def hang_up(self) -> None:
        """Its terminal has gone; a shell and the kernel may both say so."""
        if not self._asked.is_set():
            self.ask_to_stop("SIGHUP")

    async def run(self, claim: Claim, on_ready: Callable[[Ready], None]) -> None:
        """Serve until it is asked to stop; the claim is released by the caller.

        Args:
            claim: this node's hold on its place.
            on_ready: told as soon as clients can come.

        Raises:
            NodeError: it could not start.
            DeviceError: the devices asked for are not there.
        """
        plan, loop = self._plan, asyncio.get_running_loop()
        claim.write(_record(plan))
        remove(plan.place.wish)  # left for a node that has died
        listening = bind(plan.place.socket)
        alive: asyncio.Task[None] | None = None
        try:
            node = self._node = self._make(plan.options, loop)
            try:
                await self._open(node)
                listening.listen(BACKLOG)
                await node.serve(listening, plan.place.logs, plan.limits)
                self._begin_metrics(node, loop)
                on_ready(await self._ready(node))
                alive = loop.create_task(self._show_life())
                await self._asked.wait()
                self._notifier.tell(STOPPING=1, STATUS="lets what runs end")
                await self._drain(node)
            finally:
                if self._metrics is not None:
                    # Its thread may wait for this loop.
                    await loop.run_in_executor(None, self._metrics.close)
                begun = time.monotonic()
                await node.close()
                _log.info("ended in %s", span(time.monotonic() - begun))
        finally:
            if alive is not None:
                alive.cancel()
            listening.close()
            remove(plan.place.socket)
            remove(plan.place.wish)

    def _begin_metrics(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        if self._plan.metrics is None:
            return
        from aiogpu.observe.metrics import ADDRESS, MetricsServer, Seen

        def see() -> Seen:
            seeing = asyncio.run_coroutine_threadsafe(node.seen(), loop)
            return Seen(*seeing.result(SEEN_WITHIN))

        self._metrics = MetricsServer(self._plan.metrics, see)
        _log.info("metrics at http://%s:%d/metrics", ADDRESS, self._metrics.port)

    async def _open(self, node: Node) -> None:
        """Open it, unless it is asked to stop meanwhile."""
        opening = asyncio.ensure_future(node.open())
        if not await _is_first(opening, self._asked):
            raise NodeClosedError("the node was asked to stop before it was ready.")
        opening.result()

    async def _drain(self, node: Node) -> None:
        seconds = wished(self._plan.place, self._plan.drain)
        _log.info("what runs has %s to end", span(seconds))
        begun = time.monotonic()
        draining = asyncio.ensure_future(node.drain(seconds))
        if await _is_first(draining, self._hurried):
            took = span(time.monotonic() - begun)
            left = draining.result()
            if left:
                _log.warning("! still there after %s, and ended: %s", took, left)
            else:
                _log.info("all has ended in %s", took)

    async def _ready(self, node: Node) -> Ready:
        place, total = self._plan.place, await node.total()
        told = terms(total.items())
        _log.info("ready at %s: pid %d, %s", place.socket, os.getpid(), told)
        self._notifier.tell(READY=1, STATUS=f"serves at {place.socket}: {told}")
        return Ready(os.getpid(), total, place.socket, place.logs)

    async def _show_life(self) -> None:
        """Tell a watchdog, if there is one, for as long as the loop turns."""
        while self._notifier.interval:
            self._notifier.tell(WATCHDOG=1)
            await asyncio.sleep(self._notifier.interval)


async def _is_first(work: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Wait for some work, which is cancelled if the event comes before its end."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        work.cancel()
        waiting.cancel()
        await asyncio.gather(work, waiting, return_exceptions=True)


def _record(plan: Plan) -> Record:
    pid = os.getpid()
    started = start_time(pid)
    assert started is not None, "this process lives"
    return Record(
        pid=pid,
        started=started,
        socket=plan.place.socket,
        logs=plan.place.logs,
        drain=plan.drain,
        ends_within=plan.ends_within,
        version=aiogpu.__version__,
    )


def bind(path: str) -> socket.socket:
    """A socket at that path, for this user alone; a dead node's is replaced.

    Raises:
        NodeStartError: there is something else, or it cannot be made.
    """
    check_socket(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        listening.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        listening.close()
        raise NodeStartError(
            f"the node's socket {path} cannot be made: {error.strerror}. Make room or "
            f"allow it, or name another place by --socket."
        ) from error
    return listening


def remove(path: str) -> None:
    """Remove a file that may have gone, or be beyond our reach by now."""
    with suppress(OSError):
        os.unlink(path)


def wished(place: Place, otherwise: float) -> float:
    """Seconds to drain: what `aiogpu stop --drain` has left, or what was planned."""
    try:
        with open(place.wish, encoding="ascii") as file:
            text = file.read(64)
        os.unlink(place.wish)
        return max(0.0, min(float(text), sys.float_info.max))
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError) as error:
        _log.warning("! %s tells no seconds: %s", place.wish, error)
        return otherwise
