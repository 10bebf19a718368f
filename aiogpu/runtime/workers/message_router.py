"""What workers say, in order.

Who waits in this program hears of an answer when the lines printed before it are out: a
terminal may block for ever, and the core and other processes hear of the answer at
once, so that what its task held is free.

`[f.remote(x) for x in many]` holds the loop for as long as it takes, and workers that
have done what they were sent would rest meanwhile: a third of the time of gathered
calls, when they are short. So a `InlinePoller` reads what has come in between, and
workers are sent more. Who awaits is told by the loop, as ever.
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
from aiogpu.runtime.output.console import Console
from aiogpu.runtime.pending_tasks import Delay, pass_on, settle
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.payload import MARK
from aiogpu.wire import messages as wire

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import Environment
    from aiogpu.runtime.connection import Peer
    from aiogpu.runtime.objects.segments import ActorRegister
    from aiogpu.runtime.workers.death import Death


_log: Final = logging.getLogger(__name__)


FEW: Final = 4
"""Submissions in a row, with no answer heard between them, after which it is looked
whether it is time."""


EVERY: Final = 300e-6
"""Seconds between two looks at least; a worker stays awake for as long."""


SHARE: Final = 20
"""Looking costs at most one part in so many of the time, however many workers."""


LONGEST: Final = 1e-3
"""Seconds of answers that are taken in by one submission; one row of them at least."""


HEARING: Final = -(1 << 60)
"""Counted while answers are taken in: none are to be heard amid others."""


class InlinePoller:
    """See above; whoever submits for code of this process counts, and then looks.

    Attributes:
        count: submissions since answers were heard, or the clock was looked at;
            `HEARING` while answers are heard.
    """

    __slots__ = ("_before", "_due", "_first", "_workers", "count")

    def __init__(
        self, workers: Mapping[int, LiveWorker], before: Callable[[], object]
    ) -> None:
        """Prepare; `before` is called before answers are heard."""
        self.count = 0
        self._before = before
        self._workers = workers
        self._due = 0.0
        self._first = 0

    def __repr__(self) -> str:
        return f"<InlinePoller of {self.count}>"

    def note(self) -> None:
        """Code of this process is about to submit something."""
        self.count += 1
        if self.count > FEW:
            self.look()

    def look(self) -> None:
        """Take in what workers have said, if it is time."""
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
        # Who was not heard the last time is heard first.
        first = self._first if self._first < len(ready) else 0
        for place in (*range(first, len(ready)), *range(first)):
            if ready[place].readable >= 0:  # still, whatever the others have said
                _take_in(ready[place])
            if perf_counter() > until:
                self._first = place + 1
                return
        self._first = 0


def _take_in(peer: Peer) -> None:
    try:
        peer.read_now()
    except Exception:  # noqa: BLE001 - one of them harms no other
        _log.exception("! cut off %r", peer)
        peer.abort()


class DelayedReceiver:
    """Tells another receiver after a line of the console's, in the order of calls.

    Attributes:
        number: of that line.
    """

    __slots__ = ("_console", "_receiver", "number")

    def __init__(self, receiver: Receiver, console: Console, number: int) -> None:
        self.number = number
        self._receiver = receiver
        self._console = console

    def __repr__(self) -> str:
        return f"<DelayedReceiver {self._receiver!r} after line {self.number}>"

    def receive(self, outcome: bytes | wire.Failed | Exception) -> None:
        """Take the pickled result, or what there is in its place."""
        self._console.after(self.number, partial(settle, self._receiver, outcome))

    reject = fail = receive

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items, in order."""
        self._console.after(self.number, partial(pass_on, self._receiver, payloads))


def delayed(receiver: Receiver, console: Console, number: int) -> Receiver:
    """The receiver to be told after line `number`; others' are told at once."""
    if isinstance(receiver, Child | Actor):
        return receiver
    if isinstance(receiver, DelayedReceiver):
        receiver.number = number
        return receiver
    return DelayedReceiver(receiver, console, number)


_CARRIERS: Final = frozenset(
    {wire.Done, wire.Failed, wire.Submit, wire.Ask, wire.Make, wire.Put, wire.PutFailed}
)
"""The messages whose payload may refer to values, actors or shared memory."""


_ANSWERS: Final = frozenset({wire.Done, wire.Failed})


_TOLD: Final = frozenset({wire.Done, wire.Failed, wire.Created, wire.Items})
"""Those of which a receiver of the program's is told."""


