"""Routes the messages of workers, in order.

A receiver in this program gets a result after the lines that the task has printed. The
terminal may block forever, so the core and other processes get the result at once, and
the task's resources are free.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.core.model.text import printable
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.callers.caller import Child
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.output import Console
from aiogpu.runtime.pending_tasks import Delay, pass_on, pass_on_report, settle
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.payload import MARK
from aiogpu.wire import messages as wire
from aiogpu.wire.messages import ProtocolError

if TYPE_CHECKING:
    from aiogpu.client.interface import Outcome, Receiver
    from aiogpu.core.model.request import Environment
    from aiogpu.runtime.connection import Peer
    from aiogpu.runtime.workers.death import Death


_log: Final = logging.getLogger(__name__)


FEW: Final = 4
"""Submissions without messages in between, after which the clock is read."""


EVERY: Final = 300e-6
"""Least seconds between two polls; an idle worker busy-waits for as long."""


SHARE: Final = 20
"""Polling takes at most 1/`SHARE` of the time, even with many workers."""


LONGEST: Final = 1e-3
"""Most seconds that one submission spends on messages; at least one batch is read."""


PROCESSING: Final = -(1 << 60)
"""`InlinePoller.count` while messages are processed: no poll may start then."""


class InlinePoller:
    """Reads workers' answers while the program submits tasks, so workers get more.

    `[f.remote(x) for x in many]` keeps the loop busy until its end. Without polling,
    workers would be idle for a third of the time of short gathered calls. Awaiting code
    is still resumed by the loop.

    Attributes:
        count: submissions since the last messages or the last look at the clock;
            `PROCESSING` while messages are processed.
    """

    __slots__ = ("_before", "_due", "_first", "_workers", "count")

    def __init__(
        self, workers: Mapping[int, LiveWorker], before: Callable[[], object]
    ) -> None:
        """Make a poller; `before` is called before messages are read."""
        self.count = 0
        self._before = before
        self._workers = workers
        self._due = 0.0
        self._first = 0

    def __repr__(self) -> str:
        return f"<InlinePoller of {self.count}>"

    def note(self) -> None:
        """Count a submission by code of this process, before it is made."""
        self.count += 1
        if self.count > FEW:
            self.look()

    def look(self) -> None:
        """Read workers' messages, if a poll is due."""
        started, self.count = perf_counter(), 0
        if started < self._due:
            return
        self.count = PROCESSING
        try:
            self._before()
            started = perf_counter()
            ready = self._ready()
            took = perf_counter() - started
            self._read(ready, started + took + LONGEST)
        finally:
            self.count = 0
        self._due = perf_counter() + max(EVERY, took * SHARE)

    def _ready(self) -> list[Peer]:
        poll, peers = select.poll(), {}
        for worker in self._workers.values():
            peer = worker.peer
            if peer is not None and (descriptor := peer.readable) >= 0:
                peer.send_posted()
                poll.register(descriptor, select.POLLIN)
                peers[descriptor] = peer
        return [peers[descriptor] for descriptor, _ in poll.poll(0)]

    def _read(self, ready: list[Peer], until: float) -> None:
        # Start with a worker that was not reached last time.
        first = self._first if self._first < len(ready) else 0
        for place in (*range(first, len(ready)), *range(first)):
            if ready[place].readable >= 0:  # earlier messages may have closed it
                _read_now(ready[place])
            if perf_counter() > until:
                self._first = place + 1
                return
        self._first = 0


def _read_now(peer: Peer) -> None:
    try:
        peer.read_now()
    except Exception:  # noqa: BLE001 - other workers go on
        _log.exception("! cut off %r", peer)
        peer.abort()


