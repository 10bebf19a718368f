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
from typing import TYPE_CHECKING, Any, Final, cast

from aiogpu.client.interface import ItemReceiver
from aiogpu.core.model.text import printable
from aiogpu.errors import ProtocolError
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.callers.caller import Carrying, Child
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.output.console import Console
from aiogpu.runtime.pending_tasks import Delay
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.payload import MARK
from aiogpu.wire.messages import (
    Ask,
    Created,
    Done,
    Failed,
    Imported,
    Items,
    Log,
    Make,
    Message,
    Put,
    Skipped,
    Submit,
)

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.runtime.connection import Peer


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
        before: called before answers are heard.
    """

    __slots__ = ("_due", "_first", "_workers", "before", "count")

    def __init__(self, workers: Mapping[int, LiveWorker]) -> None:
        self.before: Callable[[], object] = _nothing
        self.count = 0
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
            self.before()
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


def _nothing() -> None:
    """Nobody has submitted anything yet."""


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

    def _delay(self, tell: Callable[..., None], *told: Any) -> None:
        self._console.after(self.number, partial(tell, *told))

    def receive(self, payload: bytes) -> None:
        """Take the pickled result."""
        self._delay(self._receiver.receive, payload)

    def reject(self, failed: Failed) -> None:
        """Take what the worker says of its failure in place of a result."""
        self._delay(self._receiver.reject, failed)

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result."""
        self._delay(self._receiver.fail, error)

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items, in order."""
        self._delay(cast("ItemReceiver", self._receiver).receive_items, payloads)


def delayed(receiver: Receiver, console: Console, number: int) -> Receiver:
    """The receiver to be told after line `number`; others' are told at once."""
    if isinstance(receiver, Child | Carrying | Actor):
        return receiver
    if isinstance(receiver, DelayedReceiver):
        receiver.number = number
        return receiver
    return DelayedReceiver(receiver, console, number)


_CARRIERS: Final = frozenset({Done, Submit, Ask, Make, Put})
"""The messages whose payload may refer to values or to shared memory."""


_ANSWERS: Final = frozenset({Done, Failed})


_TOLD: Final = frozenset({Done, Failed, Created, Items})
"""Those of which a receiver of the program's is told."""


class MessageRouter:
    """Passes on what workers say to whoever has asked for it.

    Attributes:
        on_answer: told of a task's end, by the driver's wish.
        on_done: told of tasks that have ended one after the other, with plain results.
        on_items: told what a task's or a call's generator has yielded.
        on_skipped: told of a task that was not run.
        on_behind: told that a worker has printed lines which are not out: what has
            receivers told after them, and of which task or call; `EACH` for each that
            the worker has.
        on_nested: told what a task says of its children.
        on_acting: told what an actor's process says.
        store: keeps what payloads refer to.
        on_imported: told what a worker has imported.
        on_fault: told of a message that was not taken in, for no fault of the worker's.
        name_of: gives the name of a task.
        burst: says whether what is submitted may have workers heard.
    """

    def __init__(
        self,
        console: Console,
        burst: InlinePoller,
        on_imported: Callable[[LiveWorker, Imported], None],
    ) -> None:
        self.on_answer: Callable[[int, Done | Failed], None]
        self.on_done: Callable[[int, list[Done]], None]
        self.on_items: Callable[[LiveWorker, Items], None]
        self.on_skipped: Callable[[int, Skipped], None]
        self.on_behind: Callable[[LiveWorker, int, Delay], None]
        self.on_nested: Callable[[LiveWorker, Message], None]
        self.on_acting: Callable[[int, Done | Failed | Created], None]
        self.on_fault: Callable[[LiveWorker, Message, Exception], None]
        self.on_imported = on_imported
        self.name_of: Callable[[int], str]
        self.store: Store
        self.burst = burst
        self._console = console

    def hear(self, worker: LiveWorker, messages: list[Message]) -> None:
        """Take in what has come together from one worker."""
        output, console = worker.slot.output, self._console
        # Written before the answers were sent, so once is enough for all of them.
        output.catch_up()
        done: list[Done] = []
        self.burst.count = HEARING
        try:
            for message in messages:
                if (
                    type(message) is Done
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
                        self.on_acting(worker.id, message)
                    except Exception as error:  # noqa: BLE001 - one harms no other
                        self.on_fault(worker, message, error)
                    continue
                if done:
                    try:
                        self.on_done(worker.id, done)
                    except Exception as error:  # noqa: BLE001 - as above
                        self._tell_fault(worker, done, error)
                    done = []
                if not self._take(worker, message):
                    return
            if done:
                try:
                    self.on_done(worker.id, done)
                except Exception as error:  # noqa: BLE001 - as above
                    self._tell_fault(worker, done, error)
        finally:
            self.burst.count = 0

    def _tell_fault(
        self, worker: LiveWorker, done: list[Done], error: Exception
    ) -> None:
        for message in done:
            self.on_fault(worker, message, error)

    def _take(self, worker: LiveWorker, message: Message) -> bool:
        """Take in one of them; False if the worker was cut off for it."""
        output, kind = worker.slot.output, type(message)
        if output.last and kind in _ANSWERS and worker.actor is None:
            # Now: a worker's death may be noted before the answer is passed on.
            output.forget(message.task)  # type: ignore[union-attr]
        if (kind in _CARRIERS and message.payload[:1] == MARK) or kind is Items:  # type: ignore[union-attr, index]
            admitted = self._admit(worker, message)
            if admitted is None:
                return False
            message = admitted
        if kind is Log:
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
            # Late: most tasks print nothing.

            delay = partial(delayed, console=self._console, number=number)
            self.on_behind(worker, task, delay)

    def _admit(self, worker: LiveWorker, message: Message) -> Message | None:
        """Take in what a message refers to; None if the worker has made that up."""
        admit = partial(self.store.admit, worker)
        try:
            if isinstance(message, Items):
                return message._replace(payloads=tuple(map(admit, message.payloads)))
            payload = admit(message.payload)  # type: ignore[union-attr, arg-type]
        except (ProtocolError, OSError) as error:
            _cut_off(worker, error)
            return None
        return message._replace(payload=payload)  # type: ignore[call-arg]

    def _pass_on(self, worker: LiveWorker, message: Message) -> None:
        try:
            self._tell(worker, message)
        except (ProtocolError, OSError) as error:
            _cut_off(worker, error)
        except Exception as error:  # noqa: BLE001 - one of them harms no other
            self.on_fault(worker, message, error)

    def _tell(self, worker: LiveWorker, message: Message) -> None:
        if isinstance(message, Items):
            self.on_items(worker, message)
        elif worker.actor is not None and isinstance(message, Done | Failed | Created):
            self.on_acting(worker.id, message)
        elif isinstance(message, Done | Failed):
            self.on_answer(worker.id, message)
        elif isinstance(message, Skipped):
            self.on_skipped(worker.id, message)
        elif isinstance(message, Imported):
            self.on_imported(worker, message)
        else:
            self.on_nested(worker, message)

    def _show(self, worker: LiveWorker, log: Log) -> None:
        output = worker.slot.output
        label = output.label
        if log.task:
            # A name of two lines would be a line of its own in the log.
            label = f"{printable(self.name_of(log.task))} pid={worker.pid}"
        output.show(log.stream, label, log.line, log.task)


def _cut_off(worker: LiveWorker, error: Exception) -> None:
    """It has said what it may not."""
    _log.warning("! cut off worker %d: %s", worker.id, error)
    if worker.peer is not None:
        worker.peer.abort()