class WorkerEvents(Protocol):
    """Is told what becomes of workers, and what they say: the driver.

    Attributes:
        burst: has workers heard while the program submits.
        actors: those of the node.
    """

    @property
    def burst(self) -> InlinePoller:
        """See above."""

    @property
    def actors(self) -> ActorRegister:
        """See above."""

    def on_started(self, worker: int) -> None:
        """A worker has connected."""

    def on_gone(self, worker: int, death: Death) -> None:
        """A worker has ended, and all that it had said was passed on."""

    def on_outdated(self, environment: Environment) -> None:
        """Workers for it that wait for work come from a zygote that was replaced."""

    def on_done(self, worker: int, answers: list[wire.Done], /) -> None:
        """Tasks have ended one after the other, with plain results."""

    def on_answer(self, worker: int, answer: wire.Done | wire.Failed, /) -> None:
        """A task has ended."""

    def on_items(self, worker: LiveWorker, message: wire.Items, /) -> None:
        """A task's or a call's generator has yielded."""

    def on_skipped(self, worker: int, skipped: wire.Skipped) -> None:
        """A task was not run."""

    def on_acting(
        self, worker: int, message: wire.Done | wire.Failed | wire.Created, /
    ) -> None:
        """An actor's process says something."""

    def on_nested(self, worker: LiveWorker, message: wire.Message, /) -> None:
        """A task says something of its children."""

    def on_fault(
        self, worker: LiveWorker, message: wire.Message, error: Exception
    ) -> None:
        """A message was not taken in, for no fault of the worker's."""

    def delay(self, worker: LiveWorker, task: int, delay: Delay) -> None:
        """A worker has printed lines that are not out: tell of this task later.

        Or of this call; `EACH`: of each that the worker has.
        """

    def name_of(self, task: int) -> str:
        """Return the name of a task, "" if it has ended."""


class MessageRouter:
    """Passes on what workers say to whoever has asked for it."""

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
            events: is told all that concerns neither of them.
            store: keeps what payloads refer to.
            on_imported: told what a worker has imported.
        """
        self._events = events
        self._store = store
        self._on_imported = on_imported
        self._poller = events.burst
        self._console = console

    def hear(self, worker: LiveWorker, messages: list[wire.Message]) -> None:
        """Take in what has come together from one worker."""
        output, console = worker.slot.output, self._console
        # Written before the answers were sent, so once is enough for all of them.
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
                    # By far the commonest; what has come together is told together.
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
                    try:
                        self._events.on_done(worker.id, done)
                    except Exception as error:  # noqa: BLE001 - as above
                        self._tell_fault(worker, done, error)
                    done = []
                if not self._take(worker, message):
                    return
            if done:
                try:
                    self._events.on_done(worker.id, done)
                except Exception as error:  # noqa: BLE001 - as above
                    self._tell_fault(worker, done, error)
        finally:
            self._poller.count = 0

    def _tell_fault(
        self, worker: LiveWorker, done: list[wire.Done], error: Exception
    ) -> None:
        for message in done:
            self._events.on_fault(worker, message, error)

    def _take(self, worker: LiveWorker, message: wire.Message) -> bool:
        """Take in one of them; False if the worker was cut off for it."""
        output, kind = worker.slot.output, type(message)
        if output.last and kind in _ANSWERS and worker.actor is None:
            # Now: a worker's death may be noted before the answer is passed on.
            output.forget(message.task)  # type: ignore[union-attr]
        payload = message.payload if kind in _CARRIERS else None  # type: ignore[union-attr]
        if kind is wire.Items or (payload is not None and payload[:1] == MARK):
            admitted = self._admit(worker, message)
            if admitted is None:
                return False
            message = admitted
        if kind is wire.Log:
            self._show(worker, message)  # type: ignore[arg-type]
        else:
            if output.number > self._console.written and kind in _TOLD:
                self.delay(worker, message.task)  # type: ignore[union-attr]
            self._pass_on(worker, message)
        return True

    def delay(self, worker: LiveWorker, task: int) -> None:
        """Have who waits in this program told after the lines that were printed."""
        number = worker.slot.output.number
        if number > self._console.written:
            delay = partial(delayed, console=self._console, number=number)
            self._events.delay(worker, task, delay)

    def _admit(self, worker: LiveWorker, message: wire.Message) -> wire.Message | None:
        """Take in what a message refers to; None if the worker has made that up."""
        admit = partial(self._store.admit, worker)
        try:
            if isinstance(message, wire.Items):
                return message._replace(payloads=tuple(map(admit, message.payloads)))
            payload = admit(message.payload)  # type: ignore[union-attr, arg-type]
        except (ProtocolError, OSError) as error:
            _cut_off(worker, error)
            return None
        return message._replace(payload=payload)  # type: ignore[call-arg]

    def _pass_on(self, worker: LiveWorker, message: wire.Message) -> None:
        try:
            self._tell(worker, message)
        except (ProtocolError, OSError) as error:
            _cut_off(worker, error)
        except Exception as error:  # noqa: BLE001 - one of them harms no other
            self._events.on_fault(worker, message, error)

    def _tell(self, worker: LiveWorker, message: wire.Message) -> None:
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
        elif isinstance(message, wire.Imported):
            self._on_imported(worker, message)
        else:
            self._events.on_nested(worker, message)

    def _show(self, worker: LiveWorker, log: wire.Log) -> None:
        output = worker.slot.output
        label = output.label
        if log.task:
            # A name of two lines would be a line of its own in the log.
            label = f"{printable(self._events.name_of(log.task))} pid={worker.pid}"
        output.show(log.stream, label, log.line, log.task)


def _cut_off(worker: LiveWorker, error: Exception) -> None:
    """It has said what it may not."""
    _log.warning("! cut off worker %d: %s", worker.id, error)
    if worker.peer is not None:
        worker.peer.abort()
