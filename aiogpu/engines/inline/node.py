"""What all runners of a node without processes share: its tasks, and what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from aiogpu.core.ids import TaskId
from aiogpu.core.ledger import Ledger
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources import CPU, Request
from aiogpu.engines.admission import check_arguments, check_site
from aiogpu.engines.inline.execute import Executor
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.turns import Turns
from aiogpu.errors import AiogpuError, NodeClosedError
from aiogpu.runtime.assignment import Assignment
from aiogpu.runtime.call import Call, Site


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
        is_closing: whether nothing more is taken.
    """

    ledger: Ledger
    assignment: Assignment
    executor: Executor
    cancel_grace: float
    clock: Callable[[], float]
    jobs: dict[TaskId, Job] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    is_closing: bool = False
    _last_task: int = 0
    # Left on sites that were found feasible.
    _mark: object = field(default_factory=object)

    def __repr__(self) -> str:
        return f"<InlineNode {len(self.jobs)} jobs, {self.turns!r}>"

    def new_record(self, site: Site) -> TaskRecord:
        """A record for one more task, with the next number."""
        self._last_task += 1
        spec, now = site.spec, self.clock()
        return TaskRecord(TaskId(self._last_task), spec, spec.max_retries, now)

    def grace_of(self, job: Job) -> float:
        """Seconds after which this job, if cancelled, is left behind."""
        grace = job.record.spec.cancel_grace
        return self.cancel_grace if grace is None else grace

    def refusal(self, call: Call, parent: Job | None) -> AiogpuError | None:
        """Why a call is not to be served, None if it is.

        Raises:
            SerializationError: its arguments are too large to be sent.
            NodeClosedError: the node is being shut down.
            InfeasibleError: it could never run; a parent learns it from the handle.
        """
        if self.is_closing:
            raise NodeClosedError("this node is being shut down.")
        check_arguments(call.site, call.payload)
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
        """Stop a task; its receiver is told nothing any more."""
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.call.receiver = None
            job.waiters = 0
            job.runner.stop(job)

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task now."""
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.waiters += 1
            if job.parent is not None:
                # What does not fit may now be what can never begin.
                job.runner.wake()

    def end_wait(self, task: int) -> None:
        """It waits no longer, although the task has not ended."""
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.waiters -= 1

    def settle(self, task: int) -> None:
        """A task has ended; nobody waits for it any more."""
        job = self.jobs.get(TaskId(task))
        if job is not None:
            job.waiters = 0

    def lend(self, job: Job) -> bool:
        """Take what a job asks for; False if there is not enough."""
        request = job.record.spec.shape.request
        if self.turns.running:
            # Its ancestors wait meanwhile: the CPUs that they hold are its own.
            scalars = tuple(part for part in request.scalars if part[0] != CPU)
            request = Request(
                scalars, request.devices, request.accelerator_type, request.spread
            )
        job.lease = self.ledger.take(request)
        return job.lease is not None

    def hopeless(self, waiting: list[Job]) -> Job | None:
        """The job whose wait can never end, as all that hold something wait too.

        Args:
            waiting: those that do not fit.
        """
        awaited = [job for job in waiting if job.waiters]
        if not awaited or not all(job.is_blocked for job in self.turns.running):
            return None
        # The one that was started last has the least to lose.
        return awaited[-1]

    def why_hopeless(self, job: Job) -> str:
        """The chain from the first that waits to the one that cannot run."""
        chain = [*self.turns.running, job]
        told = "; ".join(
            f"{one.name} holds {one.record.spec.shape.request} and waits for {two.name}"
            for one, two in pairwise(chain)
        )
        wanted = job.record.spec.shape.request
        return f"{job.name} asks for {wanted}, and those that wait hold it: {told}"

    def close_down(self) -> None:
        """Take nothing more, and stop all that there is."""
        self.is_closing = True
        for job in list(self.jobs.values()):
            job.call.tell_closed()
            job.runner.stop(job)
