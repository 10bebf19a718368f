"""Routes the messages of workers, in order.

A receiver in this program gets a result after the lines that its task has printed. The
terminal may block for ever, so the core and other processes get the result at once, and
what the task held is free.

`[f.remote(x) for x in many]` keeps the loop busy until its end. Workers that have done
what they were sent would be idle meanwhile, for a third of the time of short gathered
calls. So an `InlinePoller` reads their messages in between, and they are sent more. The
loop itself resumes whoever awaits, as always.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.core.model.text import printable
from aiogpu.errors import ProtocolError
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.callers.caller import Child
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.output import Console
from aiogpu.runtime.pending_tasks import Delay, pass_on, pass_on_report, settle
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.payload import MARK
from aiogpu.wire import messages as wire

if TYPE_CHECKING:
    from aiogpu.client.interface import Outcome, Receiver
    from aiogpu.core.model.request import Environment
    from aiogpu.runtime.connection import Peer
    from aiogpu.runtime.workers.death import Death


_log: Final = logging.getLogger(__name__)


FEW: Final = 4
"""Submissions in a row, without messages in between, after which the clock is read."""


EVERY: Final = 300e-6
"""Least seconds between two polls; an idle worker busy-waits for as long."""


SHARE: Final = 20
"""Polling takes at most 1/`SHARE` of the time, however many workers there are."""


LONGEST: Final = 1e-3
"""Seconds that one submission may spend on messages; at least one batch is read."""


HEARING: Final = -(1 << 60)
"""The count while messages are processed: no poll may start in between."""


class InlinePoller:
    """Reads workers' messages while the program submits; see above.

    Attributes:
        count: submissions since messages were read or the clock was; `HEARING` while
            messages are processed.
    """

    __slots__ = ("_before", "_due", "_first", "_workers", "count")

    def __init__(
        self, workers: Mapping[int, LiveWorker], before: Callable[[], object]
    ) -> None:
        """Prepare; `before` is called before messages are read."""
        self.count = 0
        self._before = before
        self._workers = workers
        self._due = 0.0
        self._first = 0

    def __repr__(self) -> str:
        return f"<InlinePoller of {self.count}>"

    def note(self) -> None:
        """Count a submission by code of this process that is about to be made."""
        self.count += 1
        if self.count > FEW:
            self.look()

    def look(self) -> None:
        """Read workers' messages, if it is time."""
        begun, self.count = perf_counter(), 0
        if begun < self._due:
            return
        self.count = HEARING
        try:
            self._before()
            begun = perf_counter()
            ready = self._ready()
            took = perf_counter() - begun
            self._hear(ready, begun + took + LONGEST)
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

    def _hear(self, ready: list[Peer], until: float) -> None:
        # Begin with a worker that was not reached the last time.
        first = self._first if self._first < len(ready) else 0
        for place in (*range(first, len(ready)), *range(first)):
            if ready[place].readable >= 0:  # the others' messages may have closed it
                _take_in(ready[place])
            if perf_counter() > until:
                self._first = place + 1
                return
        self._first = 0


def _take_in(peer: Peer) -> None:
    try:
        peer.read_now()
    except Exception:  # noqa: BLE001 - one worker harms no other
        _log.exception("! cut off %r", peer)
        peer.abort()


class DelayedReceiver:
    """Passes on to another receiver once a line of the console is out, in order.

    Attributes:
        number: the line's number.
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
        """Pass on a report, which waits for no lines."""
        pass_on_report(self._receiver, lost, payload)

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items, in order."""
        self._console.after(self.number, partial(pass_on, self._receiver, payloads))


def delayed(receiver: Receiver, console: Console, number: int) -> Receiver:
    """Delay a receiver of this program until line `number` is out; not others'."""
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


_TOLD: Final = _ANSWERS | {wire.Created, wire.Items}
"""Messages that are passed on to a receiver of this program."""


class NestedRequests(Protocol):
    """Takes in what tasks ask: about their children, values and actors."""

    def on_message(self, caller: LiveWorker, message: wire.Message, /) -> None:
        """Take in one message."""

    def withdraw_call(self, caller: LiveWorker, child: int, /) -> None:
        """Cancel a call of an actor."""


class WorkerEvents(Protocol):
    """The receiver of workers' events and messages: the driver.

    Attributes:
        burst: has workers heard while the program submits.
        workers: live workers by id; the pool keeps it.
        requests: takes in what tasks ask.
    """

    workers: dict[int, LiveWorker]

    @property
    def burst(self) -> InlinePoller:
        """See above."""

    @property
    def requests(self) -> NestedRequests:
        """See above."""

    def on_started(self, worker: int) -> None:
        """A worker has connected."""

    def on_gone(self, worker: int, death: Death) -> None:
        """A worker has ended, and all its messages were passed on."""

    def on_outdated(self, environment: Environment) -> None:
        """Spare workers of this environment come from a zygote that was replaced."""

    def on_done(self, worker: int, answers: list[wire.Done], /) -> None:
        """Tasks have ended one after the other, with plain results."""

    def on_answer(self, worker: int, answer: wire.Done | wire.Failed, /) -> None:
        """A task has ended."""

    def on_items(self, worker: LiveWorker, message: wire.Items, /) -> None:
        """The generator of a task or call has yielded."""

    def on_skipped(self, worker: int, skipped: wire.Skipped) -> None:
        """A task was not run."""

    def on_began(self, worker: LiveWorker, began: wire.Began) -> None:
        """The code of a task or call has begun whose run is timed."""

    def on_acting(
        self, worker: int, message: wire.Done | wire.Failed | wire.Created, /
    ) -> None:
        """An actor's process reports a result, or its start."""

    def on_fault(
        self, worker: LiveWorker, message: wire.Message, error: Exception
    ) -> None:
        """A message could not be processed because of a bug in aiogpu."""

    def delay(self, worker: LiveWorker, task: int, delay: Delay) -> None:
        """Deliver the result of a task or call after the lines printed before it.

        `EACH` stands for all tasks and calls of the worker.
        """

    def name_of(self, task: int) -> str:
        """Return the name of a task, "" if it has ended."""


