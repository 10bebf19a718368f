"""The inline node: its scheduler, stand-ins for workers, and whose turn it is.

The node's scheduler decides, as it does for workers, but for one question: whether
there is a worker for a task whose lease could be had (`InlineNode.may_begin`).
`InlinePool` stands for all processes: what a worker would be sent becomes a job, which
a `LoopRunner` begins in one of the next callbacks of its loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.core import effects
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.units import CPU
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.engines.base import check_arguments, check_func
from aiogpu.engines.inline.environment import TaskEnvironment
from aiogpu.engines.inline.jobs import (
    InlineWorker,
    Job,
    JobDriver,
    JobLoop,
    actor_job,
    with_values,
)
from aiogpu.errors import InfeasibleError, NodeClosedError
from aiogpu.runtime.actors.actor import FIRST_CALL, Actor
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import PickledValue

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.runtime.pending_tasks import Call
    from aiogpu.runtime.workers.pool import Pool
    from aiogpu.wire.messages import Bind, Create

T = TypeVar("T")


class ActorsPort(Protocol):
    """All actors in this process, as its tasks need them; see `InlineActors`."""

    @property
    def runner(self) -> JobLoop:
        """Carries what they start, on the program's loop."""
        ...

    @property
    def are_there(self) -> bool:
        """True if there is any that has not ended."""

    def job_of(self, task: TaskId, func: FunctionSpec, actor: object, /) -> Job:
        """The job that makes an actor."""

    def known(self, actor: int, /) -> Actor:
        """Return an actor that lives or has handles."""

    def begin_wait(self, number: int, /) -> None:
        """The code that runs now waits for a call, which fails if it is in vain."""

    def end_wait(self, number: int, /, is_over: bool = False) -> None:
        """Note that a wait for a call has ended, or all of them with the call."""

    def next_call(self) -> Job | None:
        """The call whose turn it is, None without one."""

    def cancel_call(self, number: int, /) -> None:
        """Cancel a call."""

    def demand_call(self, number: int, limit: int, /) -> None:
        """Let a call that is a stream yield so many items in all."""


class InlineScheduler(Scheduler):
    """A scheduler of which one task at a time gets a worker.

    Args:
        ledger: what there is.
        config: its numbers.
        node: asked whether it may be a task's turn.
    """

    def __init__(
        self, ledger: Ledger, config: SchedulerConfig, node: InlineNode
    ) -> None:
        super().__init__(ledger, config)
        self._node = node

    def has_worker(self, record: TaskRecord, _lease: Lease) -> bool:
        """Return whether a task whose lease is free may begin now."""
        return record.spec.is_lease or self._node.may_begin(record)

    def take(self, record: TaskRecord) -> Lease | None:
        """Take what a task asks for."""
        return self._ask(record, super().take)

    def fits(self, record: TaskRecord) -> bool:
        """Return whether a task could take what it asks for now."""
        return self._ask(record, super().fits)

    def _ask(self, record: TaskRecord, ask: Callable[[TaskRecord], T]) -> T:
        """Ask as if an urgent task could have the CPUs of the jobs below it."""
        job = self._node.jobs.get(record.id)
        if job is None or not job.is_urgent:
            return ask(record)
        with self._node.cpus_of_waiting_jobs():
            return ask(record)


