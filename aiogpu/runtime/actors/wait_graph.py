"""Finds actors that wait for each other's calls without end, and ends one such wait.

The nodes are processes whose main thread is bound to wait (see `wire.messages.Wait`):
of actors, and of plain tasks. A process waits for another if it waits for a call of an
actor that runs one call at a time, or for a child task. A cycle never ends by itself.
The core finds deadlocks over resources; calls of actors never come to the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.errors import DeadlockError
from aiogpu.runtime.actors.actor import ActorState

if TYPE_CHECKING:
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.runtime.actors.actor import Actor, ActorCall
    from aiogpu.runtime.actors.registry import Actors
    from aiogpu.runtime.callers.caller import Caller


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
        came_by: dict[Caller, Edge] = {}
        unseen = [start]
        while unseen:
            for edge in self._edges(unseen.pop()):
                if edge.awaited in came_by:
                    continue
                came_by[edge.awaited] = edge
                if edge.awaited is start:
                    return _path_to(start, came_by)
                unseen.append(edge.awaited)
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
        receiver.fail(
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
        number = actor.lines.number_of(number)
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


def _path_to(end: Caller, came_by: dict[Caller, Edge]) -> list[Edge]:
    path = [came_by[end]]
    while path[0].waiter is not end:
        path.insert(0, came_by[path[0].waiter])
    return path
