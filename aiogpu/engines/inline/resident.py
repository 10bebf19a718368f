"""The object of an actor in this process, for one life: made, called, let go.

What `runtime.actor` knows as its process, and tells what to do. Plain methods run one
at a time, each as a job on top of whatever runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.ledger import Lease
from aiogpu.engines.inline.creation import Creation
from aiogpu.engines.inline.invocation import Invocation
from aiogpu.engines.inline.outcome import Outcome, hold_for
from aiogpu.engines.inline.raising import Raising
from aiogpu.engines.inline.supplies import supplied
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.pending_tasks import Call
from aiogpu.serialization.exceptions import LEFT, STOPPED, unpack_failure
from aiogpu.wire.messages import Demand, Failed, Invoke, Leave, Message

if TYPE_CHECKING:
    from aiogpu.engines.inline.residents import Residents
    from aiogpu.runtime.workers.slots import LiveWorker


class Resident:
    """See above.

    Attributes:
        actor: its calls and who waits for it; it may outlive this life.
        worker_id: stands for its process in `status()`.
        restarts_left: how often it may be made anew; -1 without end.
        peer: itself, to the actor; None before and after its life.
        creation: the job that makes it.
        object: what its class has made; None before and after its life.
        lease: what it holds.
        record: what `status()` shows of it, None before its life.
        begun: number of the call that was begun last.
        is_over: whether nothing is left of it.
    """

    def __init__(
        self,
        actor: Actor,
        residents: Residents,
        worker_id: WorkerId,
        restarts_left: int,
    ) -> None:
        self.actor = actor
        self.worker_id = worker_id
        self.restarts_left = restarts_left
        self.peer: Resident | None = None
        self.creation: Creation
        self.object: Any = None
        self.lease: Lease | None = None
        self.record: TaskRecord | None = None
        self.begun = 0
        self.is_over = False
        self._residents = residents
        self._queue: deque[Invoke] = deque()
        self._running: Invocation | None = None
        self._is_ending = False

    def __repr__(self) -> str:
        return f"<Resident {self.worker_id} of {self.actor!r}>"

    @property
    def is_busy_below(self) -> bool:
        """True if code of it waits for the code that runs now to return."""
        running = self._running
        return running is not None and running.main is None

    @property
    def _is_current(self) -> bool:
        """True if the actor lives this life, and no other one."""
        return self.actor.worker is cast("LiveWorker", self)

    def surroundings(self) -> Surroundings:
        """Return what its code finds around it, to be put on once more."""
        assert self.creation.surroundings is not None, self
        return self.creation.surroundings.again()

    def on_made(self) -> None:
        """Its constructor has returned."""
        creation = self.creation
        self.lease, creation.lease = creation.lease, None
        self.record = replace(creation.record, state=TaskState.RUNNING)
        self.record.worker = WorkerRecord(
            self.worker_id, state=WorkerState.BUSY, task=self.record, lease=self.lease
        )
        self.peer = self
        # An actor looks at the peer of its worker, and at nothing else of it.
        self.actor.worker = cast("LiveWorker", self)
        self.actor.on_created()

    def on_creation_ended(self) -> None:
        """Its constructor has ended, one way or the other."""
        if self.lease is None and not self.is_over:
            self._let_go()

    def fail_waits(self, reason: str) -> None:
        """Tell the code that waits for its calls now that the wait can never end."""
        self._residents.waits.fail(self.actor, reason)

    # What its actor tells its process.

    def borrow(self, payload: bytes) -> bytes:
        """The payload that it is sent, with the values that it needs."""
        return supplied(payload)

    def post(self, message: Message) -> None:
        """Have a call run when its turn comes."""
        if type(message) is Invoke:
            self._queue.append(message)
            self._residents.note_calls(self)
        elif type(message) is Demand:
            self.creation.runner.node.beside.rise(message.task, message.limit)

    def send(self, message: Message) -> None:
        """End in an orderly way."""
        if type(message) is Leave:
            self._queue.clear()
            self.end()

    def drop(self, number: int) -> None:
        """Nobody wants a call's answer any more: run it no more, or stop it."""
        running = self._running
        if running is not None and running.id == number:
            running.runner.stop(running)
            return
        for message in self._queue:
            if message.call == number:
                self._queue.remove(message)
                self._answer_dropped(number)
                return

    def kill(self) -> None:
        """End at once, or as soon as its code has returned."""
        self._queue.clear()
        if self.peer is None:
            self.creation.runner.stop(self.creation)
            return
        running = self._running
        if running is not None:
            running.runner.stop(running)
        self.end()

    def close_down(self, _grace: float) -> None:
        """End with the node."""
        self.kill()

    def hasten(self) -> None:
        """End now, and leave behind what takes its time."""
        self.kill()

    # Its calls.

    def next_call(self) -> Invocation | None:
        """The call whose turn it is; None if there is none, or one runs."""
        if self._running is not None or not self._queue:
            return None
        message = self._queue.popleft()
        self._running = call = self._invocation(message)
        call.surroundings = self.surroundings().named(call.task_name)
        self.begun = message.call
        return call

    def _invocation(self, message: Invoke) -> Invocation:
        creation, site = self.creation, self.actor.site
        sent = self.actor.calls.get(message.call)
        receiver = sent.receiver if sent is not None else None
        record = TaskRecord(TaskId(message.call), site.spec, creation.record.since)
        return Invocation(
            record,
            Call(
                site,
                message.payload,
                receiver,
                limit=message.limit,
                passed=message.skip,
            ),
            creation.runner,
            resident=self,
            method=message.method,
        )

    def answer(self, outcome: Outcome) -> None:
        """Tell the caller what has come of a call; it finds the frames of an error."""
        if not self._is_current:
            return  # the call is lost, or waits for the next life
        answer = outcome.answer
        call = self.actor.calls.get(answer.task)
        if call is not None and call.receiver is not None:
            hold_for(outcome.carried, call.receiver)
            if type(answer) is Failed and answer.kind != LEFT:
                error = unpack_failure(answer, f"{self.actor.name}.{call.method}")
                outcome.show_frames(error)
                call.receiver = Raising(call.receiver, error)
        self.actor.on_answer(answer)

    def _answer_dropped(self, number: int) -> None:
        if self._is_current:
            self.actor.on_answer(Failed(number, STOPPED, "", "", "", None))

    def on_call_ended(self, call: Invocation) -> None:
        """A call's code has stopped."""
        self._running = None
        # If it was stopped, nobody has answered yet.
        self._answer_dropped(call.id)
        if self._is_ending:
            self.end()
        elif self._queue:
            self._residents.note_calls(self)

    # Its end.

    def end(self) -> None:
        """Let the object go, or do so as soon as no code of it runs."""
        self._is_ending = True
        if self._running is None and not self.is_over:
            self._let_go()

    def _let_go(self) -> None:
        self.is_over, self.peer = True, None
        if self.creation.surroundings is not None:
            with self.surroundings().on():
                # Its `__del__` may want to know where it is.
                was, self.object = _weak(self.object), None
            if was is not None and was() is not None:
                # It refers to itself, or code that is about to return does.
                self._residents.collect_soon()
        if self._is_current:
            self.actor.worker = None
        if self.lease is not None:
            lease, self.lease = self.lease, None
            self._residents.give_back(lease)
        self.creation.runner.disown(self.creation)
        self._residents.on_gone(self)


def _weak(thing: object) -> weakref.ref[object] | None:
    try:
        return weakref.ref(thing)
    except TypeError:
        return None