class InlinePool:
    """Stands for all processes: workers are jobs of this one.

    See `Pool`, and `WorkerCommands`: it is both.
    """

    def __init__(self, node: InlineNode) -> None:
        self.workers: dict[int, InlineWorker] = cast("Any", node.workers)
        self._node = node

    def __repr__(self) -> str:
        return f"<InlinePool of {len(self.workers)}>"

    @property
    def commands(self) -> InlinePool:
        """The commands to workers."""
        return self

    def spawn(self, worker: int, _environment: object = ()) -> None:
        """A worker is wanted for a task whose turn is next."""
        self.workers[worker] = InlineWorker(worker)
        self._node.starting.append(WorkerId(worker))
        self._node.wake()

    def retire(self, worker: int) -> None:
        """Retire a worker."""
        self._node.lose(worker)

    def assign(
        self, worker: int, task: TaskId, call: Call, bind: Bind, is_last: bool
    ) -> None:
        """Let a task's code begin."""
        run = call.run(task, is_last, with_values)
        self._assign(worker, task, call, bind, (run.payload, run.limit, run.skip))

    def create(self, worker: int, call: Call, bind: Bind, it: Create) -> None:
        """Let an actor's constructor begin."""
        self._assign(
            worker, TaskId(it.task), call, bind, (with_values(it.payload), 0, 0)
        )

    def _assign(
        self,
        worker: int,
        task: TaskId,
        call: Call,
        bind: Bind,
        message: tuple[bytes, int, int],
    ) -> None:
        node, job = self._node, self._node.jobs[task]
        self.workers[worker].begun = call.number
        facts = {
            "actor": job.actor_id,
            "node": node_id(),
            "worker": worker,
            "task": job.id,
            "name": job.name,
            "resources": call.func.resources,
            "accelerators": bind.accelerators,
            "is_stopping": node.is_stopping,
        }
        job.assigned_to = self.workers[worker]
        job.payload, job.limit, job.skip = message
        job.environment = TaskEnvironment(bind.environ, facts)
        job.has_devices = any(bind.accelerators.values())
        node.assigned.append(job)
        node.wake()

    def demand(self, _worker: int, task: int, limit: int) -> None:
        """Let a task's generator yield so many items in all."""
        self._node.streams.rise(task, limit)

    def begun(self, worker: int) -> int:
        """The number of what a worker has begun last, 0 for nothing."""
        known = self.workers.get(worker)
        return 0 if known is None else known.begun

    def drop(self, worker: InlineWorker, call: int, _count: int) -> None:
        """Cancel an actor's call."""
        worker.peer.drop(call)

    def announce_stop(self) -> None:
        """The node stops; jobs ask the scheduler."""

    def interrupt(self, *_args: object, **_options: object) -> None:
        """A call that was dropped has been stopped, if it can be."""

    def expect_actor(self, worker: InlineWorker) -> None:
        """A worker becomes an actor."""

    def kill(self, worker: int) -> None:
        """End an actor's object; another may take its place."""
        known = self.workers[worker]
        if known.peer is not None:
            known.peer.restart()


class MonotonicLoop:
    """The program's loop, with a clock that goes on while another loop runs in it."""

    time = staticmethod(time.monotonic)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def node_id() -> str:
    """Return the id of a node in this process, as tasks find it."""
    return f"inline-{os.getpid()}"


