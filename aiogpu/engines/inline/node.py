"""The inline node: its scheduler, stand-ins for workers, and the order of jobs.

The scheduler decides as for real workers, with one difference: `InlineNode.may_begin`
decides whether a worker is available for a task whose resources are free. `InlinePool`
stands for all processes: a message to a worker becomes a job, which a `LoopRunner`
begins in one of the next callbacks of its loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

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
from aiogpu.errors import InfeasibleError, NodeClosedError, OptionError
from aiogpu.runtime.actors.actor import FIRST_CALL, Actor
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import PickledValue

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.observe.status import UnendedStatus
    from aiogpu.runtime.pending_tasks import Call
    from aiogpu.runtime.workers.pool import Pool
    from aiogpu.wire.messages import Bind, Create

T = TypeVar("T")


class ActorsPort(Protocol):
    """The actors in this process, as tasks need them; see `InlineActors`."""

    @property
    def runner(self) -> JobLoop:
        """The runner of their calls, on the program's loop."""
        ...

    @property
    def has_living(self) -> bool:
        """True if an actor has not ended."""

    def job_of(self, task: TaskId, func: FunctionSpec, actor: object, /) -> Job:
        """Make the job that creates an actor."""

    def known(self, actor: int, /) -> Actor:
        """Return an actor that lives or has handles."""

    def begin_wait(self, number: int, /) -> None:
        """Note that the running code waits for a call; fail a wait that cannot end."""

    def end_wait(self, number: int, /, is_over: bool = False) -> None:
        """Note the end of a wait for a call; `is_over`: of all waits for the call."""

    def next_call(self) -> Job | None:
        """Return the next call to run; None if there is none."""

    def cancel_call(self, number: int, /) -> None:
        """Cancel a call."""

    def demand_call(self, number: int, limit: int, /) -> None:
        """Set the number of items that a call's stream may yield in all."""


class InlineScheduler(Scheduler):
    """A scheduler that gives one task at a time a worker.

    Args:
        ledger: the node's resources.
        config: its settings.
        node: decides whether a task may begin.
    """

    children_first = True

    def __init__(
        self, ledger: Ledger, config: SchedulerConfig, node: InlineNode
    ) -> None:
        super().__init__(ledger, config)
        self._node = node

    def has_worker(self, record: TaskRecord, _lease: Lease) -> bool:
        """Return whether a task whose lease is free may begin now."""
        return record.spec.is_lease or self._node.may_begin(record)

    def take(self, record: TaskRecord) -> Lease | None:
        """Take a task's resources."""
        return self._ask(record, super().take)

    def fits(self, record: TaskRecord) -> bool:
        """Return whether a task's resources are free."""
        return self._ask(record, super().fits)

    def _ask(self, record: TaskRecord, ask: Callable[[TaskRecord], T]) -> T:
        """Call `ask`; for an urgent task, CPUs of the jobs below count as free."""
        job = self._node.jobs.get(record.id)
        if job is None or not job.is_urgent:
            return ask(record)
        with self._node.cpus_of_waiting_jobs():
            return ask(record)


