"""Jobs: the tasks and calls of an inline node, and their execution.

A job is a task or call that a worker would get. It reports its answer and its end to
the driver, as a worker's process would. Started jobs are on one stack (`JobStack`),
each on top of the job that waits for it; or they are generators (`Streams`), whose
consumers run between two items. All event loops of a node (`JobLoop`) share both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Final, NamedTuple, ParamSpec
from weakref import WeakSet

from aiogpu.client.current import inline_client, inline_report, no_call_to_report
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import InlineClient, Receiver
from aiogpu.core import effects
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskRecord, TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.engines.inline.environment import TaskEnvironment
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.actors.registry import Check
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.objects.store import filled
from aiogpu.runtime.workers.death import Death
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import PickledValue
from aiogpu.wire.messages import Done, Failed, Items, Report
from aiogpu.worker.invoke import Callables, Functions, StreamSender

if TYPE_CHECKING:
    from aiogpu.runtime.workers.pool import Pool

P = ParamSpec("P")
_log: Final = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """The answer that a worker would send, with the original exception.

    Attributes:
        answer: the pickled result or error.
        error: the exception itself, with its frames, None for a result.
        is_ctrl_c: the user has ended the code by Ctrl-C.
    """

    answer: Done | Failed
    error: BaseException | None = None
    is_ctrl_c: bool = False


class FrameRestorer:
    """A receiver of a failure that gives its exception the frames of the original.

    A debugger can then inspect the task's frames after its end.
    """

    __slots__ = ("_name", "_receiver", "_trace")

    def __init__(self, receiver: Receiver, name: str, error: BaseException) -> None:
        self._receiver = receiver
        self._name = name
        self._trace = error.__traceback__

    def settle(self, outcome: bytes | Failed | Exception) -> None:
        """Pass the outcome on; a failure becomes an exception with its frames."""
        receiver = self._receiver
        if not isinstance(outcome, Failed):  # an error made by `exit_actor`
            receiver.settle(outcome)
            return
        error = unpack_failure(outcome, self._name)
        BaseException.with_traceback(error, self._trace)
        if isinstance(receiver, Actor):
            receiver.break_down(outcome, error)
        else:
            receiver.settle(error)


running_job: Final[ContextVar[Job | None]] = ContextVar("running_job", default=None)
"""The job of the running code; inherited by the asyncio tasks that it starts."""


actor_job: Final[ContextVar[Job | None]] = ContextVar("acting_job", default=None)
"""The job of the actor whose coroutine runs; inherited as well."""


def id_of_caller() -> int:
    """Return the id of the calling job; 0 for the program."""
    job = running_job.get() or actor_job.get()
    return 0 if job is None else job.id


def with_values(payload: bytes) -> bytes:
    """Return the payload of a starting call, with the values that it needs."""
    return filled(payload) if type(payload) is Payload else payload


@dataclass(slots=True, eq=False)
class InlineWorker:
    """Stands for the process of one task or actor; see `LiveWorker`.

    Attributes:
        actor: its actor; None for a task.
        peer: the actor's instance, which receives its calls; None before and after its
            life.
        begun: number of the last request that has begun.
        pid: this process.
    """

    id: int
    actor: Actor | None = None
    peer: Any = None
    begun: int = 0
    pid: int = field(default_factory=os.getpid)

    def borrow(self, payload: bytes) -> bytes:
        """Return a payload with the values that it needs."""
        return with_values(payload)


class Job:
    """A task: its code and arguments, its resources, and the jobs that it has started.

    Attributes:
        node: the node that runs it.
        id: the task's number.
        func: its function.
        payload, limit, skip: the arguments, the number of items that it may yield in
            all, and the number that earlier attempts have yielded.
        runner: runs the job on a loop; set when the job begins.
        parent: the job that started this one, on top of which it may run; None if the
            program started it.
        waiters: number of waits for the job.
        calls_awaited: number of waits of the job's own code, by call of an actor.
        assigned_to: the stand-in for the process of the job.
        worker: the same while the job runs; None before and after.
        environment: the environment, output and context facts while the job runs.
        has_devices: it holds devices.
        main: runs its coroutine; None for a plain function.
        started: the asyncio tasks that its code has started.
        timer: fires at the end of a cancelled call's grace period.
        paused: jobs that began on top of this job and pause while its own code runs.
        needed: tasks that this job did not start, but for which its plain code waits;
            they run on top of this job.
        is_urgent: it may run on top of any job, because an actor needs it.
        is_over: its code has stopped; other jobs may still be on top of it.
        is_cancelled: its coroutine was cancelled, even if it has ignored this.
        outcome: the unreported result or error.
        is_interleaved: other code runs between two steps of its code; its environment
            is applied for each step.
    """

    actor_id: int | None = None
    """The number of its actor; None for a task."""

    def __init__(
        self,
        node: JobDriver,
        id_: TaskId,
        func: FunctionSpec,
        parent: Job | None = None,
        *,
        is_urgent: bool = False,
    ) -> None:
        self.node = node
        self.id = id_
        self.func = func
        self.payload = b""
        self.limit = self.skip = 0
        self.runner: JobLoop
        self.parent = parent
        self.is_urgent = is_urgent
        self.waiters = 0
        self.calls_awaited: dict[int, int] = {}
        self.assigned_to: InlineWorker | None = None
        self.worker: InlineWorker | None = None
        self.environment: TaskEnvironment | None = None
        self.has_devices = False
        self.main: asyncio.Task[None] | None = None
        self.started: set[asyncio.Task[object]] = set()
        self.timer: asyncio.Handle | None = None
        self.paused: list[Job] = []
        self.needed: list[Job] = []
        self.is_over = self.is_cancelled = False
        self.outcome: Outcome | None = None
        self.is_interleaved = False
        self._thread = get_ident()

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name}>"

    @property
    def task(self) -> TaskId:
        """The scheduler's number of the job."""
        return self.id

    @property
    def record(self) -> TaskRecord | None:
        """The scheduler's record; None once the task has ended."""
        return self.node.scheduler.tasks.get(self.task)

    @property
    def name(self) -> str:
        """The task's name."""
        return self.func.spec.name

    @property
    def has_ended(self) -> bool:
        """True if its code has stopped or will never run."""
        return self.is_over or self.record is None

    @property
    def is_about_to_end(self) -> bool:
        """True if its code has stopped and the loop is about to report it."""
        return self.main is not None and self.main.done()

    @property
    def is_blocked(self) -> bool:
        """True if its code waits for a child task or a call."""
        record = self.record
        is_blocked = record is not None and record.state is TaskState.BLOCKED
        return is_blocked or bool(self.calls_awaited)

    def children(self) -> list[Job]:
        """Return the children that end with this job."""
        record = self.record
        kin = None if record is None else record.kin
        jobs = self.node.jobs
        jobs_of_children = (
            [jobs[child] for child in kin.children] if kin is not None else []
        )
        return [child for child in jobs_of_children if child.parent is self]

    def target(self) -> tuple[Callables, Any]:
        """Return the table of callables, and the name of the job's callable."""
        return self.node.functions, self.node.learn(self.func)

    def send_items(self, items: Items) -> None:
        """Deliver items to the consumer."""
        assert self.worker is not None, self
        self.node.on_items(self.worker, items)  # type: ignore[arg-type]
        self.runner.note_item()

    def report(self, payload: bytes) -> None:
        """Deliver a report of its code; may be called in any thread.

        Raises:
            MisuseError: the job is an actor's constructor, or has ended.
        """
        worker: Any = self.worker
        if worker is None or self.actor_id == self.id:
            raise no_call_to_report()
        report = partial(self.node.on_report, worker, Report(self.id, 0, payload))
        if get_ident() == self._thread:
            report()
        else:
            self.runner.loop.call_soon_threadsafe(report)

    def begin(self) -> None:
        """Begin this job, or begin it again."""
        self.worker = self.assigned_to
        self.is_over, self.outcome = False, None
        self.main, self.is_interleaved = None, False

    def goes_on(self, _outcome: Outcome) -> bool:
        """Return whether the job keeps its lease after its code has returned."""
        return False

    def interrupt(self) -> None:
        """Stop its code, if the code awaits something."""
        if self.main is not None and not self.runner.loop.is_closed():
            self.main.cancel()

    def stop(self) -> None:
        """Stop the job in any state; its result is not needed."""
        self.node.feed(Scheduler.cancel, self.id)

    def abandon(self) -> None:
        """Abandon the job if it runs."""
        if self.worker is not None:
            self.runner.leave_behind(self)

    def fail_wait(self, reason: str) -> None:
        """Fail the job, since the wait for it can never end."""
        call = self.node.call_of(self.id)
        if call is not None:
            call.fail_deadlocked(reason)
        self.stop()

    def end(self) -> None:
        """Report that the code has stopped, as a worker would."""
        worker, node, outcome = self.worker, self.node, self.outcome
        assert worker is not None, self
        record, call = self.record, node.call_of(self.id)
        if outcome is None and record is not None and call is not None:
            # Ctrl-C has hit this package's own code, or the job's loop has ended.
            call.fail_closed()
            node.cancel(self.id)
        if outcome is None:
            node.feed(Scheduler.finish, self.id, WorkerId(worker.id))
            return
        answer, error = outcome.answer, outcome.error
        if call is not None and call.receiver is not None and error is not None:
            call.receiver = FrameRestorer(call.receiver, self.name, error)
        node.answer(worker.id, answer)
        if call is not None and isinstance(call.receiver, FrameRestorer):
            call.receiver = call.receiver._receiver  # the task is retried

    def leave(self) -> None:
        """Release the job's lease, since it is no longer on the stack."""
        worker, self.worker = self.worker, None
        assert worker is not None, self
        self.node.lose(worker.id)

    def fresh_context(self, client: InlineClient) -> Context:
        """Return a context with only this job set."""
        context = Context()
        context.run(running_job.set, self)
        context.run(inline_client.set, client)
        context.run(inline_report.set, self.report)
        return context


