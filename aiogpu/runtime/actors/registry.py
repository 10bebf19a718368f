"""All actors of a node: made, called, found by name, counted, listed, ended.

`WaitGraph` finds actors that wait for each other's calls without end, and ends one such
wait. Its nodes are processes whose main thread is bound to wait (see
`wire.messages.Wait`): of actors, and of plain tasks. A process waits for another if it
waits for a call of an actor that runs one call at a time, or for a child task. A cycle
never ends by itself. The core finds deadlocks over resources; calls of actors never
come to the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.text import span
from aiogpu.core.resources.placement_group import room_for
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import ActorDiedError, DeadlockError
from aiogpu.runtime.actors.actor import FIRST_CALL, Actor, ActorState, Register, died
from aiogpu.runtime.callers.caller import Caller
from aiogpu.runtime.history import Failure
from aiogpu.runtime.pending_tasks import Call, overrun, settle
from aiogpu.runtime.results import Results
from aiogpu.runtime.workers.death import Death, describe_loss
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.exceptions import LEFT
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import (
    ASYNC,
    SERIAL,
    THREADED,
    Create,
    Created,
    Done,
    Failed,
    plain_name,
)

if TYPE_CHECKING:
    from aiogpu.core.scheduler.scheduler import Feed
    from aiogpu.runtime.actors.actor import ActorCall
    from aiogpu.runtime.devices.memory_guard import Shortages


Check = Callable[[FunctionSpec, bytes], None]
"""Raises if a function's calls with these arguments can never be served."""


class TaskPort(Protocol):
    """The interface of the driver to actors, each of which is a task of the driver."""

    @property
    def feed(self) -> Feed:
        """Tells the core what happened."""

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: TaskId | None = None,
        client: ClientId = OWN,
    ) -> int:
        """Start a task; gives its id."""

    def cancel(self, task: int) -> None:
        """Stop a task."""

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        """A worker has ended a task."""

    def on_created(self, task: TaskId) -> None:
        """The constructor of an actor has returned."""


LEAVE_LIMIT: Final = 5.0
"""Seconds that an actor gets to end by itself: `close()`, `__del__`, `atexit`."""


SPOILT: Final = 0.1
"""Seconds from the answer after which a process is unfit to go on until it is ended.
Calls that it has begun by then may end as they will."""


STOPPING: Final = {
    SERIAL: "It is being stopped",
    ASYNC: "It is cancelled where it next awaits",
    THREADED: "A thread cannot be interrupted, so its code goes on",
}
"""What becomes of a call that has run for too long, by how its actor runs calls."""


INTERRUPT_EVERY: Final = 0.05
"""Seconds between two interrupts of a method that has not heard the first."""


