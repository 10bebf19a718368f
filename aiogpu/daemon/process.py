"""The process that is a node which programs share: opened, met, drained, gone.

Detached, it has no terminal and belongs to no shell; in the foreground it is the
`aiogpu start --block` command itself. What it is to be is a `Plan`, which the command
decides. Asked to stop, it lets what runs end for a while; asked twice, it stops at
once. Door to uvloop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.core.model.text import span, terms
from aiogpu.core.queue.fair_share import Limits
from aiogpu.daemon.journal import Journal, stand_in_for_streams
from aiogpu.daemon.place import Claim, Place, Record, check_socket
from aiogpu.daemon.readiness import Notifier, Ready, tell_failure, tell_ready
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import AiogpuError, InternalError, NodeClosedError, NodeStartError
from aiogpu.linux.syscalls import set_process_name
from aiogpu.runtime.directories import BACKLOG

if TYPE_CHECKING:
    from aiogpu.engines.local import LocalEngine
    from aiogpu.observe.metrics import MetricsServer


DRAIN: Final = 30.0
"""Seconds that what runs has to end in when the node is asked to stop."""
CLOSING: Final = 20.0
"""Seconds that a node's end takes at most, beside the grace of those it cancels."""
OPENING: Final = 120.0
"""Seconds until a node is ready, at most."""
IMPORTING: Final = 60.0
"""Seconds more for each module that is preloaded."""
LAST_WORDS: Final = "node.err"
"""Beside the log: what comes from below Python, such as a crash; of one life."""


class Plan(NamedTuple):
    """One node to be started.

    Attributes:
        options: what it is to have.
        place: where it is to be.
        drain: seconds for what runs when it is asked to stop.
        sys_path: where it finds modules.
        metrics: port of 127.0.0.1 for Prometheus; None for none.
        max_waiting: unfinished tasks that a program may have; None for no limit.
        max_share: the part that a program may hold of a resource, by its name.
    """

    options: NodeOptions
    place: Place
    drain: float = DRAIN
    sys_path: tuple[str, ...] = ()
    metrics: int | None = None
    max_waiting: int | None = None
    max_share: Mapping[str, float] = {}

    @property
    def limits(self) -> Limits:
        """What a program may have at once; raises `OptionError` for what is none."""
        return Limits(self.max_waiting, max_share=self.max_share)

    @property
    def ends_within(self) -> float:
        """Seconds that its end takes at most, after the drain."""
        return CLOSING + self.options.cancel_grace

    @property
    def opens_within(self) -> float:
        """Seconds until it is ready, at most."""
        return OPENING + IMPORTING * len(self.options.preload)

    def packed(self) -> bytes:
        """As bytes for the process that is to be it."""
        fields = self._asdict()
        fields["options"] = self.options._asdict()
        fields["place"] = self.place._asdict()
        return json.dumps(fields).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Plan:
        """The plan again; raises `ValueError` or `TypeError` if it is none."""
        fields = json.loads(data)
        options = NodeOptions(**fields.pop("options"))
        place = Place(**fields.pop("place"))
        sys_path = tuple(fields.pop("sys_path"))
        options = options._replace(preload=tuple(options.preload))
        return cls(options, place, sys_path=sys_path, **fields)


_log: Final = logging.getLogger("aiogpu.daemon")
SEEN_WITHIN: Final = 10.0
"""Seconds that the loop has to answer a fetch of metrics."""


MakeNode = Callable[[NodeOptions, asyncio.AbstractEventLoop], "LocalEngine"]