class JobStack:
    """The jobs whose code runs, each on top of the job that waits for it.

    Attributes:
        running: the started jobs; the code of the last one runs now.
    """

    def __init__(self) -> None:
        self.running: list[Job] = []

    def __repr__(self) -> str:
        return f"<Stack {self.running!r}>"

    def parent(self) -> Job | None:
        """Return the calling job if it runs; None for the program."""
        job = running_job.get()
        return None if job is None or job.is_over or job not in self.running else job

    def pop_ended(self) -> list[Job]:
        """Remove the ended jobs at the top of the stack."""
        popped: list[Job] = []
        while self.running and self.running[-1].is_over:
            popped.append(self.running.pop())
        return popped

    def pause_above(self, job: Job) -> None:
        """Pause the jobs above a job, so that its own code goes on."""
        place = self.running.index(job) + 1
        job.paused = self.running[place:]
        del self.running[place:]
        for child in reversed(job.paused):
            assert child.environment is not None, child
            child.environment.restore()

    def resume_above(self, job: Job) -> None:
        """Resume the jobs that pause above a job."""
        for child in job.paused:
            assert child.environment is not None, child
            child.environment.apply()
        self.running.extend(job.paused)
        job.paused = []

    def close_now(self) -> None:
        """Restore the environment of the program."""
        for job in reversed(self.running):
            assert job.environment is not None, job
            job.environment.restore()
        self.running.clear()


