"""Carries jobs from their turn to their end, one at a time, on one event loop.

Nothing runs where a job is added or cancelled, but in callbacks of the loop. A job
whose parent waits for it lies on top of it, with its surroundings and its lease. All
runners of a node share its turns, and one loop runs inside a callback of the other,
so that only the innermost is at work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, Final

from aiogpu.client.function_spec import Site
from aiogpu.client.interface import Receiver
from aiogpu.core.records import TaskState, WorkerRecord, WorkerState, move_task
from aiogpu.engines.inline.host import TaskHost
from aiogpu.engines.inline.job import Job, acting_job
from aiogpu.engines.inline.node import InlineNode
from aiogpu.engines.inline.offspring import Offspring
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.engines.inline.supplies import Expected, expect, expected
from aiogpu.runtime.pending_tasks import Call

_log: Final = logging.getLogger(__name__)


class Runner:
    """Runs jobs of a node on one loop.

    Attributes:
        node: what it shares with the runners of other loops.
        loop: the program's, a user's own inside a task, or one for plain code that
            waits.
        offspring: watches over what coroutines start there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, node: InlineNode) -> None:
        self.node = node
        self.loop = loop
        self._turns = node.turns
        self.offspring = Offspring(loop, node.executor)
        self._is_woken = False
        self._is_run = False
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        # What the loop is to call must not inherit the context of a task.
        self._context = Context()
        node.runners.add(self)

    def __repr__(self) -> str:
        return f"<Runner on {self.loop!r} of {self.node!r}>"

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Let a task wait for its turn; see `Engine.submit`."""
        node = self.node
        call, parent = Call(site, payload, receiver), self._turns.parent()
        maker = None if parent is not None else acting_job.get()
        refusal = node.refusal(call, parent or maker)
        record = node.new_record(site)
        if refusal is not None:
            call.tell(refusal)
        elif parent is not None and parent.record.state is not TaskState.RUNNING:
            call.tell_disowned()
        else:
            above = parent or maker
            self.add(Job(record, call, self, parent=above, is_urgent=bool(maker)))
        return record.id

    def add(self, job: Job) -> None:
        """Let a job wait for its turn."""
        timeout = job.record.spec.timeout
        if timeout is not None:
            job.due = self.loop.time() + timeout
            job.timer = self.loop.call_at(
                job.due, self._expire, job, context=self._context
            )
        self.node.jobs[job.id] = job
        if job.parent is not None:
            job.parent.brood[job.id] = job
        self._turns.add(job)
        expect(job)
        self.wake()

    def wake(self) -> None:
        """Have the next job begun soon; never here, where somebody else runs."""
        if not self._is_woken and not self.loop.is_closed():
            self._is_woken = True
            self.loop.call_soon(self._advance, context=self._context)

    def _advance(self) -> None:
        self._is_woken = False
        self.node.leases.look()
        if (call := self.node.actors.next_call()) is not None:
            self.wake()  # there may be more, or a job
            self._play(call)
            return
        too_large: list[Job] = []
        for job in self._turns.waiting():
            if job.is_waiting and self._look(job, too_large):
                return
        hopeless = self.node.hopeless(too_large, self)
        if hopeless is not None:
            if hopeless.fail_wait(self.node.why_hopeless(hopeless)):
                self._end(hopeless)
            elif self._is_run:
                self.loop.stop()

    def _look(self, job: Job, too_large: list[Job]) -> bool:
        """Begin a job, or end it; False if it has to wait on."""
        if job.is_overdue:
            # A plain function before it has kept the loop from ringing.
            self._expire(job)
            return True
        arguments = expected(job)
        if arguments is Expected.NEVER:
            self._end(job)
        elif arguments is Expected.NOW and self.node.lend(job):
            self._begin(job)
        else:
            too_large += [job] if arguments is Expected.NOW else []
            return False
        return True

    def _play(self, call: Job) -> None:
        """Run a call of an actor at once, on top of whatever runs."""
        call.runner = self
        self.node.jobs[call.id] = call
        self._turns.running.append(call)
        self._enter(call)

    def _begin(self, job: Job) -> None:
        lease = job.lease
        assert lease is not None, job
        job.runner = self
        self._turns.begin(job)
        level = job.worker_id(len(self._turns.running))
        job.record.worker = WorkerRecord(
            level, state=WorkerState.BUSY, task=job.record, lease=lease
        )
        job.surroundings = self.node.surroundings(job, lease, level)
        self._enter(job)

    def _enter(self, job: Job) -> None:
        assert job.surroundings is not None, job
        self._is_quiet.clear()
        move_task(job.record, TaskState.RUNNING)
        job.surroundings.put_on()
        self._attempt(job)

    def _attempt(self, job: Job) -> None:
        if job.record.state is not TaskState.RUNNING:
            self._end(job)  # it was cancelled between two attempts
            return
        assert job.surroundings is not None, job
        self.node.beside.bring_back(job)
        job.surroundings.renew()
        try:
            self._run(job)
        except BaseException:
            if job.main is None and job.id in self.node.jobs:
                # A Ctrl-C has found this package's own code; the program ends.
                job.call.tell_closed()
                self._end(job)
            raise

    def _run(self, job: Job) -> None:
        host = TaskHost(job)
        context = job.fresh_context(host)
        outcome = context.run(self.node.executor.call, job, host)
        if isinstance(outcome, Outcome):
            self._finish(job, outcome)
            return
        if job.flow is not None:
            self.node.beside.enter(job, context)
            self.node.wake()  # the next one has its turn
        self.offspring.begin()
        job.main = self.loop.create_task(
            self.node.executor.finish(job, outcome), name=job.name, context=context
        )
        ended = partial(self._on_ended, job, outcome)
        job.main.add_done_callback(ended, context=self._context)

    def note_item(self) -> None:
        """A job has given an item: plain code may wait for it."""
        if self._is_run:
            self.loop.stop()

    def _on_ended(
        self,
        job: Job,
        begun: Coroutine[Any, Any, Any],
        main: asyncio.Task[Outcome],
    ) -> None:
        self.offspring.end()
        job.main = None
        if job.record.state is TaskState.ENDED:
            return  # it was given up
        if main.cancelled():
            begun.close()  # maybe it never began
            self._end(job)
        else:
            self._finish(job, main.result())

    def _finish(self, job: Job, outcome: Outcome) -> None:
        self.disown(job)
        if job.record.state is TaskState.RUNNING:
            if job.is_overdue:
                job.call.tell_timeout()
            elif job.is_retried(outcome):
                self.loop.call_soon(self._attempt, job, context=self._context)
                return
            else:
                job.tell(outcome)
        self._end(job)
        if outcome.is_ctrl_c and outcome.error is not None:
            raise outcome.error

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
            if job.main is not None and not self.loop.is_closed():
                job.main.cancel()
                job.timer = self.loop.call_later(
                    self.node.grace_of(job),
                    self._give_up,
                    job,
                    context=self._context,
                )
            self.disown(job)

    def disown(self, job: Job) -> None:
        """Stop what a job has started, but for what is to outlive it."""
        brood = list(job.brood.values())
        job.brood.clear()
        for child in brood:
            child.parent = None
            if not child.record.spec.is_detached:
                if child.record.state is not TaskState.STOPPING:
                    child.call.tell_disowned()
                child.runner.stop(child)

    def _give_up(self, job: Job) -> None:
        _log.warning(
            "! %s was cancelled %g s ago and runs on. In a worker it would be killed; "
            "here it is left behind, and its code may run beside other tasks'.",
            job.name,
            self.node.grace_of(job),
        )
        self._leave_behind(job)

    def _leave_behind(self, job: Job) -> None:
        if job.main is not None:
            job.main.cancel()
        self._end(job)

    def _end(self, job: Job) -> None:
        """Its code has stopped, or never ran: let the next one have its turn."""
        move_task(job.record, TaskState.ENDED)
        job.stop_timer()
        self._turns.leave(job)
        del self.node.jobs[job.id]
        if job.parent is not None:
            job.parent.brood.pop(job.id, None)
        self.disown(job)
        for ended in self._turns.pop_ended():
            assert ended.surroundings is not None, ended
            ended.surroundings.take_off()
            if ended.lease is not None:
                self.node.ledger.give_back(ended.lease)
        if self.node.beside.leave(job) and job.lease is not None:
            self.node.ledger.give_back(job.lease)
        job.on_end()
        if not self._turns.running and not self.node.beside.jobs:
            self._is_quiet.set()
        for runner in list(self.node.runners):
            runner.note_item()  # its plain code may wait for this one
        self.wake()

    def run_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Run the loop from plain code until something is done.

        Args:
            is_done: asked whenever a job has ended.
            deadline: by `time.monotonic()`, None for no limit.

        Returns:
            Whether it was done in time.
        """
        self.wake()
        self._is_run = True
        try:
            while not is_done():
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                self._run_once(deadline)
        finally:
            self._is_run = False
        return deadline is None or time.monotonic() < deadline

    def see_off(self, job: Job) -> None:
        """From plain code, run the loop until a job that is being stopped has ended.

        It is one of a coroutine. A user's own loop may have been closed before.
        """
        if not self.loop.is_closed():
            self.run_until(lambda: job.has_ended)
        elif not job.has_ended:
            self._end(job)

    def _run_once(self, deadline: float | None) -> None:
        timer = None
        if deadline is not None:
            # Loops keep clocks of their own.
            left = deadline - time.monotonic()
            timer = self.loop.call_later(left, self.loop.stop, context=self._context)
        try:
            self.loop.run_forever()
        finally:
            if timer is not None:
                timer.cancel()

    def hasten(self) -> None:
        """Stop all jobs, and leave those behind that would take their time."""
        self.node.close_down()
        self.node.actors.hasten()
        for job in list(self.node.jobs.values()):
            self._leave_behind(job)

    async def close(self) -> None:
        """Stop all jobs, and wait for those that take their time."""
        self.node.close_down()
        await self._is_quiet.wait()
        await self.node.actors.closed()
