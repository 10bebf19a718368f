"""The process of a shared node, from its start to its end.

The process is detached and has no terminal, or it is `aiogpu start --block` itself. Its
`Plan` comes from the command line. The first request to stop drains the node, which
gives running tasks time to end; the second request ends the node at once. Of the daemon
only this module imports uvloop.
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
from aiogpu.daemon.init import become_init
from aiogpu.daemon.journal import Journal, log_standard_streams
from aiogpu.daemon.place import PidfileLock, Place, Record, check_socket
from aiogpu.daemon.readiness import Notifier, Ready, report_failure, report_ready
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import AiogpuError, InternalError, NodeClosedError, NodeStartError
from aiogpu.linux.syscalls import set_process_name
from aiogpu.runtime.directories import BACKLOG

if TYPE_CHECKING:
    from aiogpu.engines.local import LocalEngine
    from aiogpu.observe.metrics import MetricsServer


DRAIN: Final = 30.0
"""Seconds that running tasks have to end when the node is stopped."""
CLOSING: Final = 20.0
"""Most seconds of the close, without the grace period of cancelled tasks."""
OPENING: Final = 120.0
"""Most seconds until a node is ready."""
IMPORTING: Final = 60.0
"""Additional seconds for each preloaded module."""
CRASH_LOG: Final = "node.err"
"""File beside the log for output from below Python, such as a crash report."""


class Plan(NamedTuple):
    """The settings of a shared node.

    Attributes:
        options: the options of the node.
        place: the files of the node.
        drain: seconds that running tasks have to end when the node is stopped.
        sys_path: the import path of the node.
        metrics: port of 127.0.0.1 for Prometheus; None for no metrics.
        max_waiting: most unfinished tasks of a program; None for no limit.
        max_share: largest fraction of each resource that a program may hold.
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
        """The limits of each program; raises `OptionError` if they are invalid."""
        return Limits(self.max_waiting, max_share=self.max_share)

    @property
    def ends_within(self) -> float:
        """Most seconds that the node needs to end after the drain."""
        return CLOSING + self.options.cancel_grace

    @property
    def opens_within(self) -> float:
        """Most seconds until the node is ready."""
        return OPENING + IMPORTING * len(self.options.preload)

    def packed(self) -> bytes:
        """Return the plan as bytes, for the process of the node."""
        fields = self._asdict()
        fields["options"] = self.options._asdict()
        fields["place"] = self.place._asdict()
        return json.dumps(fields).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Plan:
        """Read the bytes of `packed`; raise `ValueError` or `TypeError` for others."""
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
    """Return a node of this machine."""
    from aiogpu.engines.local import LocalEngine

    return LocalEngine(options, loop)


class Service:
    """A shared node and its socket.

    Args:
        plan: the settings of the node.
        notifier: sends messages to the service manager.
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
        """Drain the node and end; at the second call end at once.

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
                self._node.force_close()

    def hang_up(self) -> None:
        """Stop at SIGHUP; shell and kernel may both send it as the terminal closes."""
        if not self._asked.is_set():
            self.ask_to_stop("SIGHUP")

    async def run(self, lock: PidfileLock, on_ready: Callable[[Ready], None]) -> None:
        """Serve until the node is asked to stop; the caller releases the lock.

        Args:
            lock: the lock on the node's files.
            on_ready: called as soon as programs can join.

        Raises:
            NodeError: the node could not start.
            DeviceError: the requested devices do not exist.
        """
        plan, loop = self._plan, asyncio.get_running_loop()
        lock.write(Record.of_this_process(plan.place, plan.drain, plan.ends_within))
        remove(plan.place.drain_file)  # left for a node that has died
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
                self._notifier.send(STOPPING=1, STATUS="lets what runs end")
                await self._drain(node)
            finally:
                if self._metrics is not None:
                    # The thread of the metrics server may wait for this loop.
                    await loop.run_in_executor(None, self._metrics.close)
                begun = time.monotonic()
                await node.close(partial(self._extend, lock))
                _log.info("ended in %s", span(time.monotonic() - begun))
        finally:
            if alive is not None:
                alive.cancel()
            listening.close()
            remove(plan.place.socket)
            remove(plan.place.drain_file)

    def _extend(self, lock: PidfileLock, seconds: float) -> None:
        """Give the node time to end as long as its tasks do, one after the other.

        `aiogpu stop` and the service manager wait for `ends_within` from then on.
        """
        seconds += self._plan.ends_within
        lock.extend(seconds)
        self._notifier.send(EXTEND_TIMEOUT_USEC=round(seconds * 1e6))

    def _begin_metrics(self, node: LocalEngine) -> None:
        if self._plan.metrics is None:
            return
        from aiogpu.observe.metrics import MetricsServer, Seen
        from aiogpu.observe.metrics_server import ADDRESS

        loop = asyncio.get_running_loop()

        def see() -> Seen:
            seeing = asyncio.run_coroutine_threadsafe(node.seen(), loop)
            return Seen(*seeing.result(SEEN_WITHIN))

        self._metrics = MetricsServer(self._plan.metrics, see)
        _log.info("metrics at http://%s:%d/metrics", ADDRESS, self._metrics.port)

    async def _open(self, node: LocalEngine) -> None:
        """Open the node; raise if a request to stop comes first."""
        opening = asyncio.ensure_future(node.open())
        if not await _ends_before(opening, self._asked):
            raise NodeClosedError("the node was asked to stop before it was ready.")
        opening.result()

    async def _drain(self, node: LocalEngine) -> None:
        seconds = drain_seconds(self._plan.place, self._plan.drain)
        _log.info("running tasks have %s to end", span(seconds))
        begun = time.monotonic()
        draining = asyncio.ensure_future(node.drain(seconds))
        if await _ends_before(draining, self._hurried):
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
        self._notifier.send(READY=1, STATUS=f"serves at {place.socket}: {told}")
        return Ready(os.getpid(), total, place.socket, place.logs)

    async def _show_life(self) -> None:
        """Notify the service manager's watchdog, if any, while the loop runs."""
        while self._notifier.interval:
            self._notifier.send(WATCHDOG=1)
            await asyncio.sleep(self._notifier.interval)