class Streams:
    """The started generators. Generators of tasks leave the stack between two items.

    Attributes:
        senders: senders of their items, by number of the task or call.
        jobs: the jobs of generators that have left the stack, oldest first.
    """

    def __init__(self, stack: JobStack) -> None:
        self.senders: dict[int, StreamSender] = {}
        self.jobs: dict[int, Job] = {}
        self._stack = stack

    def __repr__(self) -> str:
        return f"<Streams {list(self.jobs.values())!r}>"

    def enter(self, job: Job) -> None:
        """Move a job that has started a generator off the stack."""
        assert job.environment is not None, job
        self._stack.running.remove(job)
        job.environment.restore()
        job.is_interleaved = True
        self.jobs[job.id] = job

    def leave(self, job: Job) -> bool:
        """Forget a job whose attempt has ended; False if it had not entered."""
        return self.jobs.pop(job.id, None) is not None

    def raise_limit(self, task: int, limit: int) -> None:
        """Set the number of items that a generator may yield in all."""
        sender = self.senders.get(task)
        if sender is not None:
            sender.raise_limit(limit)


class JobDriver(Driver):
    """The part of the inline driver that jobs need; see `node.InlineNode`.

    Attributes:
        jobs: the unfinished tasks, with actors but without leases.
        stack: the running jobs.
        streams: the started generators.
        loops: all loops on which jobs run.
        functions: the unpickled functions, as in a worker.
        lost: workers that ended during an event of the scheduler; reported next.
        pack: makes payloads of large values.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        assignment: Assignment,
        check: Check,
        make_pool: Callable[[Driver], Pool],
        pack: Callable[[PickledValue], bytes],
    ) -> None:
        self.pack = pack
        self.jobs: dict[TaskId, Job] = {}
        self.stack = JobStack()
        self.streams = Streams(self.stack)
        self.loops: WeakSet[JobLoop] = WeakSet()
        self.functions = Functions(self._note_begun)
        self.lost: deque[int] = deque()
        super().__init__(loop, scheduler, assignment, check, make_pool)

    def learn(self, func: FunctionSpec) -> int:
        """Add a function to `functions`; return its number there."""
        function = func.function
        self.functions.payloads[function.id] = function.payload
        number = function.id if func.spec.run_timeout is None else -function.id
        if func.spec.max_calls == 1:
            # A fresh worker would unpickle the function again.
            self.functions.pop(function.id, None)
            self.functions.pop(number, None)
        return number

    def _note_begun(self) -> None:
        """Report that the code of a job with a `run_timeout` begins."""
        job = running_job.get()
        assert job is not None, self
        assert job.worker is not None, job
        worker = WorkerId(job.worker.id)
        self.feed(Scheduler.task_began, job.task, worker, time.monotonic())

    def feed(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[effects.Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Pass an event to the scheduler, and apply its effects; see `Driver.feed`."""
        self._catch_up()
        super().feed(step, *args, **kwargs)

    def _catch_up(self) -> None:
        """Handle overdue timers, which a plain function has delayed."""
        due = self.scheduler.timers.earliest
        if due is not None and due <= time.monotonic() and not self.is_busy:
            super().feed(Scheduler.wake)

    def answer(self, worker: int, answer: Done | Failed) -> None:
        """Handle the answer of a task."""
        self._catch_up()
        self.on_answer(worker, answer)

    def is_stopping(self, task: int) -> bool:
        """Return whether this task, or the node, is to stop."""
        record = self.scheduler.tasks.get(TaskId(task))
        is_stopped = record is None or record.state is TaskState.STOPPING
        return is_stopped or self.scheduler.stops_since is not None

    def lose(self, worker: int) -> None:
        """Report the end of a worker to the scheduler as soon as it can take events."""
        if self.is_busy:
            self.lost.append(worker)
            self.wake()
            return
        begun = self.pool.commands.begun(worker)
        if self.workers.pop(worker, None) is not None:
            self.on_gone(worker, Death(os.getpid(), begun=begun))

    def end_orphans(self, *jobs: Job) -> None:
        """Stop jobs whose parent has ended."""
        for job in jobs:
            call = self.call_of(job.id)
            if call is not None:
                call.fail_disowned()
            job.stop()

    def _rearm(self, deadline: float | None) -> None:
        self._timer_at = deadline
        for loop in list(self.loops):
            loop.set_alarm(deadline)

    def on_alarm(self) -> None:
        """Handle a timer."""
        self._timer_at = None
        self.feed(Scheduler.wake)

    def wake(self) -> None:
        """Wake all loops, to begin jobs."""
        for loop in list(self.loops):
            loop.wake()