class InlinePool:
    """Stands for all processes: workers are jobs of this process.

    Implements both `Pool` and `WorkerCommands`.

    Attributes:
        unended: as for `Pool`; empty, since no process can be left.
        awaited_imports: as for `Pool`; empty, since no task waits for an import.
    """

    unended: Final[Mapping[int, UnendedStatus]] = {}
    awaited_imports: Final[Mapping[int, str]] = {}

    def __init__(self, node: InlineNode) -> None:
        self.workers: dict[int, InlineWorker] = cast("Any", node.workers)
        self._node = node

    def __repr__(self) -> str:
        return f"<InlinePool of {len(self.workers)}>"

    @property
    def commands(self) -> InlinePool:
        """The commands to workers."""
        return self

    def spawn(
        self, worker: int, _environment: object = (), _function: object = None
    ) -> None:
        """Start a stand-in for a worker."""
        self.workers[worker] = InlineWorker(worker)
        self._node.starting.append(WorkerId(worker))
        self._node.wake()

    def unclaim(self, worker: int) -> None:
        """Nothing: any task may begin in a stand-in."""

    def retire(self, worker: int) -> None:
        """Retire a worker."""
        self._node.lose(worker)

    def assign(
        self, worker: int, task: TaskId, call: Call, bind: Bind, is_last: bool
    ) -> None:
        """Let a task's code begin."""
        run = call.run(task, is_last, with_values)
        self._assign(worker, task, call, bind, (run.payload, run.limit, run.skip))

    def create(self, worker: int, call: Call, bind: Bind, creation: Create) -> None:
        """Let an actor's constructor begin."""
        payload = with_values(creation.payload)
        self._assign(worker, TaskId(creation.task), call, bind, (payload, 0, 0))

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
        """Set the number of items that a task's generator may yield in all."""
        self._node.streams.raise_limit(task, limit)

    def begun(self, worker: int) -> int:
        """Return the number of a worker's last begun request, 0 for none."""
        known = self.workers.get(worker)
        return 0 if known is None else known.begun

    def drop(self, worker: InlineWorker, call: int, _count: int) -> None:
        """Cancel an actor's call."""
        worker.peer.drop(call)

    def announce_stop(self) -> None:
        """Do nothing: jobs ask the scheduler."""

    def interrupt(self, *_args: object, **_options: object) -> None:
        """Do nothing: `drop` has stopped the call if possible."""

    def expect_actor(self, worker: InlineWorker) -> None:
        """Do nothing: the worker becomes an actor by its job."""

    def kill(self, worker: int) -> None:
        """End an actor's object, and allow a new one."""
        known = self.workers[worker]
        if known.peer is not None:
            known.peer.restart()


class MonotonicLoop:
    """The program's loop, with a clock that also runs while an inner loop runs."""

    time = staticmethod(time.monotonic)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def node_id() -> str:
    """Return the id of a node in this process, as tasks see it."""
    return f"inline-{os.getpid()}"