class MessageRouter:
    """Passes on each message of a worker to its recipient."""

    def __init__(
        self,
        console: Console,
        events: WorkerEvents,
        store: Store,
        on_imported: Callable[[LiveWorker, wire.Imported], None],
    ) -> None:
        """Prepare.

        Args:
            console: shows what workers print.
            events: is told everything else.
            store: keeps what payloads refer to.
            on_imported: is told what a worker has imported.
        """
        self._events = events
        self._store = store
        self._on_imported = on_imported
        self._poller = events.burst
        self._console = console

    def hear(self, worker: LiveWorker, messages: list[wire.Message]) -> None:
        """Process messages of one worker that arrived together, in order."""
        output, console = worker.slot.output, self._console
        # Its raw output was written before the answers were sent: once is enough.
        output.catch_up()
        done: list[wire.Done] = []
        self._poller.count = HEARING
        try:
            for message in messages:
                if (
                    type(message) is wire.Done
                    and message.payload[:1] != MARK
                    and output.number <= console.written
                ):
                    # By far the most frequent: plain results are passed on together.
                    if worker.actor is None:
                        done.append(message)
                        if output.last:
                            output.forget(message.task)
                        continue
                    try:
                        self._events.on_acting(worker.id, message)
                    except Exception as error:  # noqa: BLE001 - one harms no other
                        self._events.on_fault(worker, message, error)
                    continue
                if done:
                    self._pass_on_done(worker, done)
                    done = []
                if not self._take(worker, message):
                    return
            if done:
                self._pass_on_done(worker, done)
        finally:
            self._poller.count = 0

    def _pass_on_done(self, worker: LiveWorker, done: list[wire.Done]) -> None:
        try:
            self._events.on_done(worker.id, done)
        except Exception as error:  # noqa: BLE001 - one harms no other
            for each in done:
                self._events.on_fault(worker, each, error)

    def _take(self, worker: LiveWorker, message: wire.Message) -> bool:
        """Process one message; return False if the worker was cut off for it."""
        output, kind = worker.slot.output, type(message)
        if output.last and kind in _ANSWERS and worker.actor is None:
            # Now: the worker's death may be noted before the answer is passed on.
            output.forget(message.task)  # type: ignore[union-attr]
        try:
            if kind is wire.Log or kind is wire.Record:
                self._show(worker, message)  # type: ignore[arg-type]
                return True
            message = self._admit(worker, message)
            if output.number > self._console.written and kind in _TOLD:
                self.delay(worker, message.task)  # type: ignore[union-attr]
            self._pass_on(worker, message)
        except (ProtocolError, OSError) as error:
            _log.warning("! cut off worker %d: %s", worker.id, error)
            if worker.peer is not None:
                worker.peer.abort()
            return False
        except Exception as error:  # noqa: BLE001 - one harms no other
            self._events.on_fault(worker, message, error)
        return True

    def _admit(self, worker: LiveWorker, message: wire.Message) -> wire.Message:
        """Take over what a message refers to.

        Raises:
            ProtocolError: the worker has made a reference up.
            OSError: shared memory cannot be taken over.
        """
        if isinstance(message, wire.Items):
            admit = partial(self._store.admit, worker)
            return message._replace(payloads=tuple(map(admit, message.payloads)))
        payload = message.payload if type(message) in _CARRIERS else None  # type: ignore[union-attr]
        if payload is None or payload[:1] != MARK:
            return message
        return message._replace(payload=self._store.admit(worker, payload))  # type: ignore[call-arg]

    def delay(self, worker: LiveWorker, task: int) -> None:
        """Deliver results to this program after the lines that were printed before."""
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
        elif isinstance(message, wire.Imported):
            self._on_imported(worker, message)
        else:
            self._events.requests.on_message(worker, message)

    def _show(self, worker: LiveWorker, log: wire.Log | wire.Record) -> None:
        output = worker.slot.output
        label = output.label
        if log.task:
            # A name of two lines would be a line of its own in the log.
            label = f"{printable(self._events.name_of(log.task))} pid={worker.pid}"
        if isinstance(log, wire.Record):
            output.log(label, log.text, log.fields, log.task)
        else:
            output.show(log.stream, label, log.line, log.task)