class JobLoop:
    """An event loop on which jobs run; see `LoopRunner`, which begins them.

    Attributes:
        node: state shared by all loops of the node.
        loop: the program's loop, a user's loop inside a task, or a loop for plain code
            that waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, node: JobDriver) -> None:
        self.node = node
        self.loop = loop
        self._is_woken = False
        self._is_run = False
        self._alarm: asyncio.Handle | None = None
        # Callbacks of the loop must not inherit the context of a task.
        self._context = Context()
        node.loops.add(self)
        self.set_alarm(node.scheduler.timers.earliest)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.loop!r} of {self.node!r}>"

    def set_alarm(self, moment: float | None) -> None:
        """Set the time at which the node is woken; None for never."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if moment is not None and not self.loop.is_closed():
            # Loops keep clocks of their own.
            delay = max(moment - time.monotonic(), 0.0)
            self._alarm = self.loop.call_later(
                delay, self._on_alarm, context=self._context
            )

    def _on_alarm(self) -> None:
        self._alarm = None
        self.node.on_alarm()

    def wake(self) -> None:
        """Begin the next job in a later callback; never now, inside other code."""
        if not self._is_woken and not self.loop.is_closed():
            self._is_woken = True
            self.loop.call_soon(self._advance, context=self._context)

    def _advance(self) -> None:
        """Begin the next job or call that can begin now."""
        raise NotImplementedError

    def note_item(self) -> None:
        """Wake plain code that may wait for an item or the end of a job."""
        if self._is_run:
            self.loop.stop()

    def give_up(self, job: Job) -> None:
        """Abandon a coroutine that was cancelled and still runs."""
        if job.main is None or job.is_over:
            return  # plain code cannot be abandoned
        record = job.record
        grace = 0.0 if record is None else self.node.scheduler.grace_of(record)
        _log.warning(
            "! %s was cancelled %g s ago and still runs. In a worker it would be "
            "killed; here it is abandoned, and its code may run beside other tasks.",
            job.name,
            grace,
        )
        self.leave_behind(job)

    def leave_behind(self, job: Job) -> None:
        """Abandon a coroutine: go on as if it had ended."""
        main, job.main = job.main, None
        if main is not None:
            main.cancel()
            self._end(job)

    def _end(self, job: Job) -> None:
        """End a job, and let the next one begin."""
        job.is_over = True
        job.end()
        # An error keeps the frames that it has passed, and these keep the job.
        job.outcome = None
        if not job.is_interleaved or job.id in self.node.streams.jobs:
            self._leave_stack(job)  # coroutines of actors are never on the stack

    def _leave_stack(self, job: Job) -> None:
        node = self.node
        popped = node.stack.pop_ended() if job.is_over else [job]
        if not job.is_over:
            node.stack.running.remove(job)
        for ended in popped:
            assert ended.environment is not None, ended
            ended.environment.restore()
        if node.streams.leave(job):
            popped.append(job)
        for ended in popped:
            if ended.is_over:
                ended.leave()
        for loop in list(node.loops):
            loop.note_item()  # plain code on this loop may wait for the job
        node.wake()

    def run_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Run the loop from plain code until `is_done()`.

        Args:
            is_done: called whenever a job has ended.
            deadline: by `time.monotonic()`, None for no limit.

        Returns:
            False if the deadline passed first.
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

    def run_until_ended(self, job: Job) -> None:
        """Run the loop from plain code until a stopping coroutine has ended.

        A user's own loop may already be closed.
        """
        if not self.loop.is_closed():
            self.run_until(lambda: job.has_ended)
        elif not job.has_ended:
            self._end(job)

    def _run_once(self, deadline: float | None) -> None:
        timer = None
        if deadline is not None:
            # Loops keep clocks of their own.
            delay = deadline - time.monotonic()
            timer = self.loop.call_later(delay, self.loop.stop, context=self._context)
        try:
            self.loop.run_forever()
        finally:
            if timer is not None:
                timer.cancel()
