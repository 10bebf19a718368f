"""Jobs: the tasks and calls of an inline node, and how they run.

A job is what a worker's process would be sent. It tells the driver of its answer and of
its end, as the process would. Jobs that have begun lie on one stack (`JobStack`), each
on top of the one that waits for it, or among the generators (`Streams`), whose
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
    """The answer that a worker would send, and what it could not send.

    Attributes:
        answer: the pickled result or error.
        error: the exception itself, with its frames, None for a result.
        is_ctrl_c: whether it is the user at the keyboard who ended it.
    """

    answer: Done | Failed
    error: BaseException | None = None
    is_ctrl_c: bool = False


class FrameRestorer:
    """A receiver of a failure that gives its exception the frames of the original.

    A debugger that looks at the exception after the task's end finds the task's frames.
    """

    __slots__ = ("_name", "_receiver", "_trace")

    def __init__(self, receiver: Receiver, name: str, error: BaseException) -> None:
        self._receiver = receiver
        self._name = name
        self._trace = error.__traceback__

    def settle(self, outcome: bytes | Failed | Exception) -> None:
        """Pass on the outcome; in place of a failure its exception, with its frames."""
        receiver = self._receiver
        if not isinstance(outcome, Failed):  # by `exit_actor`, an error of its own
            receiver.settle(outcome)
            return
        error = unpack_failure(outcome, self._name)
        BaseException.with_traceback(error, self._trace)
        if isinstance(receiver, Actor):
            receiver.break_down(outcome, error)
        else:
            receiver.settle(error)


running_job: Final[ContextVar[Job | None]] = ContextVar("running_job", default=None)
"""The job whose code asks; the asyncio tasks that it starts inherit it."""


actor_job: Final[ContextVar[Job | None]] = ContextVar("acting_job", default=None)
"""The job that has made the actor whose coroutine asks; inherited as well."""


def id_of_caller() -> int:
    """Return the id of the job whose code asks; 0 for the program."""
    job = running_job.get() or actor_job.get()
    return 0 if job is None else job.id


def with_values(payload: bytes) -> bytes:
    """The payload of a call that begins, with the values that it needs."""
    return filled(payload) if type(payload) is Payload else payload


@dataclass(slots=True, eq=False)
class InlineWorker:
    """Stands for the process of one task or actor; see `LiveWorker`.

    Attributes:
        actor: the actor that it is.
        peer: the actor's object, which hears its calls; None before and after its life.
        begun: the number of what it has begun last.
        pid: this process.
    """

    id: int
    actor: Actor | None = None
    peer: Any = None
    begun: int = 0
    pid: int = field(default_factory=os.getpid)

    def borrow(self, payload: bytes) -> bytes:
        """The payload that it is sent, with the values that it needs."""
        return with_values(payload)


class Job:
    """A task's code: what it is called with, what it holds, and what it has started.

    Attributes:
        node: the node that runs it.
        id: the task's number.
        func: its function.
        payload, limit, skip: the arguments, how many items it may yield in all, and how
            many an attempt before has yielded.
        runner: runs the job on a loop; set when the job begins.
        parent: the job that started this one, on top of which it may run; None if the
            program started it.
        waiters: how many pieces of code wait for the job.
        calls_awaited: the calls of actors that the job's own code waits for, and how
            many pieces of its code wait for each.
        assigned_to: the stand-in for the process that is to run the job, or runs it.
        worker: the same, while the job runs; None while the job waits for its turn.
        environment: the environment, output and context facts while the job runs.
        has_devices: whether it holds any.
        main: runs its coroutine; None for a plain function.
        started: the asyncio tasks that its code has started.
        timer: fires when the grace period of a cancelled call is over.
        paused: jobs that began on top of this job and pause while its own code runs.
        needed: tasks that this job did not start, but for which its plain code waits;
            they run on top of this job.
        is_urgent: whether it may run on top of any job, because an actor needs it.
        is_over: whether its code has stopped; other jobs may still lie on top of it.
        is_cancelled: whether its coroutine was cancelled, whatever it did about it.
        outcome: the result or error that is not reported yet.
        is_interleaved: whether other code runs between two steps of its code, for each
            of which its environment is applied.
    """

    actor_id: int | None = None
    """The number of the actor whose code it runs; None for a task."""

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
        """The number by which the scheduler knows it."""
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
        """True if its code has stopped, or never will run."""
        return self.is_over or self.record is None

    @property
    def is_about_to_end(self) -> bool:
        """True if the code has stopped and the loop will report it next."""
        return self.main is not None and self.main.done()

    @property
    def is_blocked(self) -> bool:
        """True if its code waits for a task that it has started, or for a call."""
        record = self.record
        is_blocked = record is not None and record.state is TaskState.BLOCKED
        return is_blocked or bool(self.calls_awaited)

    def children(self) -> list[Job]:
        """The children that end with this job."""
        record = self.record
        kin = None if record is None else record.kin
        jobs = self.node.jobs
        found = [jobs[child] for child in kin.children] if kin is not None else []
        return [child for child in found if child.parent is self]

    def target(self) -> tuple[Callables, Any]:
        """Return what is called: where it is looked up, and under which name."""
        return self.node.functions, self.node.learn(self.func)

    def send_items(self, items: Items) -> None:
        """Give items to who waits for them."""
        assert self.worker is not None, self
        self.node.on_items(self.worker, items)  # type: ignore[arg-type]
        self.runner.note_item()

    def report(self, payload: bytes) -> None:
        """Pass on a report of its code; may be called in any thread.

        Raises:
            MisuseError: it makes an actor, or has ended.
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
        """Begin, or go on, with the turn of this job."""
        self.worker = self.assigned_to
        self.is_over, self.outcome = False, None
        self.main, self.is_interleaved = None, False

    def goes_on(self, _outcome: Outcome) -> bool:
        """Return whether the job keeps its lease after its code has returned."""
        return False

    def interrupt(self) -> None:
        """Stop its code, if that awaits something."""
        if self.main is not None and not self.runner.loop.is_closed():
            self.main.cancel()

    def stop(self) -> None:
        """Stop the job in any state; its result is not wanted."""
        self.node.feed(Scheduler.cancel, self.id)

    def abandon(self) -> None:
        """Leave behind what runs and would take its time."""
        if self.worker is not None:
            self.runner.leave_behind(self)

    def fail_wait(self, reason: str) -> None:
        """Tell who waits that the wait can never end."""
        call = self.node.call_of(self.id)
        if call is not None:
            call.fail_deadlocked(reason)
        self.stop()

    def end(self) -> None:
        """Note that the code has stopped: answer as a worker would."""
        worker, node, outcome = self.worker, self.node, self.outcome
        assert worker is not None, self
        record, call = self.record, node.call_of(self.id)
        if outcome is None and record is not None and call is not None:
            # A Ctrl-C has found this package's own code, or its loop has ended.
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
            call.receiver = call.receiver._receiver  # it is tried again

    def leave(self) -> None:
        """Note that no frame of the job is on the stack: release its lease."""
        worker, self.worker = self.worker, None
        assert worker is not None, self
        self.node.lose(worker.id)

    def fresh_context(self, client: InlineClient) -> Context:
        """An empty context, as a worker's is, but for whose it is."""
        context = Context()
        context.run(running_job.set, self)
        context.run(inline_client.set, client)
        context.run(inline_report.set, self.report)
        return context


