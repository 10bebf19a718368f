"""The actors of a node: creation, calls, lookup by name, restart and end.

`WaitGraph` finds actors that wait for each other's calls forever, and fails one of
these calls. The core finds deadlocks over resources, but never sees calls of actors.
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
from aiogpu.runtime.actors.actor import (
    FIRST_CALL,
    Actor,
    ActorState,
    Check,
    Register,
    RunTimer,
    died,
)
from aiogpu.runtime.callers.caller import Caller
from aiogpu.runtime.history import FailureReason
from aiogpu.runtime.pending_tasks import Call, overrun, settle
from aiogpu.runtime.results import ResultDelivery
from aiogpu.runtime.slices import Slices
from aiogpu.runtime.workers.death import Death, describe_loss
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.exceptions import LEFT
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
    from aiogpu.runtime.actors.evictable import EvictableActor
    from aiogpu.runtime.devices.memory_guard import Shortages


class TaskPort(Protocol):
    """The part of the driver that actors use. To the driver an actor is a task."""

    @property
    def feed(self) -> Feed:
        """Passes events to the core."""

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: TaskId | None = None,
        client: ClientId = OWN,
    ) -> int:
        """Start a task and return its id."""

    def cancel(self, task: int) -> None:
        """Stop a task."""

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        """Handle a worker's answer to a task."""

    def on_created(self, task: TaskId) -> None:
        """Handle that the constructor of an actor has returned."""


LEAVE_LIMIT: Final = 5.0
"""Seconds in which an actor may end by itself: `close()`, `__del__`, `atexit`."""


SPOILT: Final = 0.1
"""Seconds from the answer that makes a process unfit for use until the process is
ended. The calls that it has begun may finish in this time."""


STOPPING: Final = {
    SERIAL: "It is being stopped",
    ASYNC: "It is cancelled at its next await",
    THREADED: "A thread cannot be interrupted, so its code goes on",
}
"""How a call that exceeds `run_timeout` is stopped, by the mode of its actor."""


INTERRUPT_EVERY: Final = 0.05
"""Seconds between two interrupts of a method that has not reacted to the first."""