def make_node(options: NodeOptions, loop: asyncio.AbstractEventLoop) -> LocalEngine:
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
        self._node: LocalEngine | None = None
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
        claim.write(Record.of_this_process(plan.place, plan.drain, plan.ends_within))
        remove(plan.place.wish)  # left for a node that has died
        listening = bind(plan.place.socket)
        alive: asyncio.Task[None] | None = None
        try:
            node = self._node = self._make(plan.options, loop)
            try:
                await self._open(node)
                listening.listen(BACKLOG)
                await node.serve(listening, plan.place.logs, plan.limits)
                self._begin_metrics(node)
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

    def _begin_metrics(self, node: LocalEngine) -> None:
        if self._plan.metrics is None:
            return
        from aiogpu.observe.metrics import ADDRESS, MetricsServer, Seen

        loop = asyncio.get_running_loop()

        def see() -> Seen:
            seeing = asyncio.run_coroutine_threadsafe(node.seen(), loop)
            return Seen(*seeing.result(SEEN_WITHIN))

        self._metrics = MetricsServer(self._plan.metrics, see)
        _log.info("metrics at http://%s:%d/metrics", ADDRESS, self._metrics.port)

    async def _open(self, node: LocalEngine) -> None:
        """Open it, unless it is asked to stop meanwhile."""
        opening = asyncio.ensure_future(node.open())
        if not await _is_first(opening, self._asked):
            raise NodeClosedError("the node was asked to stop before it was ready.")
        opening.result()

    async def _drain(self, node: LocalEngine) -> None:
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

    async def _ready(self, node: LocalEngine) -> Ready:
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


NAME: Final = "aiogpu-node"
"""What process lists call it."""
COLLECTED: Final = 10_000
"""Objects after which the collector looks for cycles among the young. What comes with
a task goes with it and is in none, so looking at each 700 was 4 % of its work."""


def run_detached(plan: Plan, pipe: int, make: MakeNode = make_node) -> int:
    """Be a node without a terminal; gives the exit code.

    Args:
        plan: what to be.
        pipe: descriptor on which to say that it is ready, or why it is not.
        make: makes the node.
    """

    def on_ready(ready: Ready) -> None:
        tell_ready(pipe, ready)
        os.close(pipe)

    set_process_name(NAME)
    try:
        plan.place.prepare()
        claim = Claim.take(plan.place)
        try:
            _leave_the_terminal(plan.place.logs)
            _live(plan, claim, on_ready, make, is_detached=True)
        finally:
            claim.release()
    except AiogpuError as error:
        tell_failure(pipe, error)
        return 1
    except BaseException as error:
        _log.critical("a defect of aiogpu ended the node", exc_info=True)
        tell_failure(pipe, InternalError(f"the node ended: {error!r}. Please report."))
        raise
    return 0


def run_here(
    plan: Plan, on_ready: Callable[[Ready], None], make: MakeNode = make_node
) -> None:
    """Be a node in the foreground, which Ctrl-C ends: once to drain, twice at once.

    Args:
        plan: what to be.
        on_ready: told when clients can come.
        make: makes the node.

    Raises:
        NodeError: it could not start.
        DeviceError: the devices asked for are not there.
    """
    plan.place.prepare()
    claim = Claim.take(plan.place)
    try:
        _live(plan, claim, on_ready, make, is_detached=False)
    finally:
        claim.release()


def _live(
    plan: Plan,
    claim: Claim,
    on_ready: Callable[[Ready], None],
    make: MakeNode,
    is_detached: bool,
) -> None:
    import uvloop

    async def serve() -> None:
        service = Service(plan, Notifier.take(os.environ), make)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(number).name
            loop.add_signal_handler(number, service.ask_to_stop, name)
        told = "SIGHUP: ignored, a node needs no terminal"
        # Not SIG_IGN, which all workers would inherit.
        hung_up = partial(_log.info, told) if is_detached else service.hang_up
        loop.add_signal_handler(signal.SIGHUP, hung_up)
        await service.run(claim, on_ready)

    gc.set_threshold(COLLECTED)
    journal = Journal.begin(plan.place.logs, None if is_detached else sys.stderr)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    except AiogpuError as error:
        _log.error("%s", error)
        raise
    finally:
        journal.close()


def _leave_the_terminal(logs: str) -> None:
    """Take the standard streams away from whoever has started this process.

    Raises:
        NodeStartError: there is no room for what replaces them.
    """
    path = f"{logs}/{LAST_WORDS}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    try:
        words = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NodeStartError(
            f"the node's log {path} cannot be written: {error.strerror}. Make room "
            f"or allow it, or name another directory by --log-dir."
        ) from error
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for descriptor, number in ((nothing, 0), (words, 1), (words, 2)):
        os.dup2(descriptor, number)
    os.close(words)
    os.close(nothing)
    faulthandler.enable(2)
    stand_in_for_streams()
    os.chdir("/")  # or the file system that it was started on could not be unmounted
