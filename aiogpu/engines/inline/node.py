"""What all runners of a node without processes share: its tasks, and what they need."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakSet

from aiogpu.client.function_spec import Site
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.units import CPU
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import take_grouped
from aiogpu.engines.admission import check_arguments, check_site
from aiogpu.engines.inline.beside import Beside
from aiogpu.engines.inline.execute import Executor
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.leases import InlineLeases
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.engines.inline.turns import Turns
from aiogpu.errors import AiogpuError, NodeClosedError
from aiogpu.runtime.actors.registry import FIRST_CALL
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.runtime.pending_tasks import Call
from aiogpu.serialization.references import PickledValue

if TYPE_CHECKING:
    from aiogpu.engines.inline.residents import Residents
    from aiogpu.engines.inline.runner import Runner


@dataclass(slots=True, eq=False)
class InlineNode:
    """One node, and all the event loops on which tasks of it run.

    Attributes:
        ledger: what there is, and which job holds it.
        assignment: the variables that go with a lease.
        executor: runs the jobs' code.
        cancel_grace: seconds after which a cancelled coroutine is left behind, unless
            it has its own.
        clock: the time by the program's loop; other loops may keep their own.
        jobs: all that have not ended, by id.
        turns: which of them run, and who is next.
        runners: all that carry its jobs.
        actors: set by who makes it.
        is_closing: whether nothing more is taken.
        beside: the generators that have begun.
        leases: what is held by no task.
        reservation: nothing is kept for anybody.
    """

    ledger: Ledger
    assignment: Assignment
    executor: Executor
    cancel_grace: float
    pack: Callable[[PickledValue], bytes]
    clock: Callable[[], float]
    jobs: dict[TaskId, Job] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    runners: WeakSet[Runner] = field(default_factory=WeakSet)
    actors: Residents = field(init=False)
    is_closing: bool = False
    beside: Beside = field(init=False)
    leases: InlineLeases = field(init=False)
    reservation: None = None
    _last_task: int = 0
    # Left on sites that were found feasible.
    _mark: object = field(default_factory=object)

    def __post_init__(self) -> None:
        self.beside = Beside(self.turns)
        self.leases = InlineLeases(self)

    def __repr__(self) -> str:
        return f"<InlineNode {len(self.jobs)} jobs, {self.turns!r}>"

    @property
    def workers(self) -> list[WorkerRecord]:
        """What stands for workers: one for each that runs, and for each actor."""
        running = dict.fromkeys([*self.turns.running, *self.beside.jobs.values()])
        records = [job.record for job in running]
        records += [one.record for one in self.actors.living() if one.record]
        return [record.worker for record in records if record.worker]

    def new_record(self, site: Site) -> TaskRecord:
        """A record for one more task, with the next number."""
        self._last_task += 1
        spec, now = site.spec, self.clock()
        return TaskRecord(TaskId(self._last_task), spec, now)

    def grace_of(self, job: Job) -> float:
        """Seconds after which this job, if cancelled, is left behind."""
        spec = job.record.spec
        if spec.cancel_grace is None or spec.is_endless:
            return self.cancel_grace
        return spec.cancel_grace

    def surroundings(self, job: Job, lease: Lease, worker: WorkerId) -> Surroundings:
        """Return what a job that has begun finds around it."""
        site = job.call.site
        bind = self.assignment.bind(lease, site.environ)
        return Surroundings(
            bind.environ,
            {
                "actor": job.actor_id,
                "node": f"inline-{os.getpid()}",
                "worker": worker,
                "task": job.id,
                "name": job.name,
                "resources": site.resources,
                "accelerators": bind.accelerators,
            },
        )

    def wake(self) -> None:
        """Have whoever is at work look for what can begin now."""
        for runner in list(self.runners):
            runner.wake()

    def refusal(self, call: Call, parent: Job | None) -> AiogpuError | None:
        """Return why a call is not to be served, None if it is.

        Raises:
            SerializationError: its arguments are too large to be sent.
            NodeClosedError: the node is being shut down.
            InfeasibleError: it could never run; a parent learns it from the handle.
        """
        if self.is_closing:
            raise NodeClosedError("this node is being shut down.")
        check_arguments(call.site, call.payload)
        if call.site.spec.is_grouped:
            return self.leases.placements.refusal(call.site.spec)
        if call.site.checked_by is not self._mark:
            try:
                check_site(call.site, self.ledger)
            except AiogpuError as error:
                if parent is None:
                    raise
                return error
            call.site.checked_by = self._mark
        return None

    def cancel(self, task: int) -> None:
        """Stop a task or a call; its receiver is told nothing any more."""
        if task >= FIRST_CALL:
            self.actors.cancel_call(task)
            return
        if self.leases.give_back(task):
            return
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.call.receiver = None
            job.waiters = 0
            job.runner.stop(job)

    def demand(self, task: int, limit: int) -> None:
        """Let a task or a call that is a stream yield so many items in all."""
        job = self.jobs.get(TaskId(task))
        if task >= FIRST_CALL:
            self.actors.demand_call(task, limit)
        elif job is not None:
            job.call.limit = limit
            self.beside.rise(task, limit)

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task or a call now."""
        if task >= FIRST_CALL:
            self.actors.waits.begin(task)
            return
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.waiters += 1
            if job.parent is not None:
                # What does not fit may now be what can never begin.
                job.runner.wake()

    def end_wait(self, task: int) -> None:
        """It waits no longer, although the task has not ended."""
        if task >= FIRST_CALL:
            self.actors.waits.end(task)
            return
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.waiters -= 1

    def settle(self, task: int) -> None:
        """A task has ended; nobody waits for it any more."""
        if task >= FIRST_CALL:
            self.actors.waits.end(task)
            return
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.waiters = 0

    def lend(self, job: Job) -> bool:
        """Take what a job asks for; False if there is not enough."""
        if job.record.spec.is_endless:
            job.lease = self._lend_for_life(job)
            return job.lease is not None
        request = job.record.spec.shape.request
        if self.turns.running or (job.parent and job.parent.id in self.beside.jobs):
            # Its ancestors wait meanwhile: the CPUs that they hold are its own.
            scalars = tuple(part for part in request.scalars if part[0] != CPU)
            request = replace(request, scalars=scalars)
        job.lease = take_grouped(self.ledger, request)
        return job.lease is not None

    def _lend_for_life(self, job: Job) -> Lease | None:
        """What an actor holds; CPUs only until it is made, unless it asks for some."""
        terms, ledger = job.call.site.actor, self.ledger
        assert terms is not None, job
        beneath = [one.lease for one in self.turns.running if one.lease is not None]
        lent = [lease for lease in beneath if not lease.is_lent]
        # Their code does not run while this one does.
        for lease in lent:
            ledger.lend(lease)
        taken = take_grouped(ledger, job.record.spec.shape.request)
        for lease in lent:
            ledger.resume(lease)
        if taken is not None and not terms.keeps_cpus:
            ledger.lend(taken)
        return taken

    def hopeless(self, waiting: list[Job], runner: Runner) -> Job | None:
        """The job whose wait can never end, as all that hold something wait too.

        Args:
            waiting: those that do not fit.
            runner: who looks. While the program's loop runs, the program may end
                actors, and so may these themselves.
        """
        if self.actors.are_there and runner is self.actors.runner:
            return None
        if self.leases.granted:
            return None  # the program may give them back
        if self.beside.jobs:
            return None  # a generator may end, if its items are taken
        awaited = [job for job in waiting if job.waiters]
        if not awaited or not all(map(self._is_blocked, self.turns.running)):
            return None
        # The one that was started last has the least to lose.
        return awaited[-1]

    def _is_blocked(self, job: Job) -> bool:
        return job.is_blocked or self.actors.waits.are_by(job)

    def why_hopeless(self, job: Job) -> str:
        """The chain from the first that waits to the one that cannot run."""
        chain = [*self.turns.running, job]
        told = "; ".join(
            f"{one.name} holds {one.record.spec.shape.request} and waits for {two.name}"
            for one, two in pairwise(chain)
        )
        wanted = job.record.spec.shape.request
        others = ", and actors the rest" if self.actors.are_there else ""
        return (
            f"{job.name} asks for {wanted}, and those that wait hold it{others}: {told}"
        )

    def close_down(self) -> None:
        """Take nothing more, and stop all that there is."""
        self.is_closing = True
        self.actors.close_down()
        self.leases.close_down()
        for job in list(self.jobs.values()):
            job.call.tell_closed()
            job.runner.stop(job)