async def _ends_before(work: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Await `work`; if the event comes first, cancel the work and return False."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        work.cancel()
        waiting.cancel()
        await asyncio.gather(work, waiting, return_exceptions=True)


def bind(path: str) -> socket.socket:
    """Bind a socket that only this user can use; replace the socket of a dead node.

    Raises:
        NodeStartError: the path is another file, or the socket cannot be made.
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
    """Remove a file; ignore errors."""
    with suppress(OSError):
        os.unlink(path)


def drain_seconds(place: Place, otherwise: float) -> float:
    """Return the seconds that `aiogpu stop --drain` has written, or the default."""
    try:
        with open(place.drain_file, encoding="ascii") as file:
            text = file.read(64)
        os.unlink(place.drain_file)
        return max(0.0, min(float(text), sys.float_info.max))
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError) as error:
        _log.warning("! %s tells no seconds: %s", place.drain_file, error)
        return otherwise


NAME: Final = "aiogpu-node"
"""The name of the node's process in process lists."""
COLLECTED: Final = 10_000
"""Threshold of the youngest generation of the garbage collector. A task's objects are
in no cycle and are freed without it; the default of 700 costs 4 % of the work."""


def run_detached(plan: Plan, pipe: int, make: MakeNode = make_node) -> int:
    """Run a node without a terminal; return the exit code.

    Args:
        plan: the settings of the node.
        pipe: descriptor for the report that the node is ready, or why it failed.
        make: makes the node.
    """

    def on_ready(ready: Ready) -> None:
        report_ready(pipe, ready)
        os.close(pipe)

    set_process_name(NAME)
    try:
        _run_node(plan, on_ready, make, is_detached=True)
    except AiogpuError as error:
        report_failure(pipe, error)
        return 1
    except BaseException as error:
        _log.critical("a defect of aiogpu ended the node", exc_info=True)
        report_failure(
            pipe, InternalError(f"the node ended: {error!r}. Please report.")
        )
        raise
    return 0


def run_here(
    plan: Plan, on_ready: Callable[[Ready], None], make: MakeNode = make_node
) -> None:
    """Run a node in the foreground: Ctrl-C drains it, a second Ctrl-C ends it at once.

    As the first process of a container, this also reaps orphans.

    Args:
        plan: the settings of the node.
        on_ready: called as soon as programs can join.
        make: makes the node.

    Raises:
        NodeError: the node could not start.
        DeviceError: the requested devices do not exist.
    """
    become_init()
    _run_node(plan, on_ready, make, is_detached=False)


def _run_node(
    plan: Plan, on_ready: Callable[[Ready], None], make: MakeNode, is_detached: bool
) -> None:
    import uvloop

    async def serve(lock: PidfileLock) -> None:
        service = Service(plan, Notifier.take(os.environ), make)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(number).name
            loop.add_signal_handler(number, service.ask_to_stop, name)
        told = "SIGHUP: ignored, a node needs no terminal"
        # Not SIG_IGN, which all workers would inherit.
        hung_up = partial(_log.info, told) if is_detached else service.hang_up
        loop.add_signal_handler(signal.SIGHUP, hung_up)
        await service.run(lock, on_ready)

    plan.place.prepare()
    with PidfileLock.take(plan.place) as lock:
        if is_detached:
            _detach_from_terminal(plan.place.logs)
        gc.set_threshold(COLLECTED)
        journal = Journal.begin(plan.place.logs, None if is_detached else sys.stderr)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(lock))
        except AiogpuError as error:
            _log.error("%s", error)
            raise
        finally:
            journal.close()


def _detach_from_terminal(logs: str) -> None:
    """Detach the standard streams from the process that started this one.

    Raises:
        NodeStartError: the file that replaces them cannot be written.
    """
    path = f"{logs}/{CRASH_LOG}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    try:
        output = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NodeStartError(
            f"the node's log {path} cannot be written: {error.strerror}. Make room "
            f"or allow it, or name another directory by --log-dir."
        ) from error
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(output)
    os.close(nothing)
    faulthandler.enable(2)
    log_standard_streams()
    os.chdir("/")  # so that the file system of the old directory can be unmounted
