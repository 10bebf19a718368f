"""Carries jobs from their turn to their end, one at a time.

Nothing runs where a job is added or cancelled, but in callbacks of the loop. A job
whose parent waits for it lies on top of it, with its surroundings and its lease.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextvars import Context
from functools import partial
from typing import Any, Final

from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Lease, Ledger
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.policy import may_retry
from aiogpu.core.records import WorkerRecord, move_task
from aiogpu.core.resources import CPU, Request
from aiogpu.engines.inline.execute import Executor
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.offspring import Offspring
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.engines.inline.turns import Turns
from aiogpu.errors import NodeError
from aiogpu.runtime.assignment import Assignment
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Done, Failed

_log: Final = logging.getLogger(__name__)


class Runner:
    """Runs the jobs of one node on its loop.

    Attributes:
        ledger: what there is, and which job holds it.
        jobs: all that have not ended, by id.
        turns: which of them run, and who is next.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ledger: Ledger,
        assignment: Assignment,
        executor: Executor,
        cancel_grace: float,
    ) -> None:
        self.ledger = ledger
        self.jobs: dict[TaskId, Job] = {}
        self.turns = Turns()
        self._loop = loop
        self._assignment = assignment
        self._executor = executor
        self._cancel_grace = cancel_grace
        self._offspring = Offspring(loop)
        self._is_woken = False
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        # What the loop is to call must not inherit the context of a task.
        self._context = Context()

    def __repr__(self) -> str:
        return f"<Runner {len(self.jobs)} jobs, {self.turns!r}>"

    def add(self, job: Job) -> None:
        """Let a job wait for its turn."""
        if job.due is not None:
            job.timer = self._loop.call_at(
                job.due, self._expire, job, context=self._context
            )
        self.jobs[job.id] = job
        self.turns.add(job)
        self._wake()

    def _wake(self) -> None:
        """Have the next job begun soon; never here, where somebody else runs."""
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._advance, context=self._context)

    def _advance(self) -> None:
        self._is_woken = False
        job = self.turns.take()
        if job is None:
            return
        if self._is_overdue(job):
            # A plain function before it has kept the loop from ringing.
            self._expire(job)
        elif (lease := self._lend(job)) is None:
            self._refuse(job)
        else:
            self._begin(job, lease)

    def _is_overdue(self, job: Job) -> bool:
        return job.due is not None and self._loop.time() >= job.due

    def _lend(self, job: Job) -> Lease | None:
        request = job.record.spec.shape.request
        if self.turns.running:
            # Its ancestors wait meanwhile: the CPUs that they hold are its own.
            scalars = tuple(part for part in request.scalars if part[0] != CPU)
            request = Request(scalars, request.devices, request.accelerator_type)
        return self.ledger.take(request)

    def _refuse(self, job: Job) -> None:
        holders = ", ".join(above.name for above in self.turns.running)
        job.call.tell(
            NodeError(
                f"{job.name} asks for {job.record.spec.shape.request}, and the tasks "
                f"that wait for it hold too much of that: {holders}. It could never "
                f"begin. Let them ask for less, or call it from the program."
            )
        )
        self._end(job)

    def _begin(self, job: Job, lease: Lease) -> None:
        site, running = job.call.site, self.turns.running
        self.turns.leave(job)
        running.append(job)
        self._is_quiet.clear()
        move_task(job.record, TaskState.RUNNING)
        level = WorkerId(len(running))
        job.record.worker = WorkerRecord(
            level, WorkerState.BUSY, task=job.record, lease=lease
        )
        job.lease = lease
        bind = self._assignment.bind(lease, site.environ)
        job.surroundings = Surroundings(
            bind.environ,
            {
                "node": f"inline-{os.getpid()}",
                "worker": level,
                "task": job.id,
                "name": job.name,
                "resources": site.resources,
                "accelerators": bind.accelerators,
            },
        )
        job.surroundings.put_on()
        self._attempt(job)

    def _attempt(self, job: Job) -> None:
        if job.record.state is not TaskState.RUNNING:
            self._end(job)  # it was cancelled between two attempts
            return
        assert job.surroundings is not None, job
        job.surroundings.renew()
        try:
            self._run(job)
        except BaseException:
            if job.main is None and job.id in self.jobs:
                # A Ctrl-C has found this package's own code; the program ends.
                job.call.tell_closed()
                self._end(job)
            raise

    def _run(self, job: Job) -> None:
        context = job.fresh_context()
        outcome = context.run(self._executor.call, job)
        if isinstance(outcome, Outcome):
            self._finish(job, outcome)
            return
        self._offspring.begin()
        job.main = self._loop.create_task(
            self._executor.finish(job, outcome), name=job.name, context=context
        )
        ended = partial(self._on_ended, job, outcome)
        job.main.add_done_callback(ended, context=self._context)

    def _on_ended(
        self,
        job: Job,
        begun: Coroutine[Any, Any, Any],
        main: asyncio.Task[Outcome],
    ) -> None:
        self._offspring.end()
        job.main = None
        if job.record.state is TaskState.ENDED:
            return  # it was given up
        if main.cancelled():
            begun.close()  # maybe it never began
            self._end(job)
        else:
            self._finish(job, main.result())

    def _finish(self, job: Job, outcome: Outcome) -> None:
        call, answer = job.call, outcome.answer
        if job.record.state is TaskState.RUNNING:
            is_late = self._is_overdue(job)
            if is_late:
                call.tell_timeout()
            elif self._is_retried(job, outcome):
                self._loop.call_soon(self._attempt, job, context=self._context)
                return
            elif type(answer) is Done and call.receiver is not None:
                call.receiver.receive(answer.payload)
            elif type(answer) is Failed:
                error = call.error
                if error is None:
                    error = unpack_failure(answer, job.name)
                outcome.show_frames(error)
                call.tell(error)
        self._end(job)
        if outcome.is_ctrl_c and outcome.error is not None:
            raise outcome.error

    def _is_retried(self, job: Job, outcome: Outcome) -> bool:
        answer = outcome.answer
        job.call.error = None
        return (
            type(answer) is Failed
            and not outcome.is_ctrl_c
            and job.call.is_retried(answer)
            and may_retry(job.record)
        )

    def _expire(self, job: Job) -> None:
        if job.record.state is not TaskState.STOPPING:
            job.call.tell_timeout()
            self.stop(job)

    def stop(self, job: Job) -> None:
        """Stop a job in whichever state it is; nobody wants its result."""
        record = job.record
        if record.state is TaskState.WAITING:
            self._end(job)
        elif record.state is TaskState.RUNNING:
            move_task(record, TaskState.STOPPING)
            job.stop_timer()
            if job.main is not None:
                job.main.cancel()
                job.timer = self._loop.call_later(
                    self._cancel_grace,
                    self._give_up,
                    job,
                    context=self._context,
                )

    def _give_up(self, job: Job) -> None:
        _log.warning(
            "! %s was cancelled %g s ago and runs on. In a worker it would be killed; "
            "here it is left behind, and its code may run beside other tasks'.",
            job.name,
            self._cancel_grace,
        )
        if job.main is not None:
            job.main.cancel()
        self._end(job)

    def _end(self, job: Job) -> None:
        """Its code has stopped, or never ran: let the next one have its turn."""
        move_task(job.record, TaskState.ENDED)
        job.stop_timer()
        self.turns.leave(job)
        del self.jobs[job.id]
        for ended in self.turns.pop_ended():
            assert ended.surroundings is not None, ended
            assert ended.lease is not None, ended
            ended.surroundings.take_off()
            self.ledger.give_back(ended.lease)
        if not self.turns.running:
            self._is_quiet.set()
        self._wake()

    async def close(self) -> None:
        """Stop all jobs, and wait for those that take their time."""
        for job in list(self.jobs.values()):
            job.call.tell_closed()
            self.stop(job)
        await self._is_quiet.wait()

    def abandon(self) -> None:
        """Give the process its own variables back; there is nothing else."""
        for job in reversed(self.turns.running):
            assert job.surroundings is not None, job
            job.surroundings.take_off()
        self.turns.running.clear()