class InlineNode(JobDriver):
    """One node, and all the event loops on which tasks of it run.

    Attributes:
        starting: workers that the scheduler has asked for and that have not started.
        assigned: jobs that have a worker, and whose code has not begun.
    """

    actors: ActorsPort  # type: ignore[assignment]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ledger: Ledger,
        vendors: Sequence[Accelerator],
        cancel_grace: float,
        pack: Callable[[PickledValue], bytes],
    ) -> None:
        config = SchedulerConfig(
            cancel_grace=cancel_grace,
            interrupt_every=inf,
            idle_workers=0,
            reserve_after=inf,
            retry_after=0.0,
        )
        self.starting: deque[WorkerId] = deque()
        self.assigned: deque[Job] = deque()
        self._changed_waits: dict[Job, None] = {}
        self._with_own_workers: dict[int, tuple[TaskSpec, FunctionSpec]] = {}
        self._mark = object()  # left on functions that were found feasible
        super().__init__(
            loop,
            InlineScheduler(ledger, config, self),
            Assignment(vendors, ledger, os.environ),
            self.check,
            lambda _node: cast("Pool", InlinePool(self)),
            pack,
        )
        self.guard.is_on = False
        self.handlers[effects.Interrupt] = lambda it: self.jobs[it.task].interrupt()
        self.handlers[effects.Kill] = self._kill
        self.handlers[effects.Revoke] = self._revoke
        self.handlers[effects.Settle] = self._settle
        self.handlers[effects.Forget] = self._forget

    def __repr__(self) -> str:
        return f"<InlineNode {len(self.jobs)} jobs, {self.stack!r}>"

    # What the scheduler is told, and wants done.

    @contextmanager
    def cpus_of_waiting_jobs(self) -> Iterator[None]:
        """Context manager: the CPUs of the jobs that have begun are free.

        They wait while an urgent task runs on top of them.
        """
        beneath: list[tuple[dict[str, int], int]] = []
        for job in self.stack.running:
            record = None if job.id != job.task else job.record
            lease = record and record.worker and record.worker.lease
            if lease and not lease.is_lent:
                free = lease.home.free
                beneath.append((free, dict(lease.request.scalars).get(CPU, 0)))
        for free, cpus in beneath:
            free[CPU] += cpus
        try:
            yield
        finally:
            for free, cpus in beneath:
                free[CPU] -= cpus

    def _kill(self, effect: effects.Kill) -> None:
        """A task has not ended in its time: leave it behind, if it is a coroutine."""
        worker = self.scheduler.workers.get(effect.worker)
        record = None if worker is None else worker.task
        if effect.worker in self.starting:
            self.starting.remove(effect.worker)
        elif record is not None:
            job = self.jobs[record.id]
            if job.worker is not None:
                job.runner.give_up(job)
            return
        self.lose(effect.worker)

    def _revoke(self, effect: effects.Revoke) -> None:
        """A worker has no more than the task that it has begun."""
        known = self.scheduler.workers.get(effect.worker)
        began = known.task.id if known is not None and known.task is not None else None
        self.feed(Scheduler.revoked, effect.worker, effect.number, began)

    def _settle(self, effect: effects.Settle) -> None:
        self.results.settle(effect)
        self.jobs.pop(effect.task, None)

    def _forget(self, effect: effects.Forget) -> None:
        self.results.forget(effect)
        self.jobs.pop(effect.task, None)

    # Whose turn it is.

    def may_begin(self, record: TaskRecord) -> bool:
        """Return whether a task may run now, on top of the running code."""
        job = self.jobs[record.id]
        if job.is_urgent:
            return True
        if any(map(self._is_due, self.scheduler.workers)):
            return False
        if not self.stack.running:
            return True
        top = self.stack.running[-1]
        if top.is_about_to_end:
            return False  # it is told of in a moment, and its children no more its
        parent = job.parent
        while parent is not None and parent.is_over:
            parent = parent.parent  # it goes on without the one that has started it
        if parent is top:
            return True
        return any(one.worker is None and not one.has_ended for one in top.needed)

    def _is_due(self, worker: WorkerRecord) -> bool:
        """Return whether a worker's task is due and has not begun."""
        job = None if worker.task is None else self.jobs.get(worker.task.id)
        return job is not None and job.worker is None and not job.is_urgent

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        _parent: TaskId | None = None,
        client: ClientId = OWN,
    ) -> int:
        """Let a task, a lease or an actor wait for its turn; gives its number.

        Raises:
            SerializationError: its arguments are too large to be sent.
            NodeClosedError: the node is being shut down.
            InfeasibleError: it could never run; a parent learns it from the handle.
        """
        parent = actor = None
        if func.actor is None and not func.spec.is_lease:
            parent = self.stack.parent()
            if parent is None:
                parent = actor = actor_job.get()
        try:
            self.check(func, payload)
        except InfeasibleError as error:
            if parent is None:
                raise
            receiver.settle(error)
            self._last_task += 1
            return self._last_task
        self._catch_up()
        task = TaskId(self._last_task + 1)
        if func.actor is not None:
            self.jobs[task] = self.actors.job_of(task, func, receiver)
        elif not func.spec.is_lease:
            is_urgent = actor is not None
            self.jobs[task] = Job(self, task, func, parent, is_urgent=is_urgent)
        parent_task = None if parent is None else parent.task
        func = self._with_own_worker(func)
        return super().submit(func, payload, receiver, parent_task, client)

    def check(self, func: FunctionSpec, payload: bytes) -> None:
        """Refuse what can never be served; see `submit`."""
        if self.scheduler.is_closing:
            raise NodeClosedError("this node is being shut down.")
        check_arguments(func, payload)
        if func.checked_by is not self._mark:
            check_func(func, self.scheduler.ledger)
            if not func.spec.is_grouped:
                func.checked_by = self._mark

    def _with_own_worker(self, func: FunctionSpec) -> FunctionSpec:
        """The function as one whose tasks have a worker each, and wait in order."""
        known = self._with_own_workers.get(func.id)
        if known is None or known[0] is not func.spec:
            spec = replace(func.spec, max_calls=1, priority=0)
            known = self._with_own_workers[func.id] = (
                func.spec,
                replace(func, spec=spec),
            )
        return known[1]

    def needed_by(self, task: TaskId) -> list[TaskId]:
        """The tasks that make those arguments of a task that are still to come."""
        call = self.call_of(task)
        payload = None if call is None else call.payload
        if type(payload) is not Payload:
            return []
        values = dict.fromkeys(payload.needs)
        return [TaskId(value.task) for value in values if value.is_pending]

    # Who waits for what.

    def tell_waits(self, job: Job) -> None:
        """A task's code waits for others than before."""
        if job.id != job.task or job.record is None:
            return  # a method of an actor, which holds no CPU
        awaited = tuple(child.id for child in job.children() if child.waiters)
        is_elsewhere = bool(job.calls_awaited or job.needed)
        self.wait(job.id, awaited, is_elsewhere)

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task or a call now."""
        if task >= FIRST_CALL:
            self.actors.begin_wait(task)
        else:
            self._count_waiters(task, 1)

    def end_wait(self, task: int) -> None:
        """Note that a wait has ended before its task."""
        if task >= FIRST_CALL:
            self.actors.end_wait(task)
        else:
            self._count_waiters(task, -1)

    def _count_waiters(self, task: int, more: int) -> None:
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.waiters += more
            if job.parent is not None:
                # Later: to tell of each one by itself takes quadratic time.
                self._changed_waits[job.parent] = None
                self.wake()

    def tell_changed_waits(self) -> None:
        """Tell for what the code on event loops waits since this was asked last."""
        while self._changed_waits:
            self.tell_waits(self._changed_waits.popitem()[0])

    def settle(self, task: int) -> None:
        """Note that a task has ended."""
        if task >= FIRST_CALL:
            self.actors.end_wait(task, is_over=True)
        elif (job := self.jobs.get(TaskId(task))) is not None:
            job.waiters = 0

    def unstartable(self, loop: JobLoop) -> Job | None:
        """Return a job that can never start, because waiting plain code has the thread.

        The scheduler finds deadlocks over what tasks hold. This method finds those over
        what actors hold: while plain code waits, neither the program nor the actors
        themselves can run to end an actor.

        Args:
            loop: the loop that asks. The answer is None for the program's loop: while
                that loop runs, actors can still end.
        """
        if loop is self.actors.runner or self.starting or self.assigned:
            return None
        if self.holders or self.streams.jobs:
            return None  # a generator may end, if its items are taken
        records = (job.record for job in self.jobs.values() if job.waiters)
        awaited = [
            record
            for record in records
            if record is not None and record.state is TaskState.WAITING
            if not self.scheduler.fits(record)
        ]
        if not awaited or not all(job.is_blocked for job in self.stack.running):
            return None
        # The one that was started last has the least to lose.
        return self.jobs[awaited[-1].id]

    def why_unstartable(self, job: Job) -> str:
        """The chain from the first that waits to the one that cannot run."""
        chain = [*self.stack.running, job]
        links = "; ".join(
            f"{one.name} holds {one.func.spec.shape.request} and waits for {two.name}"
            for one, two in pairwise(chain)
        )
        wanted = job.func.spec.shape.request
        others = " and actors" if self.actors.are_there else ""
        return (
            f"{job.name} asks for {wanted}, which waiting tasks{others} hold: {links}"
        )

    # What the program, or a task, wants.

    def cancel(self, task: int) -> None:
        """Cancel a task or a call; its receiver gets no outcome."""
        if task >= FIRST_CALL:
            self.actors.cancel_call(task)
        else:
            self.settle(task)
            super().cancel(task)

    def demand(self, task: int, limit: int) -> None:
        """Let a task or a call that is a stream yield so many items in all."""
        if task >= FIRST_CALL:
            self.actors.demand_call(task, limit)
        else:
            super().demand(task, limit)

    def force_close(self) -> None:
        """Stop all jobs, and leave those behind that would take their time."""
        self.feed(Scheduler.close)
        for job in list(self.jobs.values()):
            job.abandon()