class InlineNode(JobDriver):
    """One node, with all event loops on which its tasks run.

    Attributes:
        starting: workers that the scheduler has requested and that have not started.
        assigned: jobs that have a worker and have not begun.
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
        self._mark = object()  # marks functions that were found feasible
        super().__init__(
            loop,
            InlineScheduler(ledger, config, self),
            Assignment(vendors, ledger, os.environ),
            self.check,
            lambda _node: cast("Pool", InlinePool(self)),
            pack,
        )
        self.guard.is_on = False
        self.handlers[effects.Interrupt] = lambda effect: self.jobs[
            effect.task
        ].interrupt()
        self.handlers[effects.Kill] = self._kill
        self.handlers[effects.Revoke] = self._revoke
        self.handlers[effects.Settle] = self._settle
        self.handlers[effects.Forget] = self._forget

    def __repr__(self) -> str:
        return f"<InlineNode {len(self.jobs)} jobs, {self.stack!r}>"

    # Events and effects of the scheduler.

    @contextmanager
    def cpus_of_waiting_jobs(self) -> Iterator[None]:
        """Context manager: count the CPUs of started jobs as free.

        The jobs wait while an urgent task runs on top of them.
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
        """Abandon a coroutine that has not ended within its grace period."""
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
        """Answer a revocation: a worker has at most the task that it has begun."""
        known = self.scheduler.workers.get(effect.worker)
        began = known.task.id if known is not None and known.task is not None else None
        self.feed(Scheduler.revoked, effect.worker, effect.number, began)

    def _settle(self, effect: effects.Settle) -> None:
        self.results.settle(effect)
        self.jobs.pop(effect.task, None)

    def _forget(self, effect: effects.Forget) -> None:
        self.results.forget(effect)
        self.jobs.pop(effect.task, None)

    # The order of jobs.

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
            return False  # it is about to end, and then its children lose their parent
        parent = job.parent
        while parent is not None and parent.is_over:
            parent = parent.parent  # the job goes on without its ended parent
        if parent is top:
            return True
        return any(job.worker is None and not job.has_ended for job in top.needed)

    def _is_due(self, worker: WorkerRecord) -> bool:
        """Return whether a worker has a task that is not urgent and has not begun."""
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
        """Queue a task, a lease or an actor; return its number.

        Raises:
            SerializationError: the arguments are too large to send.
            NodeClosedError: the node is shutting down.
            InfeasibleError: the program's request can never be met. For the request of
                a task, the handle gets the error.
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
        """Check a request; see `submit`."""
        if self.scheduler.is_closing:
            raise NodeClosedError("this node is being shut down.")
        check_arguments(func, payload)
        if func.checked_by is not self._mark:
            check_func(func, self.scheduler.ledger)
            if func.spec.is_evictable:
                raise OptionError(
                    f"{func.spec.name} has evict_after, but an actor on an inline node "
                    f"has no process that could leave; leave it out, or test with "
                    f"aiogpu.init(num_gpus=...)."
                )
            if not func.spec.is_grouped:
                func.checked_by = self._mark

    def _with_own_worker(self, func: FunctionSpec) -> FunctionSpec:
        """Return a copy of a function with one worker per task and no priority."""
        known = self._with_own_workers.get(func.id)
        if known is None or known[0] is not func.spec:
            spec = replace(func.spec, max_calls=1, priority=0)
            known = self._with_own_workers[func.id] = (
                func.spec,
                replace(func, spec=spec),
            )
        return known[1]

    def needed_by(self, task: TaskId) -> list[TaskId]:
        """Return the tasks that produce the missing arguments of a task."""
        call = self.call_of(task)
        payload = None if call is None else call.payload
        if type(payload) is not Payload:
            return []
        values = dict.fromkeys(payload.needs)
        return [TaskId(value.task) for value in values if value.is_pending]

    # Waits.

    def tell_waits(self, job: Job) -> None:
        """Report for which children a task's code waits."""
        if job.id != job.task or job.record is None:
            return  # a call of an actor, which holds no CPU
        awaited = tuple(child.id for child in job.children() if child.waiters)
        is_elsewhere = bool(job.calls_awaited or job.needed)
        self.wait(job.id, awaited, is_elsewhere)

    def begin_wait(self, task: int) -> None:
        """Note that code waits for a task or a call."""
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
                # Reported later: a report per wait would take quadratic time.
                self._changed_waits[job.parent] = None
                self.wake()

    def tell_changed_waits(self) -> None:
        """Report all waits that have changed since the last call."""
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

        The scheduler finds deadlocks over resources of tasks. This method finds
        deadlocks over resources of actors: while plain code waits, neither the program
        nor an actor can run to end an actor.

        Args:
            loop: the calling loop. For the program's loop the result is None: while
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
        # The job that was started last loses the least work.
        return self.jobs[awaited[-1].id]

    def why_unstartable(self, job: Job) -> str:
        """Describe the chain of waits that ends with the job that cannot run."""
        chain = [*self.stack.running, job]
        waits = "; ".join(
            f"{waiter.name} holds {waiter.func.spec.shape.request} and waits for "
            f"{awaited.name}"
            for waiter, awaited in pairwise(chain)
        )
        wanted = job.func.spec.shape.request
        others = " and actors" if self.actors.has_living else ""
        return (
            f"{job.name} asks for {wanted}, which waiting tasks{others} hold: {waits}"
        )

    # Requests of the program and of tasks.

    def cancel(self, task: int) -> None:
        """Cancel a task or a call; its receiver gets no outcome."""
        if task >= FIRST_CALL:
            self.actors.cancel_call(task)
        else:
            self.settle(task)
            super().cancel(task)

    def demand(self, task: int, limit: int) -> None:
        """Set the number of items that a stream may yield in all."""
        if task >= FIRST_CALL:
            self.actors.demand_call(task, limit)
        else:
            super().demand(task, limit)

    def force_close(self) -> None:
        """Stop all jobs, and abandon jobs that do not stop."""
        self.feed(Scheduler.close)
        for job in list(self.jobs.values()):
            job.abandon()