class Actors(Register):
    """The actors of one node.

    Attributes:
        workers: the workers that are actors, by id.
        evictions: how often actors have left so that others could start.
        reloads: how often such actors have come back.
        begun: returns the number of the last call that a worker has begun, by the id
            of the worker; for serial actors only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        pool: Pool,
        tasks: TaskPort,
        results: ResultDelivery,
        shortages: Shortages,
        check: Check,
    ) -> None:
        super().__init__(loop, check, Slices(loop))
        self.evictions = self.reloads = 0
        self.workers: dict[int, LiveWorker] = {}
        self._scheduler = scheduler
        self._tasks = tasks
        self._results = results
        self._shortages = shortages
        self._pool = pool
        self._commands = pool.commands
        self.begun: Final = pool.commands.begun

    def start(self, actor: Actor, payload: bytes, client: ClientId) -> int:
        """See `Register`; an actor queues as a task does."""
        return self._tasks.submit(actor.func, payload, actor, None, client)

    def new_actor(self, func: FunctionSpec, key: tuple[str, str] | None) -> Actor:
        """See `Register`."""
        assert func.actor is not None, func
        if func.actor.evict_after is None:
            return Actor(func, self, key)
        # Imported late: few programs have such actors.
        from aiogpu.runtime.actors.evictable import EvictableActor

        return EvictableActor(func, self, key, self._tasks.feed)

    def evict(self, actor: int) -> None:
        """Tell an idle actor to leave."""
        self._evictable(actor).evict()

    def on_evicted(self, actor: int, answer: Done | Failed | None) -> None:
        """Handle that an actor has left; `answer` is its last message, if any."""
        found = self._evictable(actor)
        self.evictions += 1
        error = found.on_evicted(answer)
        if error is not None:
            self._end_by(found, error)

    def _evictable(self, actor: int) -> EvictableActor:
        from aiogpu.runtime.actors.evictable import EvictableActor

        found = self._actors[actor]
        assert isinstance(found, EvictableActor), found
        return found

    def room(self, actor: int) -> tuple[int | None, str]:
        """Return how many such actors fit on the node, and the request of each."""
        found = self.get(actor)
        if found is None:
            raise self.unknown(actor)
        assert found.func.actor is not None, found
        request = found.func.spec.shape.request
        ledger = self._scheduler.ledger
        lends = not found.func.actor.keeps_cpus
        return room_for(ledger, request, lends), str(request)

    def receiver_of(self, actor: int, number: int) -> Receiver | None:
        """Return the receiver of a call, by the number that the caller knows."""
        found = self._actors.get(actor)
        if found is None:
            return None
        call = found.calls.get(found.waiting.number_of(number))
        return None if call is None else call.receiver

    def drop(self, actor: Actor, number: int) -> None:
        """See `Register`."""
        worker = None if actor.worker is None else self.workers.get(actor.worker.id)
        if worker is None or worker.peer is None:
            return
        actor.drops += 1
        self._commands.drop(worker, number, actor.drops)
        if actor.is_serial:
            self._interrupt(actor, worker, number, is_first=True)

    def _interrupt(
        self, actor: Actor, worker: LiveWorker, number: int, is_first: bool = False
    ) -> None:
        """Interrupt a call of a serial actor again and again until it ends.

        A call that has not begun one interval after it was dropped never begins.
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
        """End an actor with its node; return the call to interrupt, 0 for none."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return 0
        if attempt == 0:
            self._commands.call_off(worker)
        begun = self.begun(worker_id)
        return begun if begun >= FIRST_CALL else 0

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """Kill an actor's process, and the actor too unless it may restart."""
        found = self._actors.get(actor)
        if found is None or found.state is ActorState.DEAD:
            return
        if no_restart:
            error = ActorDiedError(f"{found.name} was killed.", found.name)
            self._end_by(found, error)
        elif found.worker is None:
            self._tasks.feed(Scheduler.use_restart, TaskId(found.id))
        else:
            found.on_killed()
            self._pool.kill(found.worker.id)

    def _end_by(self, actor: Actor, error: ActorDiedError) -> None:
        """End an actor and its process at once, by an error."""
        actor.die(error)
        self._results.note_stop(actor.id, type(error).__name__, str(error))
        self._tasks.cancel(actor.id)

    def _end_spoilt(self, worker: LiveWorker) -> None:
        """Kill a spoilt process, unless a new process has replaced it."""
        actor = worker.actor
        if actor is not None and actor.worker is worker:
            self.kill(actor.id, no_restart=False)

    def release_worker(self, worker: int) -> None:
        """Let a worker run tasks after the actor that it was assigned was revoked."""
        self.workers.pop(worker).actor = None

    def creation(self, worker: LiveWorker, task: TaskId, call: Call) -> Create:
        """Return the message that turns a worker into an actor."""
        actor = call.receiver
        assert isinstance(actor, Actor), call
        actor.id = task  # `submit` may assign the actor before it returns the id
        actor.worker, worker.actor = worker, actor
        actor.drops, actor.is_killed = 0, False
        self.workers[worker.id] = worker
        self._commands.expect_actor(worker)
        terms = call.func.actor
        assert terms is not None, call
        if not terms.keeps_cpus:
            # Queued: handled after the current effect.
            self._tasks.feed(Scheduler.release_cpus, task)
        kept = b""
        if terms.evict_after is not None:
            evictable = self._evictable(task)
            kept = evictable.kept
            self.reloads += evictable.is_returning
            evictable.is_returning = False
        return Create(
            actor.id,
            call.func.id,
            call.payload,
            call.number,
            terms.mode,
            dict(terms.limits),
            dict(terms.groups),
            kept,
        )

    def on_gone(self, worker_id: int, death: Death) -> Callable[[], None] | None:
        """Note that a process has ended. The caller notifies the core next.

        Returns:
            A function that fails the lost calls; call it once the core has decided
            about a restart. None if the worker was no actor.
        """
        worker = self.workers.pop(worker_id, None)
        if worker is None or worker.actor is None:
            return None
        actor = worker.actor
        if actor.worker is not worker:
            return None  # the actor was evicted from this process
        was_leaving, was_killed = actor.state is ActorState.LEAVING, actor.is_killed
        lost = actor.lose(death.begun)
        cause = None
        if lost and not was_killed:
            cause = self._results.cause_of(actor.id, actor.name, worker_id, death)
        if was_leaving:
            actor.settle(b"")
            self._tasks.cancel(actor.id)

        def steps() -> Iterator[None]:
            for receiver in lost:
                is_restarting = actor.state is not ActorState.DEAD
                receiver.settle(describe_loss(actor.name, cause, is_restarting))
                yield
            if actor.state is ActorState.DEAD:
                actor.note_gone()
            actor.end_if_idle()

        return lambda: self.slices.add(steps())

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
                message = self._failure_of(worker_id, actor, message)
        if is_own:
            self._tasks.on_answer(worker_id, message)  # type: ignore[arg-type]
        else:
            actor.on_answer(message)  # type: ignore[arg-type]

    def _failure_of(self, worker: int, actor: Actor, failed: Failed) -> Failed:
        """Note the failure of a call; return it as the caller gets it."""
        call = actor.calls.get(failed.task)
        name = actor.name
        if call is not None:
            name += f".{plain_name(call.method)}"
        if failed.peak >= 0:
            failed = self._shortages.explain(worker, name, failed)
        if call is not None and call.receiver is not None and failed.kind != LEFT:
            failure = failed.type_name, failed.message, failed.traceback
            self._results.note_call(actor.id, name, FailureReason.of(*failure))
        return failed

    def on_began(self, actor: Actor, number: int, when: float) -> None:
        """Start the timer of a call with a `run_timeout`, which began at `when`."""
        call = actor.calls.get(number)
        limit = None if call is None else actor.terms.run_limits.get(call.method)
        if limit is not None:
            self._limit(actor, number, when + limit - self._loop.time())

    def _limit(self, actor: Actor, number: int, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        due = self._loop.time() + seconds
        handle = self._loop.call_later(
            seconds, self.overrun, actor, number, context=Context()
        )
        actor.timers[number] = RunTimer(handle, due)

    def on_halted(self, actor: Actor, number: int, stands: bool) -> None:
        """Stop the timer of a call that stands at a breakpoint, or start it again.

        A call on an event loop stops all calls of its actor.
        """
        numbers = [number]
        if actor.terms.mode == ASYNC:
            numbers = [*(actor.timers if stands else actor.paused)]
        for each in numbers:
            if stands and (timer := actor.timers.pop(each, None)):
                timer.handle.cancel()
                actor.paused[each] = timer.due - self._loop.time()
            elif not stands and (left := actor.paused.pop(each, None)) is not None:
                self._limit(actor, each, left)

    def overrun(self, actor: Actor, number: int) -> None:
        """Fail and stop a call that has run for its `run_timeout`."""
        call = actor.calls.get(number)
        timer = actor.timers.pop(number, None)
        if call is None or call.receiver is None or timer is None:
            return
        timer.handle.cancel()
        limit, receiver = actor.terms.run_limits[call.method], call.receiver
        ran = limit + max(self._loop.time() - timer.due, 0.0)
        name = f"{actor.name}.{plain_name(call.method)}"
        error = overrun(name, limit, f"it ran {span(ran)}", STOPPING[actor.terms.mode])
        failure = FailureReason.of(type(error).__name__, str(error))
        self._results.note_call(actor.id, name, failure)
        self.cancel(actor.id, number)
        settle(receiver, error)

    def end_of_client(self, client: ClientId, why: str) -> Iterator[TaskId]:
        """End a program's actors, even if other programs have handles.

        Detached actors live on.

        Yields:
            The task of each actor that was told to end.
        """
        for actor in self.all():
            record = self._scheduler.tasks.get(TaskId(actor.id))
            if (
                record is not None
                and record.client == client
                and not record.spec.is_detached
            ):
                actor.refuse_calls()  # from other programs
                self._leave(actor, why)
                yield record.id

    def on_idle(self, actor: Actor) -> None:
        """See `Register`."""
        self._leave(actor, actor.why_idle)

    def _leave(self, actor: Actor, why: str) -> None:
        """End an actor after its sent calls; at once if it has no process yet."""
        is_away = actor.state is ActorState.EVICTED and actor.worker is None
        if actor.state is ActorState.PENDING or is_away:
            self._tasks.cancel(actor.id)
            actor.die(died(actor.name, why))
        else:
            actor.leave(why)

    def on_leaving(self, actor: Actor) -> None:
        """See `Register`."""
        super().on_leaving(actor)
        self._tasks.feed(Scheduler.task_leaves, TaskId(actor.id))
        # An empty context: the context of an inline task would keep its arguments.
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
        number: the awaited call or child, by the waiter's own number.
        awaited: the process that has to go on first.
    """

    waiter: Caller
    number: int
    awaited: Caller


class WaitGraph:
    """The processes of a node that wait for each other.

    The nodes of the graph are processes whose main thread is bound to wait (see
    `wire.messages.Wait`), of actors and of plain tasks. A process waits for another if
    it waits for a child task, or for a call of an actor that runs one call at a time. A
    cycle never ends by itself.
    """

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
        """Fail one call of each cycle through a process that starts to wait.

        Only a new wait can close a cycle, so no other process has to be checked.
        """
        numbers = caller.bound
        is_known = (
            number in caller.actor_calls
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
        """Return the edges of a cycle that starts at a process; empty for none."""
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
        """Return the process that has to go on before a call or a child can end."""
        if number in waiter.actor_calls:
            actor = self._actors.get(waiter.actor_calls[number][0])
            if actor is None:
                return None
            # A constructor occupies the main thread, whatever runs the methods.
            is_one_by_one = actor.is_serial or actor.state is ActorState.PENDING
            worker = actor.worker if is_one_by_one else None
            return None if worker is None else self._caller_of(worker.id)
        task = waiter.children.get(number)
        record = None if task is None else self._scheduler.blocked.get(TaskId(task))
        if record is None or record.worker is None:
            return None
        return self._caller_of(record.worker.id)

    def _fail_one(self, cycle: list[Edge]) -> bool:
        """Fail the latest call of a cycle, preferably one that has not begun."""
        candidates = []
        for edge in cycle:
            actor, number, call = self._call_of(edge)
            if call is not None and call.receiver is not None:
                has_begun = number <= self._actors.begun(edge.awaited.id)
                candidates.append((not has_begun, number, actor, call))
        if not candidates:
            return False
        *_, number, actor, call = max(candidates, key=lambda entry: entry[:2])
        waits = ", and ".join(map(self._describe, cycle))
        receiver = call.receiver
        assert actor is not None, call
        assert receiver is not None, call
        self._actors.cancel(actor.id, number)
        receiver.settle(
            DeadlockError(
                f"{waits}. Each of these actors runs one call at a time, so the wait "
                f"could never end. Give one of them max_concurrency=2 or more or "
                f"`async def` methods, or return before the other one calls back."
            )
        )
        return True

    def _call_of(self, edge: Edge) -> tuple[Actor | None, int, ActorCall | None]:
        """Return the awaited actor, number and call; (None, 0, None) for a task."""
        public, number = edge.waiter.actor_calls.get(edge.number, (0, 0))
        actor = self._actors.get(public)
        if actor is None:
            return None, 0, None
        number = actor.waiting.number_of(number)
        return actor, number, actor.calls.get(number)

    def _describe(self, edge: Edge) -> str:
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
        """Return the name of the task, call or constructor that a process runs."""
        actor = caller.actor
        if actor is None:
            worker = self._scheduler.workers.get(WorkerId(caller.id))
            task = None if worker is None else worker.task
            return f"process {caller.pid}" if task is None else task.spec.name
        call = actor.calls.get(self._actors.begun(caller.id))
        if actor.state is ActorState.PENDING or call is None:
            return f"the constructor of {actor.name}"
        return f"{actor.name}.{call.method}"