class Actors(Register):
    """The actors of one node.

    Attributes:
        workers: those that are actors, by id.
        begun: gives the number of the last call that a serial actor's process, by its
            worker's id, has begun.
        check: refuses a class and arguments that this node can never serve.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        pool: Pool,
        tasks: TaskPort,
        results: Results,
        shortages: Shortages,
        check: Check,
    ) -> None:
        super().__init__(loop)
        self.check = check
        self.workers: dict[int, LiveWorker] = {}
        self._scheduler = scheduler
        self._tasks = tasks
        self._results = results
        self._shortages = shortages
        self._pool = pool
        self._commands = pool.commands
        self.begun: Final = pool.commands.begun

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
        client: ClientId = OWN,
    ) -> Actor:
        """Make an actor, which waits for its place as a task does.

        Whoever asks holds one handle to it. See `ActorsPort.create`. `public` is
        the id by which a worker or a client calls it who has it made.
        """
        self.check(func, payload)
        if get_if_exists and key is not None and (found := self.find(key)):
            self.add(found, public)
            return found
        self.check_name(key)
        actor = Actor(func, self, key)
        self.name(actor)
        if func.spec.is_detached:
            actor.holders += 1  # the node's own, until it is killed
        actor.id = self._tasks.submit(func, payload, actor, None, client)
        self.add(actor, public)
        return actor

    def room(self, actor: int) -> tuple[int | None, str]:
        """Return how many actors like it can live at once, and what each asks for."""
        found = self.get(actor)
        if found is None:
            raise self.unknown(actor)
        assert found.func.actor is not None, found
        request = found.func.spec.shape.request
        ledger = self._scheduler.ledger
        lends = not found.func.actor.keeps_cpus
        return room_for(ledger, request, lends), str(request)

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """See `ActorsPort.tell_room`."""
        receiver.settle(dump_whole(self.room(actor)))

    def receiver_of(self, actor: int, number: int) -> Receiver | None:
        """Return the receiver of a call, by the number that its caller was given."""
        found = self._actors.get(actor)
        if found is None:
            return None
        call = found.calls.get(found.waiting.number_of(number))
        return None if call is None else call.receiver

    def cancel(self, actor: int, number: int) -> None:
        """Cancel a call."""
        found = self._actors.get(actor)
        if found is None:
            return
        sent = found.worker
        worker = None if sent is None else self.workers.get(sent.id)
        number = found.waiting.number_of(number)
        if found.cancel(number) and worker is not None and worker.peer is not None:
            found.drops += 1
            self._commands.drop(worker, number, found.drops)
            if found.is_serial:
                self._interrupt(found, worker, number, is_first=True)
        found.look_if_idle()

    def demand(self, actor: int, number: int, limit: int) -> None:
        """A stream's consumer has taken items: it may yield so many in all."""
        found = self._actors.get(actor)
        if found is not None:
            found.demand(number, limit)

    def _interrupt(
        self, actor: Actor, worker: LiveWorker, number: int, is_first: bool = False
    ) -> None:
        """Interrupt the one call that runs, if it is that one, until it has heard.

        One that has not begun a while after it was dropped never will.
        """
        if actor.worker is not worker or number not in actor.calls:
            return
        has_begun = self.begun(worker.id) == number
        if has_begun:
            self._commands.interrupt(worker.id, number, attempt=1, is_coroutine=False)
        if has_begun or is_first:
            self._loop.call_later(
                INTERRUPT_EVERY, self._interrupt, actor, worker, number
            )

    def call_off(self, worker_id: int, attempt: int) -> int:
        """Have an actor end with its node; gives the call to interrupt, 0 for none."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return 0
        if attempt == 0:
            self._commands.call_off(worker)
        begun = self.begun(worker_id)
        return begun if begun >= FIRST_CALL else 0

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor's process at once, and the actor too unless it may restart."""
        found = self._actors.get(actor)
        if found is None or found.state is ActorState.DEAD:
            return
        if no_restart:
            died = ActorDiedError(f"{found.name} was killed.", found.name)
            found.die(died)
            self._results.note_stop(found.id, type(died).__name__, str(died))
            self._tasks.cancel(found.id)
        elif found.worker is not None:
            found.is_killed = True
            for mailbox in found.mailboxes.values():
                mailbox.is_open = False  # what comes from now on is for the next one
            self._pool.kill(found.worker.id)

    def _end_spoilt(self, worker: LiveWorker) -> None:
        """End that process, unless a new process has replaced it."""
        actor = worker.actor
        if actor is not None and actor.worker is worker:
            self.kill(actor.id, no_restart=False)

    def release_worker(self, worker: int) -> None:
        """A worker runs tasks: it was to be an actor, and that was taken back."""
        self.workers.pop(worker).actor = None

    def terminate(self, actor: int) -> None:
        """End an actor after the calls it was sent, even if it has handles."""
        found = self._actors.get(actor)
        if found is not None:
            found.is_ending = True
            found.look_if_idle()

    def creation(self, worker: LiveWorker, task: TaskId, call: Call) -> Create:
        """Return the message that makes a worker an actor."""
        actor = call.receiver
        assert isinstance(actor, Actor), call
        actor.id = task  # it may be placed before it is submitted for good
        actor.worker, worker.actor = worker, actor
        actor.drops, actor.is_killed = 0, False
        self.workers[worker.id] = worker
        self._commands.expect_actor(worker)
        terms = call.func.actor
        assert terms is not None, call
        if not terms.keeps_cpus:
            # Once the effect that this is a part of is carried out.
            self._tasks.feed(Scheduler.release_cpus, task)
        return Create(
            actor.id,
            call.func.id,
            call.payload,
            call.number,
            terms.mode,
            dict(terms.limits),
            dict(terms.groups),
        )

    def on_gone(self, worker_id: int, death: Death) -> Callable[[], None] | None:
        """Note that a process has ended; the core is notified next.

        Returns:
            What is to be done when the core has said whether another one follows; None
            if the worker was no actor's.
        """
        worker = self.workers.pop(worker_id, None)
        if worker is None or worker.actor is None:
            return None
        actor = worker.actor
        was_leaving, was_killed = actor.state is ActorState.LEAVING, actor.is_killed
        lost = actor.lose(death.begun)
        cause = None
        if lost and not was_killed:
            cause = self._results.cause_of(*(actor.id, actor.name, worker_id, death))
        if was_leaving:
            actor.settle(b"")
            self._tasks.cancel(actor.id)

        def tell() -> None:
            for receiver in lost:
                is_restarting = actor.state is not ActorState.DEAD
                receiver.settle(describe_loss(actor.name, cause, is_restarting))
            if actor.state is ActorState.DEAD:
                actor.note_gone()
            actor.look_if_idle()

        return tell

    def on_message(self, worker_id: int, message: Done | Failed | Created) -> None:
        """Handle a message from an actor's process."""
        worker = self.workers.get(worker_id)
        actor = worker.actor if worker is not None else None
        if worker is None or actor is None or actor.worker is not worker:
            return
        if type(message) is Created:
            actor.on_created()
            self._tasks.on_created(TaskId(actor.id))
            return
        is_own = message.task == actor.id
        if type(message) is Failed:
            if message.is_spoilt:
                self._loop.call_later(SPOILT, self._end_spoilt, worker)
            if not is_own:
                message = self._told_of(worker_id, actor, message)
        if is_own:
            self._tasks.on_answer(worker_id, message)  # type: ignore[arg-type]
        else:
            actor.on_answer(message)  # type: ignore[arg-type]

    def _told_of(self, worker: int, actor: Actor, failed: Failed) -> Failed:
        """Return the outcome of a failed call."""
        call = actor.calls.get(failed.task)
        name = actor.name
        if call is not None:
            name += f".{plain_name(call.method)}"
        if failed.peak >= 0:
            failed = self._shortages.told(worker, name, failed)
        if call is not None and call.receiver is not None and failed.kind != LEFT:
            failure = failed.type_name, failed.message, failed.traceback
            self._results.note_call(actor.id, name, Failure.of(*failure))
        return failed

    def on_began(self, actor: Actor, number: int, when: float) -> None:
        """The code of a call has begun whose run is timed, by the loop's clock."""
        call = actor.calls.get(number)
        limit = None if call is None else actor.terms.run_limits.get(call.method)
        if limit is not None:
            left = when + limit - self._loop.time()
            actor.timers[number] = self._loop.call_later(
                max(left, 0.0), self.overrun, actor, number, context=Context()
            )

    def overrun(self, actor: Actor, number: int) -> None:
        """A call has run for its `run_timeout`: its caller has the error."""
        call = actor.calls.get(number)
        timer = actor.timers.pop(number, None)
        if call is None or call.receiver is None or timer is None:
            return
        timer.cancel()
        limit, receiver = actor.terms.run_limits[call.method], call.receiver
        ran = limit + max(self._loop.time() - timer.when(), 0.0)
        name = f"{actor.name}.{plain_name(call.method)}"
        error = overrun(name, limit, f"it ran {span(ran)}", STOPPING[actor.terms.mode])
        failure = Failure.of(type(error).__name__, str(error))
        self._results.note_call(actor.id, name, failure)
        self.cancel(actor.id, number)
        settle(receiver, error)

    def end_of_client(self, client: ClientId, why: str) -> list[TaskId]:
        """End the actors that a program has made, even if others have handles.

        Detached ones live on.

        Returns:
            The tasks that those actors are which were told to end.
        """
        found = []
        for actor in self.all():
            record = self._scheduler.tasks.get(TaskId(actor.id))
            if (
                record is not None
                and record.client == client
                and not record.spec.is_detached
            ):
                actor.is_ending = True  # others may not call it any more
                self._leave(actor, why)
                found.append(record.id)
        return found

    def on_idle(self, actor: Actor) -> None:
        """See `Register`."""
        self._leave(actor, actor.why_idle)

    def _leave(self, actor: Actor, why: str) -> None:
        """End an actor after what it was sent; at once if it waits for its process."""
        if actor.state is ActorState.PENDING:
            self._tasks.cancel(actor.id)
            actor.die(died(actor.name, why))
        else:
            actor.leave(why)

    def on_leaving(self, actor: Actor) -> None:
        """See `Register`."""
        super().on_leaving(actor)
        # In a context of its own: that of an inline task would keep its arguments.
        self._loop.call_later(LEAVE_LIMIT, self._end, actor, context=Context())

    def _end(self, actor: Actor) -> None:
        if actor.state is not ActorState.DEAD:
            self._tasks.cancel(actor.id)
            actor.settle(b"")

    def on_dead(self, actor: Actor) -> None:
        """See `Register`."""
        if actor.worker is None:
            actor.note_gone()
        super().on_dead(actor)