class DelayedReceiver:
    """Settles another receiver once a line of the console is written, in order.

    Attributes:
        number: the number of the line.
    """

    __slots__ = ("_console", "_receiver", "number")

    def __init__(self, receiver: Receiver, console: Console, number: int) -> None:
        self.number = number
        self._receiver = receiver
        self._console = console

    def __repr__(self) -> str:
        return f"<DelayedReceiver {self._receiver!r} after line {self.number}>"

    def settle(self, outcome: Outcome) -> None:
        """Pass on the outcome."""
        self._console.after(self.number, partial(settle, self._receiver, outcome))

    def receive_report(self, lost: int, payload: bytes) -> None:
        """Pass on a report at once, without waiting for the line."""
        pass_on_report(self._receiver, lost, payload)

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Pass on pickled items, in order."""
        self._console.after(self.number, partial(pass_on, self._receiver, payloads))


def delayed(receiver: Receiver, console: Console, number: int) -> Receiver:
    """Delay a receiver until line `number` is written, if it is of this program."""
    if isinstance(receiver, Child | Actor):
        return receiver
    if isinstance(receiver, DelayedReceiver):
        receiver.number = number
        return receiver
    return DelayedReceiver(receiver, console, number)


_ANSWERS: Final = frozenset({wire.Done, wire.Failed})


_CARRIERS: Final = _ANSWERS | {
    wire.Submit,
    wire.Ask,
    wire.Make,
    wire.Put,
    wire.PutFailed,
}
"""Messages whose payload may refer to values, actors or shared memory."""


_RESULTS: Final = _ANSWERS | {wire.Created, wire.Items}
"""Messages that are passed on to a receiver, and so wait for earlier output."""


class NestedRequests(Protocol):
    """Handles the requests of tasks about their children, values and actors."""

    def on_message(self, caller: LiveWorker, message: wire.Message, /) -> None:
        """Handle one message."""

    def withdraw_call(self, caller: LiveWorker, child: int, /) -> None:
        """Cancel a call of an actor."""


class WorkerEvents(Protocol):
    """The receiver of workers' events and messages: the driver.

    Attributes:
        burst: reads workers' messages while the program submits tasks.
        workers: live workers by id; the pool updates it.
        requests: handles the requests of tasks.
    """

    workers: dict[int, LiveWorker]

    @property
    def burst(self) -> InlinePoller:
        """See above."""

    @property
    def requests(self) -> NestedRequests:
        """See above."""

    def on_started(self, worker: int) -> None:
        """Handle that a worker has connected."""

    def on_gone(self, worker: int, death: Death, is_left: bool = False) -> None:
        """Handle that a worker has ended; its messages were all passed on before.

        `is_left`: it was killed, but has processes that have not ended; `on_ended`
        follows when they have.
        """

    def on_ended(self, worker: int, pid: int) -> None:
        """Handle that the processes of a worker that was gone before have ended."""

    def on_slow_import(self) -> None:
        """Handle that a worker imports a module that takes long."""

    def on_outdated(self, environment: Environment) -> None:
        """Handle that spare workers of an environment come from a replaced zygote."""

    def on_done(self, worker: int, answers: list[wire.Done], /) -> None:
        """Handle plain results of several tasks, in order."""

    def on_answer(self, worker: int, answer: wire.Done | wire.Failed, /) -> None:
        """Handle the answer to a task."""

    def on_items(self, worker: LiveWorker, message: wire.Items, /) -> None:
        """Handle items that the generator of a task or call has yielded."""

    def on_skipped(self, worker: int, skipped: wire.Skipped) -> None:
        """Handle that a worker has skipped a task."""

    def on_began(self, worker: LiveWorker, began: wire.Began) -> None:
        """Handle that the code of a task or call with a `run_timeout` has begun."""

    def on_halted(self, worker: LiveWorker, halted: wire.Halted) -> None:
        """Handle that a task or call stands at a breakpoint, or goes on."""

    def on_acting(
        self, worker: int, message: wire.Done | wire.Failed | wire.Created, /
    ) -> None:
        """Handle an answer of an actor's process, or the end of its constructor."""

    def on_cut_short(self, error: BaseException) -> None:
        """Handle an exception that has left an event half handled."""

    def on_fault(
        self, worker: LiveWorker, message: wire.Message, error: Exception
    ) -> None:
        """Handle an internal error that a worker's message has raised."""

    def delay(self, worker: LiveWorker, task: int, delay: Delay) -> None:
        """Wrap the receiver of a task or call, or all of a worker (`EACH`)."""

    def name_of(self, task: int) -> str:
        """Return the name of a task, or "" if it has ended."""


