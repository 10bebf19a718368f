"""Tasks in the calling process, one after the other, in the order of submission.

For tests and debuggers: breakpoints, monkeypatches and coverage reach into tasks.
All that one process can keep is kept as in a worker: copies of values, devices,
variables, errors, timeouts, retries, cancelling. A plain function blocks the loop
while it runs and cannot be interrupted; a coroutine is awaited on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextvars import Context
from functools import partial
from importlib import import_module
from typing import Any, Final

from aiogpu.accelerators.registry import INSTALLED
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Lease, Ledger
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.policy import may_retry
from aiogpu.core.records import TaskRecord, WorkerRecord, move_task
from aiogpu.core.resources import CPU, Request
from aiogpu.core.snapshot import NodeStatus
from aiogpu.engines.admission import check_arguments, check_site
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.inline.execute import Executor
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.offspring import Offspring
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.engines.inline.picture import picture
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.engines.inline.turns import Turns
from aiogpu.engines.inventory import take_inventory
from aiogpu.errors import NodeClosedError, NodeError, PreloadError
from aiogpu.runtime.assignment import Assignment
from aiogpu.runtime.call import Call, Receiver, Site
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Done, Failed

_log: Final = logging.getLogger(__name__)


class InlineEngine:
    """A node without processes."""

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self._options = options
        self._loop = loop
        self._ledger: Ledger | None = None
        self._assignment: Assignment
        self._turns = Turns()
        self._jobs: dict[TaskId, Job] = {}
        self._last_task = 0
        self._is_woken = False
        self._is_closing = False
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._executor = Executor(loop, not options.log_to_driver)
        self._offspring = Offspring(loop)
        # What this engine has the loop call must not inherit the context of a task.
        self._context = Context()
        self._mark = object()

    def __repr__(self) -> str:
        return f"<InlineEngine {len(self._jobs)} tasks, {self._ledger!r}>"

    async def open(self) -> None:
        """Import what is to be preloaded, and detect what there is."""
        for module in self._options.preload:
            try:
                import_module(module)
            except Exception as error:
                raise PreloadError(
                    f"init(preload=...) names {module!r}, which cannot be imported: "
                    f"{type(error).__name__}: {error}. Install it, or leave it out."
                ) from error
        ledger = await take_inventory(self._options)
        self._assignment = Assignment(INSTALLED, ledger, os.environ)
        self._ledger = ledger

    @property
    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            raise NodeClosedError("this node is not running.")
        return self._ledger

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Let a task wait for its turn; see `Engine.submit`."""
        ledger = self._open_ledger
        if self._is_closing:
            raise NodeClosedError("this node is being shut down.")
        if site.checked_by is not self._mark:
            check_site(site, ledger)
            site.checked_by = self._mark
        check_arguments(site, payload)
        self._last_task += 1
        spec = site.spec
        record = TaskRecord(TaskId(self._last_task), spec, spec.max_retries)
        job = Job(record, Call(site, payload, receiver))
        if spec.timeout is not None:
            job.due = self._loop.time() + spec.timeout
            job.timer = self._loop.call_at(
                job.due, self._expire, job, context=self._context
            )
        self._jobs[job.id] = job
        self._turns.add(job)
        self._wake()
        return job.id

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        job = self._jobs.get(TaskId(task))
        if job is not None:
            job.call.receiver = None
            self._stop(job)

    def _wake(self) -> None:
        """Have the next job begun soon; never here, where somebody else runs."""
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._advance, context=self._context)

    def _advance(self) -> None:
        self._is_woken = False
        job = self._turns.take()
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
        if self._turns.running:
            # Its ancestors wait meanwhile: the CPUs that they hold are its own.
            scalars = tuple(part for part in request.scalars if part[0] != CPU)
            request = Request(scalars, request.devices, request.accelerator_type)
        return self._open_ledger.take(request)

    def _refuse(self, job: Job) -> None:
        holders = ", ".join(above.name for above in self._turns.running)
        job.call.tell(
            NodeError(
                f"{job.name} asks for {job.record.spec.shape.request}, and the tasks "
                f"that wait for it hold too much of that: {holders}. It could never "
                f"begin. Let them ask for less, or call it from the program."
            )
        )
        self._end(job)

    def _begin(self, job: Job, lease: Lease) -> None:
        site, running = job.call.site, self._turns.running
        running.append(job)
        self._is_quiet.clear()
        move_task(job.record, TaskState.RUNNING)
        level = WorkerId(len(running))
        job.record.worker = WorkerRecord(
            level, WorkerState.BUSY, None, job.record, lease
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
            if job.main is None and job.id in self._jobs:
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
            self._stop(job)

    def _stop(self, job: Job) -> None:
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
                    self._options.cancel_grace,
                    self._give_up,
                    job,
                    context=self._context,
                )

    def _give_up(self, job: Job) -> None:
        _log.warning(
            "! %s was cancelled %g s ago and runs on. In a worker it would be killed; "
            "here it is left behind, and its code may run beside other tasks'.",
            job.name,
            self._options.cancel_grace,
        )
        if job.main is not None:
            job.main.cancel()
        self._end(job)

    def _end(self, job: Job) -> None:
        """Its code has stopped, or never ran: let the next one have its turn."""
        move_task(job.record, TaskState.ENDED)
        job.stop_timer()
        del self._jobs[job.id]
        for ended in self._turns.pop_ended():
            assert ended.surroundings is not None, ended
            assert ended.lease is not None, ended
            ended.surroundings.take_off()
            self._open_ledger.give_back(ended.lease)
        if not self._turns.running:
            self._is_quiet.set()
        self._wake()

    def total(self) -> dict[str, float]:
        """All resources by name."""
        return self._open_ledger.totals()

    def available(self) -> dict[str, float]:
        """What is free of each."""
        return self._open_ledger.available()

    def status(self) -> NodeStatus:
        """Who holds what, what waits; each running task counts as a worker."""
        return picture(self._open_ledger, self._jobs, self._turns.running)

    async def close(self) -> None:
        """Stop all tasks, and wait for those that take their time."""
        self._is_closing = True
        for job in list(self._jobs.values()):
            job.call.tell_closed()
            self._stop(job)
        await self._is_quiet.wait()

    def abandon(self) -> None:
        """Give the process its own variables back; there is nothing else."""
        for job in reversed(self._turns.running):
            assert job.surroundings is not None, job
            job.surroundings.take_off()
        self._turns.running.clear()