class JobStack:
    """The jobs whose code runs, each on top of the one that waits for it.

    Attributes:
        running: the jobs that have begun, the last one in its turn.
    """

    def __init__(self) -> None:
        self.running: list[Job] = []

    def __repr__(self) -> str:
        return f"<Stack {self.running!r}>"

    def parent(self) -> Job | None:
        """The running job whose code asks, None if it is the program's."""
        job = running_job.get()
        return None if job is None or job.is_over or job not in self.running else job

    def pop_ended(self) -> list[Job]:
        """Remove the jobs that are over and have nothing running above them."""
        popped: list[Job] = []
        while self.running and self.running[-1].is_over:
            popped.append(self.running.pop())
        return popped

    def pause_above(self, job: Job) -> None:
        """Have what runs above a job pause: the job's own code goes on."""
        place = self.running.index(job) + 1
        job.paused = self.running[place:]
        del self.running[place:]
        for child in reversed(job.paused):
            assert child.environment is not None, child
            child.environment.restore()

    def resume_above(self, job: Job) -> None:
        """Have what pauses above a job go on."""
        for child in job.paused:
            assert child.environment is not None, child
            child.environment.apply()
        self.running.extend(job.paused)
        job.paused = []

    def close_now(self) -> None:
        """Give the process its own variables back; there is nothing else."""
        for job in reversed(self.running):
            assert job.environment is not None, job
            job.environment.restore()
        self.running.clear()