class MessageRouter:
    """Passes each message of a worker to its handler."""

    def __init__(
        self,
        console: Console,
        events: WorkerEvents,
        store: Store,
        on_import: Callable[[LiveWorker, wire.Importing | wire.Imported], None],
    ) -> None:
        """Make a router.

        Args:
            console: shows the output of workers.
            events: handles all other messages.
            store: resolves the references in payloads.
            on_import: called when a worker imports a module, and with its imports.
        """
        self._events = events
        self._store = store
        self._on_import = on_import
        self._poller = events.burst
        self._console = console

    def route(self, worker: LiveWorker, messages: list[wire.Message]) -> None:
        """Process messages of one worker that arrived together, in order."""
        output, console = worker.slot.output, self._console
        # Raw output was written before the answers were sent, so read it first.
        output.catch_up()
        done: list[wire.Done] = []
        self._poller.count = PROCESSING
        try:
            for message in messages:
                if (
                    type(message) is wire.Done
                    and message.payload[:1] != MARK
                    and output.number <= console.written
                ):
                    # By far the most frequent case: pass on plain results together.
                    if worker.actor is None:
                        done.append(message)
                        if output.last:
                            output.forget(message.task)
                        continue
                    try:
                        self._events.on_acting(worker.id, message)
                    except Exception as error:  # noqa: BLE001 - see `on_fault`
                        self._events.on_fault(worker, message, error)
                    continue
                if done:
                    self._pass_on_done(worker, done)
                    done = []
                if not self._route_one(worker, message):
                    return
            if done:
                self._pass_on_done(worker, done)
        finally:
            self._poller.count = 0

    def _pass_on_done(self, worker: LiveWorker, done: list[wire.Done]) -> None:
        try:
            self._events.on_done(worker.id, done)
        except Exception as error:  # noqa: BLE001 - see `on_fault`
            for answer in done:
                self._events.on_fault(worker, answer, error)

    def _route_one(self, worker: LiveWorker, message: wire.Message) -> bool:
        """Process one message; return False if the worker was cut off for it."""
        output, kind = worker.slot.output, type(message)
        if output.last and kind in _ANSWERS and worker.actor is None:
            # Not later: the worker's death may be noted before the answer is passed on.
            output.forget(message.task)  # type: ignore[union-attr]
        try:
            if kind is wire.Log or kind is wire.Record:
                self._show(worker, message)  # type: ignore[arg-type]
                return True
            message = self._admit(worker, message)
            if output.number > self._console.written and kind in _RESULTS:
                self.delay(worker, message.task)  # type: ignore[union-attr]
            self._pass_on(worker, message)
        except (ProtocolError, OSError) as error:
            _log.warning("! cut off worker %d: %s", worker.id, error)
            if worker.peer is not None:
                worker.peer.abort()
            return False
        except Exception as error:  # noqa: BLE001 - see `on_fault`
            self._events.on_fault(worker, message, error)
        return True

    def _admit(self, worker: LiveWorker, message: wire.Message) -> wire.Message:
        """Return a message whose payload holds its references.

        Raises:
            ProtocolError: the payload contains an unknown reference.
            OSError: shared memory cannot be received.
        """
        if isinstance(message, wire.Items):
            admit = partial(self._store.admit, worker)
            return message._replace(payloads=tuple(map(admit, message.payloads)))
        payload = message.payload if type(message) in _CARRIERS else None  # type: ignore[union-attr]
        if payload is None or payload[:1] != MARK:
            return message
        return message._replace(payload=self._store.admit(worker, payload))  # type: ignore[call-arg]

    def delay(self, worker: LiveWorker, task: int) -> None:
        """Deliver results to this program only after the worker's earlier output."""
        number = worker.slot.output.number
        if number > self._console.written:
            delay = partial(delayed, console=self._console, number=number)
            self._events.delay(worker, task, delay)

    def _pass_on(self, worker: LiveWorker, message: wire.Message) -> None:
        if isinstance(message, wire.Items):
            self._events.on_items(worker, message)
        elif worker.actor is not None and isinstance(
            message, wire.Done | wire.Failed | wire.Created
        ):
            self._events.on_acting(worker.id, message)
        elif isinstance(message, wire.Done | wire.Failed):
            self._events.on_answer(worker.id, message)
        elif isinstance(message, wire.Skipped):
            self._events.on_skipped(worker.id, message)
        elif isinstance(message, wire.Began):
            self._events.on_began(worker, message)
        elif isinstance(message, wire.Importing | wire.Imported):
            self._on_import(worker, message)
        elif isinstance(message, wire.Halted):
            self._events.on_halted(worker, message)
        else:
            self._events.requests.on_message(worker, message)

    def _show(self, worker: LiveWorker, log: wire.Log | wire.Record) -> None:
        output = worker.slot.output
        label = output.label
        # A thread of a task may print after the task has ended.
        name = self._events.name_of(log.task) if log.task else ""
        if name:
            # A line end in the name would break the line in the log.
            label = f"{printable(name)} pid={worker.pid}"
        if isinstance(log, wire.Record):
            output.log(label, log.text, log.fields, log.task)
        else:
            output.show(log.stream, label, log.line, log.task)