class Edge(NamedTuple):
    """One process waits for another.

    Attributes:
        waiter: the process that waits.
        number: the call or child that it waits for, by its own number.
        awaited: the process that has to go on first.
    """

    waiter: Caller
    number: int
    awaited: Caller


class WaitGraph:
    """Which process of a node waits for which."""

    def __init__(
        self,
        actors: Actors,
        scheduler: Scheduler,
        caller_of: Callable[[int], Caller | None],
    ) -> None:
        self._actors = actors
        self._scheduler = scheduler
        self._caller_of = caller_of

    def end_deadlock(self, caller: Caller) -> None:
        """Fail a call of each cycle that goes through a process which waits now.

        Each cycle is closed by a wait, so no other process has to be looked at.
        """
        numbers = caller.bound
        is_known = (
            number in caller.asked
            or number in caller.children
            or number in caller.fetched
            for number in numbers
        )
        if not all(is_known):
            # An answer is on the way. If it is a failure, it ends the wait.
            caller.bound = ()
        while cycle := self._find_cycle(caller):
            if not self._fail_one(cycle):
                return

    def _find_cycle(self, start: Caller) -> list[Edge]:
        """The edges of a cycle through a process, from it and back; none without."""
        seen: set[Caller] = set()
        paths: list[tuple[Caller, list[Edge]]] = [(start, [])]
        while paths:
            waiter, path = paths.pop()
            for edge in self._edges(waiter):
                if edge.awaited is start:
                    return [*path, edge]
                if edge.awaited not in seen:
                    seen.add(edge.awaited)
                    paths.append((edge.awaited, [*path, edge]))
        return []

    def _edges(self, waiter: Caller) -> Iterator[Edge]:
        for number in waiter.bound:
            awaited = self._awaited(waiter, number)
            if awaited is not None:
                yield Edge(waiter, number, awaited)

    def _awaited(self, waiter: Caller, number: int) -> Caller | None:
        """The process that has to go on before a call or a child can end."""
        if number in waiter.asked:
            actor = self._actors.get(waiter.asked[number][0])
            if actor is None:
                return None
            # A constructor has the main thread, whatever its methods are run by.
            is_one_by_one = actor.is_serial or actor.state is ActorState.PENDING
            worker = actor.worker if is_one_by_one else None
            return None if worker is None else self._caller_of(worker.id)
        task = waiter.children.get(number)
        record = None if task is None else self._scheduler.blocked.get(TaskId(task))
        if record is None or record.worker is None:
            return None
        return self._caller_of(record.worker.id)

    def _fail_one(self, cycle: list[Edge]) -> bool:
        """Fail the latest call of a cycle, one that has not begun if there is one."""
        found = []
        for edge in cycle:
            actor, number, call = self._call_of(edge)
            if call is not None and call.receiver is not None:
                has_begun = number <= self._actors.begun(edge.awaited.id)
                found.append((not has_begun, number, actor, call))
        if not found:
            return False
        *_, number, actor, call = max(found, key=lambda one: one[:2])
        told = ", and ".join(map(self._told, cycle))
        receiver = call.receiver
        assert actor is not None, call
        assert receiver is not None, call
        self._actors.cancel(actor.id, number)
        receiver.settle(
            DeadlockError(
                f"{told}. Each of these actors runs one call at a time, so the wait "
                f"could never end. Give one of them max_concurrency=2 or more or "
                f"`async def` methods, or return before the other one calls back."
            )
        )
        return True

    def _call_of(self, edge: Edge) -> tuple[Actor | None, int, ActorCall | None]:
        """The call that is waited for, and of which actor; None for a task."""
        public, number = edge.waiter.asked.get(edge.number, (0, 0))
        actor = self._actors.get(public)
        if actor is None:
            return None, 0, None
        number = actor.waiting.number_of(number)
        return actor, number, actor.calls.get(number)

    def _told(self, edge: Edge) -> str:
        waiter = self._running(edge.waiter)
        actor, number, call = self._call_of(edge)
        awaited = self._running(edge.awaited)
        if actor is None:
            return f"{waiter} waits for {awaited}"
        if call is None:
            return f"{waiter} waits for {actor.name}"
        order = ""
        if number > self._actors.begun(edge.awaited.id):
            order = f", which comes after {awaited}"
        return f"{waiter} waits for {actor.name}.{call.method}{order}"

    def _running(self, caller: Caller) -> str:
        """The name of what a process runs."""
        actor = caller.actor
        if actor is None:
            worker = self._scheduler.workers.get(WorkerId(caller.id))
            task = None if worker is None else worker.task
            return f"process {caller.pid}" if task is None else task.spec.name
        call = actor.calls.get(self._actors.begun(caller.id))
        if actor.state is ActorState.PENDING or call is None:
            return f"the constructor of {actor.name}"
        return f"{actor.name}.{call.method}"