class Streams:
    """The generators that have begun.

    Those of tasks are not on the stack between two items.

    Attributes:
        senders: send their items, by number of the task or call.
        jobs: the jobs of generators that have left the stack, oldest first.
    """

    def __init__(self, stack: JobStack) -> None:
        self.senders: dict[int, StreamSender] = {}
        self.jobs: dict[int, Job] = {}
        self._stack = stack

    def __repr__(self) -> str:
        return f"<Streams {list(self.jobs.values())!r}>"

    def enter(self, job: Job) -> None:
        """A job has just begun, and is a generator: others take their turns."""
        assert job.environment is not None, job
        self._stack.running.remove(job)
        job.environment.restore()
        job.is_interleaved = True
        self.jobs[job.id] = job

    def leave(self, job: Job) -> bool:
        """An attempt at a job has ended; False if it had not entered."""
        return self.jobs.pop(job.id, None) is not None

    def rise(self, task: int, limit: int) -> None:
        """Let a generator yield so many items in all."""
        sender = self.senders.get(task)
        if sender is not None:
            sender.rise(limit)


class JobDriver(Driver):
    """The driver, as far as the jobs need it; see `node.InlineNode`.

    Attributes:
        jobs: the tasks that have not ended, with actors but without leases.
        stack: the jobs that run.
        streams: the generators that have begun.
        loops: all loops on which jobs run.
        functions: the functions that this process knows as a worker would.
        lost: workers that ended during an event; the scheduler is told next.
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
        """Let `functions` have a function; gives its number there."""
        sent = func.function
        self.functions.payloads[sent.id] = sent.payload
        number = sent.id if func.spec.run_timeout is None else -sent.id
        if func.spec.max_calls == 1:
            # Its worker would have run nothing before.
            self.functions.pop(sent.id, None)
            self.functions.pop(number, None)
        return number

    def _note_begun(self) -> None:
        """The code of the running job begins, whose run is timed."""
        job = running_job.get()
        assert job is not None, self
        assert job.worker is not None, job
        worker = WorkerId(job.worker.id)
        self.feed(Scheduler.began, job.task, worker, time.monotonic())

    def feed(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[effects.Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Tell the scheduler what happened, and do what it says; see `Driver.feed`."""
        self._catch_up()
        super().feed(step, *args, **kwargs)

    def _catch_up(self) -> None:
        """See to what is due: a plain function has kept the loop from ringing."""
        due = self.scheduler.timers.earliest
        if due is not None and due <= time.monotonic() and not self.is_busy:
            super().feed(Scheduler.wake)

    def answer(self, worker: int, answer: Done | Failed) -> None:
        """A task's code has ended."""
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
        """Stop jobs since who has started them has ended."""
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
        """Some time is up."""
        self._timer_at = None
        self.feed(Scheduler.wake)

    def wake(self) -> None:
        """Wake the running code to look for jobs that can begin."""
        for loop in list(self.loops):
            loop.wake()


class JobLoop:
    """An event loop on which jobs run; see `LoopRunner`, which begins them.

    Attributes:
        node: what it shares with the other loops of the node.
        loop: the program's, a user's own inside a task, or one for plain code that
            waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, node: JobDriver) -> None:
        self.node = node
        self.loop = loop
        self._is_woken = False
        self._is_run = False
        self._alarm: asyncio.Handle | None = None
        # What the loop is to call must not inherit the context of a task.
        self._context = Context()
        node.loops.add(self)
        self.set_alarm(node.scheduler.timers.earliest)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.loop!r} of {self.node!r}>"

    def set_alarm(self, moment: float | None) -> None:
        """Have the node woken then."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if moment is not None and not self.loop.is_closed():
            # Loops keep clocks of their own.
            left = max(moment - time.monotonic(), 0.0)
            self._alarm = self.loop.call_later(
                left, self._on_alarm, context=self._context
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
        """Begin what can begin now."""
        raise NotImplementedError

    def note_item(self) -> None:
        """A job has given an item: plain code may wait for it."""
        if self._is_run:
            self.loop.stop()

    def give_up(self, job: Job) -> None:
        """Leave a coroutine behind that was cancelled and goes on."""
        if job.main is None or job.is_over:
            return  # plain code ends when it ends
        record = job.record
        grace = 0.0 if record is None else self.node.scheduler.grace_of(record)
        _log.warning(
            "! %s was cancelled %g s ago and runs on. In a worker it would be killed; "
            "here it is left behind, and its code may run beside other tasks'.",
            job.name,
            grace,
        )
        self.leave_behind(job)

    def leave_behind(self, job: Job) -> None:
        """Go on as if a coroutine had ended."""
        main, job.main = job.main, None
        if main is not None:
            main.cancel()
            self._end(job)

    def _end(self, job: Job) -> None:
        """End the turn of a job: let the next one begin."""
        job.is_over = True
        job.end()
        # An error keeps the frames that it has passed, and they keep the job.
        job.outcome = None
        if not job.is_interleaved or job.id in self.node.streams.jobs:
            self._leave_stack(job)  # a coroutine of an actor's was never there

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
            loop.note_item()  # its plain code may wait for this one
        node.wake()

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

    def run_until_ended(self, job: Job) -> None:
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
