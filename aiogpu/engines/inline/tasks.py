"""Tasks in the calling process: who is next, how their code runs, what they hold.

The node's scheduler decides, as it does for workers. It is told that a worker has
started when it is a task's turn. One task runs at a time. While it waits for its
children, they run on top of it: a child lies above its parent on the node's `JobStack`,
with its own environment and lease. Jobs run only in callbacks of a loop, never inside
the call that adds or cancels a job.

Plain code that waits runs an event loop of its own (`TaskHost`), inside a callback of
the outer loop. Its children run on that inner loop, and pause if the plain code goes on
before they end. Each loop has a `LoopRunner`. All runners of a node share its stack,
and only the innermost runner is at work.

Values and functions are pickled and unpickled, as on the way to a worker. So what a
function closes over is a copy; if it is defined in `__main__`, so are its globals. A
function of an imported module is not copied. Between two items a generator is not on
the stack, because the consumer of the items runs meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from types import CoroutineType, TracebackType, coroutine
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    cast,
)
from weakref import WeakSet

from aiogpu.client.current import (
    ActorExit,
    current,
    error_inside_task,
    has_exited,
    host_of_task,
)
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Host, Receiver
from aiogpu.core import effects
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.units import CPU
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.engines.base import check_arguments, check_func
from aiogpu.engines.inline.environment import CtrlC, TaskEnvironment, silence
from aiogpu.errors import (
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeError,
)
from aiogpu.runtime.actors.actor import FIRST_CALL, Actor
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.objects.store import filled
from aiogpu.runtime.objects.values import unfinished_in
from aiogpu.runtime.workers.death import Death
from aiogpu.serialization.exceptions import (
    LEFT,
    RAISED,
    pack_failure,
    unpack_failure,
)
from aiogpu.serialization.payload import Payload, has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    load_arguments,
)
from aiogpu.wire.messages import ASYNC, Done, Failed, Items
from aiogpu.worker.gpu import has_run_out, peak_memory
from aiogpu.worker.invoke import OWN_FRAMES as INVOKED
from aiogpu.worker.invoke import (
    Arguments,
    Callables,
    Functions,
    Invoker,
    Raised,
    RetryRules,
    StreamSender,
    invoke,
    is_coroutine,
    send_all_async,
)
from aiogpu.worker.private_hooks import set_running_loop

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.runtime.pending_tasks import Call
    from aiogpu.runtime.workers.pool import Pool
    from aiogpu.wire.messages import Bind, Create

P = ParamSpec("P")


class CallWaitsPort(Protocol):
    """Which code waits for calls of actors."""

    def begin(self, number: int, /) -> None:
        """The code that runs now waits for a call, which fails if it is in vain."""

    def end(self, number: int, /) -> None:
        """Nobody waits for a call any more."""

    def are_by(self, job: Job, /) -> bool:
        """Return whether this job's code waits for a call."""


class ActorsPort(Protocol):
    """All actors in this process, as its tasks need them; see `InlineActors`."""

    @property
    def runner(self) -> LoopRunner:
        """Carries what they start, on the program's loop."""
        ...

    @property
    def waits(self) -> CallWaitsPort:
        """Who waits for their calls."""
        ...

    @property
    def are_there(self) -> bool:
        """True if there is any that has not ended."""

    def job_of(self, task: TaskId, func: FunctionSpec, actor: object, /) -> Job:
        """The job that makes an actor."""

    def known(self, actor: int, /) -> Actor:
        """An actor that lives, or to which somebody has a handle."""

    def next_call(self) -> Job | None:
        """The call whose turn it is, None without one."""

    def cancel_call(self, number: int, /) -> None:
        """Nobody wants a call's answer any more."""

    def demand_call(self, number: int, limit: int, /) -> None:
        """Let a call that is a stream yield so many items in all."""

    def hasten(self) -> None:
        """End now, and leave behind what takes its time."""


OWN_FRAMES: Final = "/aiogpu/engines/inline/"
"""Marks this package's own frames, which a user's traceback leaves out."""


class Outcome(NamedTuple):
    """What a worker would answer, and what it would not send.

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
        if not isinstance(outcome, Failed):
            receiver.settle(outcome)
            return
        error = unpack_failure(outcome, self._name)
        BaseException.with_traceback(error, self._trace)
        if isinstance(receiver, Actor):
            receiver.break_down(outcome, error)
        else:
            receiver.settle(error)


_log: Final = logging.getLogger(__name__)


running_job: Final[ContextVar[Job | None]] = ContextVar("running_job", default=None)
"""The job whose code asks; the asyncio tasks that it starts inherit it."""


actor_job: Final[ContextVar[Job | None]] = ContextVar("acting_job", default=None)
"""The job that has made the actor whose coroutine asks; inherited as well."""


def id_of_caller() -> int:
    """Return the id of the job whose code asks; 0 for the program."""
    job = running_job.get() or actor_job.get()
    return 0 if job is None else job.id


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
        calls_awaited: how many calls of actors the job's own code waits for.
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
        outcome: the result or error that is not reported yet.
        step_environment: applied for each step of its code, if other code runs between
            two steps.
    """

    actor_id: int | None = None
    """The number of the actor whose code it runs; None for a task."""

    def __init__(
        self,
        node: InlineNode,
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
        self.runner: LoopRunner
        self.parent = parent
        self.is_urgent = is_urgent
        self.waiters = self.calls_awaited = 0
        self.assigned_to: InlineWorker | None = None
        self.worker: InlineWorker | None = None
        self.environment: TaskEnvironment | None = None
        self.has_devices = False
        self.main: asyncio.Task[Outcome] | None = None
        self.started: set[asyncio.Task[object]] = set()
        self.timer: asyncio.Handle | None = None
        self.paused: list[Job] = []
        self.needed: list[Job] = []
        self.is_over = False
        self.outcome: Outcome | None = None
        self.step_environment: TaskEnvironment | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name}>"

    @property
    def task(self) -> TaskId:
        """The number by which the scheduler knows it."""
        return self.id

    @property
    def record(self) -> TaskRecord | None:
        """What the scheduler knows of it; None once it has ended."""
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
        """True if its code has stopped, and the loop is to tell of it next."""
        return self.main is not None and self.main.done()

    @property
    def is_blocked(self) -> bool:
        """True if its code waits for a task that it has started."""
        record = self.record
        return record is not None and record.state is TaskState.BLOCKED

    def children(self) -> list[Job]:
        """What it has started and that ends with it."""
        record = self.record
        kin = None if record is None else record.kin
        jobs = self.node.jobs
        found = [jobs[child] for child in kin.children] if kin is not None else []
        return [child for child in found if child.parent is self]

    def target(self) -> tuple[Callables, Any]:
        """Return what is called: where it is looked up, and under which name."""
        executor = self.node.executor
        return executor.functions, executor.learn(self.func)

    def send_items(self, items: Items) -> None:
        """Give items to who waits for them."""
        assert self.worker is not None, self
        self.node.on_items(self.worker, items)  # type: ignore[arg-type]
        self.runner.note_item()

    def begin(self) -> None:
        """It is its turn, once more maybe."""
        self.worker = self.assigned_to
        self.is_over, self.outcome = False, None
        self.main = self.step_environment = None

    def goes_on(self, _outcome: Outcome) -> bool:
        """Whether it holds on to what it has, though its code has returned."""
        return False

    def interrupt(self) -> None:
        """Stop its code, if that awaits something."""
        if self.main is not None and not self.runner.loop.is_closed():
            self.main.cancel()

    def stop(self) -> None:
        """Stop it in whichever state it is; nobody wants its result."""
        self.node.feed(Scheduler.cancel, self.id)

    def fail_wait(self, reason: str) -> None:
        """Tell who waits that the wait can never end."""
        call = self.node.call_of(self.id)
        if call is not None:
            call.tell_deadlock(reason)
        self.stop()

    def end(self) -> None:
        """Its code has stopped: answer, as its worker would."""
        worker, node, outcome = self.worker, self.node, self.outcome
        assert worker is not None, self
        record, call = self.record, node.call_of(self.id)
        if outcome is None and record is not None and call is not None:
            # A Ctrl-C has found this package's own code, or its loop has ended.
            call.tell_closed()
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
        """Nothing of it lies on the stack any more: what it held is free."""
        worker, self.worker = self.worker, None
        assert worker is not None, self
        if self.is_urgent and self.id in self.node.jobs:
            self.node.urgent.add(self.id)  # it is tried again
        self.node.lose(worker.id)

    def on_forgotten(self) -> None:
        """The scheduler has told of its end."""

    def fresh_context(self, host: Host) -> Context:
        """An empty context, as a worker's is, but for whose it is."""
        context = Context()
        context.run(running_job.set, self)
        context.run(host_of_task.set, host)
        return context


def with_values(payload: bytes) -> bytes:
    """The payload of a call that begins, with the values that it needs."""
    return filled(payload) if type(payload) is Payload else payload


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

    def abandon(self) -> None:
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
        job.step_environment = job.environment.copy()
        self.jobs[job.id] = job

    def leave(self, job: Job) -> bool:
        """An attempt at a job has ended; False if it had not entered."""
        return self.jobs.pop(job.id, None) is not None

    def rise(self, task: int, limit: int) -> None:
        """Let a generator yield so many items in all."""
        sender = self.senders.get(task)
        if sender is not None:
            sender.rise(limit)


_NO_ITEM: Final = object()


class PlainItems:
    """A plain generator, whose code runs outside of any event loop, as in a worker."""

    def __init__(self, items: Iterator[Any], job: Job, host: TaskHost) -> None:
        self._items = items
        self._job = job
        self._host = host

    def __iter__(self) -> PlainItems:
        return self

    def __next__(self) -> Any:
        with self._in_turn():
            item = next(self._items, _NO_ITEM)
        if item is _NO_ITEM:
            raise StopIteration
        return item

    def close(self) -> None:
        """End it, and what it has started."""
        with self._in_turn():
            try:
                close: Callable[[], None] | None = getattr(self._items, "close", None)
                if close is not None:
                    close()
            finally:
                self._host.close()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """The block runs the generator's code, on top of whatever runs."""
        running = self._job.node.stack.running
        loop = asyncio._get_running_loop()
        running.append(self._job)
        set_running_loop(None)
        try:
            yield
        finally:
            set_running_loop(loop)
            running.remove(self._job)


AnyCoroutine = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class TaskTracker:
    """Keeps watch over a loop while coroutines of jobs run on it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, executor: InlineExecutor
    ) -> None:
        self._loop = loop
        self._executor = executor
        self._coroutines = 0
        self._factory: Any = self._make
        self._program_factory: Any = None

    def begin(self) -> None:
        """One coroutine more runs."""
        self._coroutines += 1
        if self._coroutines == 1:
            self._program_factory = self._loop.get_task_factory()
            self._loop.set_task_factory(self._factory)

    def end(self) -> None:
        """One coroutine less runs; with the last, the loop is as it was."""
        self._coroutines -= 1
        if not self._coroutines and self._loop.get_task_factory() is self._factory:
            self._loop.set_task_factory(self._program_factory)

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: AnyCoroutine, **options: Any
    ) -> asyncio.Future[Any]:
        job, begun = running_job.get(), None
        if job is not None and job.has_ended:
            job = None
        if job is None:
            job = actor_job.get()
            if job is not None and type(coroutine) is CoroutineType:
                begun, coroutine = coroutine, self._executor.drive_task(job, coroutine)
        make = self._program_factory
        task: asyncio.Task[Any]
        if make is not None:
            task = make(loop, coroutine, **options)
        else:
            task = asyncio.Task(coroutine, loop=loop, **options)
        if job is not None:
            job.started.add(task)
            task.add_done_callback(job.started.discard)
        if begun is not None:
            # It may be cancelled before it has begun.
            task.add_done_callback(partial(_close, begun))
        return task


def _close(begun: Coroutine[Any, Any, Any], _task: asyncio.Task[Any]) -> None:
    begun.close()


async def end_started(job: Job) -> None:
    """Cancel what a job has started and not awaited, and wait for its end."""
    rest = list(job.started)
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.gather(*rest, return_exceptions=True)


class JobInvoker(Invoker):
    """How the code of one job is called; see `invoke`.

    Plain code runs outside of any event loop, as in a worker. With the first `await`
    the call continues in an asyncio task: it suspends once, and who drives it goes on
    with it there.

    Args:
        job: the job.
        host: of its plain code; None if the call begins on an event loop.
    """

    def __init__(self, job: Job, host: TaskHost | None) -> None:
        self._job = job
        self._host = host
        self._is_on_loop = host is None

    def load(self, function: Callable[..., Any], payload: bytes) -> Arguments:
        """Unpickle arguments; handles for a coroutine belong to its loop."""
        if self._is_on_loop or not (has_handles(payload) and is_coroutine(function)):
            return load_arguments(payload)
        set_running_loop(self._job.runner.loop)
        try:
            return load_arguments(payload)
        finally:
            set_running_loop(None)

    async def wait(self, coroutine: CoroutineType[Any, Any, Any], call: int) -> Any:
        """Return the result of a coroutine, which is awaited on the job's loop."""
        await self._move_to_loop()
        return await coroutine

    async def send_items(self, items: Any, stream: StreamSender) -> None:
        """Run a generator to its end, on the job's loop."""
        job, host = self._job, self._host
        job.node.streams.senders[job.id] = stream
        # What it starts runs on top of whatever runs then, as what actors start.
        actor_job.set(job)
        try:
            await self._move_to_loop()
            if host is not None and not hasattr(items, "__anext__"):
                items = PlainItems(items, job, host)
            await send_all_async(items, stream, job.runner.loop.create_future)
        finally:
            job.node.streams.senders.pop(job.id, None)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; what it has handles to outlives the job."""
        payload = self._job.node.pack(outgoing)
        # Before the children are stopped that end with this one.
        for child in unfinished_in(payload):
            self._job.node.feed(Scheduler.detach, TaskId(child))
        return payload

    async def _move_to_loop(self) -> None:
        if not self._is_on_loop:
            self._is_on_loop = True
            await _suspend()


@coroutine
def _suspend() -> Generator[None]:
    yield


BegunCall = Coroutine[Any, Any, Done | Raised]


class InlineExecutor:
    """Drives the calls of the user's code, and says what their failures are."""

    def __init__(self, is_silent: bool) -> None:
        self.functions = Functions()
        self._is_silent = is_silent
        self._ctrl_c = CtrlC()
        self._retry_rules = RetryRules()

    def learn(self, func: FunctionSpec) -> int:
        """Learn a function; gives the number by which `functions` has it."""
        sent = func.function
        self.functions.payloads[sent.id] = sent.payload
        if func.spec.max_calls == 1:
            # Its worker would have run nothing before.
            self.functions.pop(sent.id, None)
        return sent.id

    def begin(self, job: Job, host: TaskHost) -> Outcome | BegunCall:
        """Call the function, outside of any event loop, as in a worker.

        Gives the call if it is to go on in an asyncio task; `finish` it there.
        """
        loop = asyncio._get_running_loop()
        set_running_loop(None)
        try:
            try:
                call = self._call(job, host)
                with self._step(job):
                    call.send(None)
                return call
            except StopIteration as ended:
                return self._outcome(job, ended.value)
            finally:
                host.close()
        finally:
            set_running_loop(loop)

    async def interleave(self, job: Job) -> Outcome:
        """Call an actor's method on the loop that runs."""
        return await self.finish(job, self._call(job, None))

    async def finish(self, job: Job, call: BegunCall) -> Outcome:
        """Drive a call to its end, and end what it has started."""
        try:
            return self._outcome(job, await self.drive(job, call))
        finally:
            await end_started(job)

    def _call(self, job: Job, host: TaskHost | None) -> BegunCall:
        functions, name = job.target()
        stream = None
        if job.limit:
            stream = StreamSender(
                job.send_items, job.id, job.limit, job.skip, job.node.pack
            )
        invoker = JobInvoker(job, host)
        return invoke(invoker, job.id, functions, name, job.payload, stream)

    def _outcome(self, job: Job, outcome: Done | Raised) -> Outcome:
        if type(outcome) is Done:
            return Outcome(outcome)
        assert type(outcome) is Raised, outcome
        kind, error = outcome.kind, outcome.error
        is_ctrl_c = self._ctrl_c.is_real(error)
        if (current.exits and has_exited()) or type(error) is ActorExit:
            kind = LEFT
        # A debugger that looks at it finds the user's frames alone.
        BaseException.with_traceback(error, _users_frames(error))
        failed = pack_failure(job.id, kind, error, INVOKED, job.node.pack)
        has_devices = kind != LEFT and job.has_devices
        if has_devices and not is_ctrl_c and has_run_out(error):
            failed = failed._replace(peak=peak_memory())
        if job.func.retried and kind == RAISED and not is_ctrl_c:
            failed = self._retry_rules.mark(failed, job.name, job.func.retried, error)
        return Outcome(failed, error, is_ctrl_c)

    def is_ctrl_c(self, error: BaseException) -> bool:
        """Whether the code that has run last was ended by the user at the keyboard."""
        return self._ctrl_c.is_real(error)

    @coroutine
    def drive(
        self, job: Job, begun: Coroutine[Any, Any, Any]
    ) -> Generator[Any, Any, Any]:
        """Drive a coroutine, so that it is seen when its code begins and pauses."""
        # A list, so that no local variable of this frame keeps a thrown error: the
        # error's traceback holds this frame, and the error would hold itself.
        next_step: list[Callable[[], Any]] = [partial(begun.send, None)]
        while True:
            with self._step(job):
                try:
                    awaited = next_step.pop()()
                except StopIteration as ended:
                    return ended.value
            try:
                next_step.append(partial(begun.send, (yield awaited)))
            except GeneratorExit:
                # It was left behind and its loop has gone: nothing can be awaited.
                job.started.clear()
                begun.close()
                raise
            except BaseException as error:  # noqa: BLE001 - the coroutine's to handle
                next_step.append(partial(begun.throw, error))

    @contextmanager
    def _step(self, job: Job) -> Iterator[None]:
        """The block runs the user's code, from here to its next pause."""
        with ExitStack() as stack:
            if job.step_environment is not None:
                stack.enter_context(job.step_environment.applied())
            if self._is_silent:
                stack.enter_context(silence())
            stack.enter_context(self._ctrl_c.watched())
            yield

    async def drive_task(self, job: Job, begun: Coroutine[Any, Any, Any]) -> Any:
        """Await what an actor's code has started, in the actor's environment."""
        return await self.drive(job, begun)


def _users_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame that is the user's own."""
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if OWN_FRAMES not in path and INVOKED not in path:
            break
        trace = trace.tb_next
    return trace


class TaskHost:
    """The node, as the code of one attempt at a task sees it; see `interface.Host`.

    Attributes:
        upsets: how many children have failed or were withdrawn so far.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._node = job.node
        self._thread = threading.get_ident()
        self._own: LoopRunner | None = None
        self._runners = {job.runner.loop: job.runner}
        self._awaited: list[Job] = []
        self._awaited_calls: list[int] = []
        self.upsets = 0

    def __repr__(self) -> str:
        return f"<TaskHost of {self._job!r}>"

    @property
    def waits(self) -> InlineNode:
        """Who is to be told of waits on an event loop."""
        return self._node

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; gives its number.

        Raises:
            MisuseError: the task has ended.
            NodeError: this is another thread than the task's.
            SerializationError: the arguments are too large to be sent.
        """
        self._check(f"{func.spec.name}.remote()")
        loop = asyncio._get_running_loop()
        if loop is None:
            self._own_runner()
        else:
            self._runner_of(loop)  # wakes that loop as well
        return self._node.submit(func, payload, receiver)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number.

        Raises:
            MisuseError: the task has ended.
            NodeError: this is another thread than the task's, or the method runs on
                the program's loop, which this code keeps from running.
        """
        actors = self._node.actors
        called = actors.known(actor)
        self._check(f"{called.name}.{method}.remote()")
        if called.func.actor is not None and called.func.actor.mode == ASYNC:
            raise NodeError(
                f"{called.name}.{method}.remote() was called by {self._job.name}, "
                f"whose plain code holds the thread. On an inline node a class that "
                f"has `async def` methods runs on the program's event loop, in that "
                f"same thread: make the caller an `async def`, or open a node with "
                f"address='local'."
            )
        number = called.call(method, payload, receiver)
        loop = asyncio._get_running_loop()
        if loop is not None:
            self._runner_of(loop).wake()
        return number

    remote_values = None

    def engine(self, _loop: asyncio.AbstractEventLoop | None) -> None:
        """The program's own engine takes all calls; see `Host.engine`."""
        return

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop of the program that has opened the node."""
        return self._node.actors.runner.loop

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        self._node.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        self.upsets += 1
        self._node.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """The same where the collector runs."""
        with suppress(RuntimeError):  # the loop is closed, and the child has ended
            loop = (self._own or self._job.runner).loop
            loop.call_soon_threadsafe(self._node.cancel, child)

    def cancel(self, task: int) -> None:
        """Stop a child that is awaited on an event loop."""
        self._node.cancel(task)

    async def why(self, name: str, task: int) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {name}")

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """The task's code waits for these, or for none any more.

        Raises:
            NodeError: this is another thread than the task's.
        """
        if children:
            self._check("aiogpu.get()")
        self.end_wait(waiter)
        found = [self._node.jobs.get(TaskId(child)) for child in children]
        self._awaited = [job for job in found if job is not None]
        self._awaited_calls = [child for child in children if child >= FIRST_CALL]
        for call in self._awaited_calls:
            self._node.begin_wait(call)
        for job in self._awaited:
            job.waiters = 1
            self._run_next(job)
        if self._awaited:
            self._node.tell_waits(self._job)

    def _run_next(self, job: Job) -> None:
        """Let a job run now, after the jobs that make its arguments.

        It does not matter which code has started these jobs. Chains of needs may be ten
        thousand long, so the depth-first search has an explicit stack.
        """
        jobs, seen = self._node.jobs, set[TaskId]()
        stack: list[tuple[Job, bool]] = [(job, False)]
        while stack:
            one, has_its_needs = stack.pop()
            if has_its_needs:
                if one.parent is not self._job:
                    self._job.needed.append(one)
            elif one.worker is None and one.id not in seen:
                seen.add(one.id)
                stack.append((one, True))
                needs = map(jobs.get, self._node.needed_by(one.id))
                stack += [(needed, False) for needed in needs if needed is not None]

    def end_wait(self, waiter: object) -> None:
        """Nobody of the task's plain code waits any more."""
        awaited, self._awaited = self._awaited, []
        for job in awaited:
            job.waiters = 0
        for call in self._awaited_calls:
            self._node.end_wait(call)
        self._awaited_calls, self._job.needed = [], []
        if awaited:
            self._node.tell_waits(self._job)

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Run the children until something is done; False if time is up before."""
        stack = self._node.stack
        self._end_strays()
        stack.resume_above(self._job)
        try:
            return self._own_runner().run_until(is_done, deadline)
        finally:
            stack.pause_above(self._job)

    def close(self) -> None:
        """End what plain code has started: its function has returned."""
        job, stack = self._job, self._node.stack
        self._node.end_orphans(*job.children())
        try:
            self._end_strays()
            stack.resume_above(job)
            while (last := stack.running[-1]) is not job:
                last.runner.run_until_ended(last)
            self._end_streams()
        finally:
            home, self._own = self._own, None
            if home is not None:
                _close_loop(home.loop)

    def _end_strays(self) -> None:
        """End what was left unfinished by a loop of the user's that has stopped."""
        while (last := self._node.stack.running[-1]) is not self._job:
            self._node.end_orphans(last)
            last.runner.run_until_ended(last)

    def _end_streams(self) -> None:
        """End the generators that run on the loop of plain code, which is closed."""
        for stream in list(self._node.streams.jobs.values()):
            if self._own is not None and stream.runner is self._own:
                self._node.end_orphans(stream)
                self._own.run_until_ended(stream)

    def _own_runner(self) -> LoopRunner:
        """The runner for plain code that waits."""
        if self._own is None:
            self._own = self._runner_of(asyncio.new_event_loop())
        return self._own

    def _runner_of(self, loop: asyncio.AbstractEventLoop) -> LoopRunner:
        runner = self._runners.get(loop)
        if runner is None:
            runner = self._runners[loop] = type(self._job.runner)(loop, self._node)
        return runner

    def _check(self, what: str) -> None:
        if self._job.has_ended:
            raise MisuseError(
                f"{what} was called after {self._job.name} had ended, by code that it "
                f"has left behind."
            )
        if self._thread != threading.get_ident():
            raise NodeError(
                f"{what} was called in a thread of {self._job.name}'s own. On an "
                f"inline node a task starts others in the thread that it runs in."
            )


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        # What was left behind has been told of; asyncio need not do so again.
        loop.set_exception_handler(lambda loop, context: None)
        loop.close()


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
        """Whether a task that could have its lease may begin now."""
        return record.spec.is_lease or self._node.may_begin(record)

    def take(self, record: TaskRecord) -> Lease | None:
        """Take what a task asks for."""
        with self._node.cpus_of_waiting_jobs():
            return super().take(record)

    def fits(self, record: TaskRecord) -> bool:
        """Return whether a task could take what it asks for now."""
        with self._node.cpus_of_waiting_jobs():
            return super().fits(record)


@dataclass(slots=True, eq=False)
class InlineWorker:
    """Stands for the process of one task or actor; see `LiveWorker`.

    Attributes:
        actor: the actor that it is.
        peer: the actor's object, which hears its calls; None before and after its life.
        begun: the number of what it has begun last.
    """

    id: int
    actor: Actor | None = None
    peer: Any = None
    begun: int = 0

    def borrow(self, payload: bytes) -> bytes:
        """The payload that it is sent, with the values that it needs."""
        return with_values(payload)


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
        """What workers are told."""
        return self

    def spawn(self, worker: int, _environment: object = ()) -> None:
        """A worker is wanted for a task whose turn is next."""
        self.workers[worker] = InlineWorker(worker)
        self._node.starting.append(WorkerId(worker))
        self._node.wake()

    def retire(self, worker: int) -> None:
        """A worker is not wanted any more."""
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
            "node": f"inline-{os.getpid()}",
            "worker": worker,
            "task": job.id,
            "name": job.name,
            "resources": call.func.resources,
            "accelerators": bind.accelerators,
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
        """Nobody wants the answer of an actor's call any more."""
        worker.peer.drop(call)

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


class InlineNode(Driver):
    """One node, and all the event loops on which tasks of it run.

    Attributes:
        executor: runs the jobs' code.
        pack: makes payloads of large values.
        jobs: the tasks that have not ended, with actors but without leases.
        stack: the jobs that run.
        runners: the runners of all loops on which jobs run.
        streams: the generators that have begun.
        urgent: waiting tasks that are an actor, or that an actor needs.
        starting: workers that the scheduler has asked for and that have not started.
        assigned: jobs that have a worker, and whose code has not begun.
        lost: workers that ended during an event; the scheduler is told next.
    """

    actors: ActorsPort  # type: ignore[assignment]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ledger: Ledger,
        vendors: Sequence[Accelerator],
        executor: InlineExecutor,
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
        self.executor = executor
        self.pack = pack
        self.jobs: dict[TaskId, Job] = {}
        self.stack = JobStack()
        self.runners: WeakSet[LoopRunner] = WeakSet()
        self.streams = Streams(self.stack)
        self.urgent: set[TaskId] = set()
        self.starting: deque[WorkerId] = deque()
        self.assigned: deque[Job] = deque()
        self.lost: deque[int] = deque()
        self._changed_waits: dict[Job, None] = {}
        self._with_own_workers: dict[int, tuple[TaskSpec, FunctionSpec]] = {}
        self._mark = object()  # left on functions that were found feasible
        super().__init__(
            loop,
            InlineScheduler(ledger, config, self),
            Assignment(vendors, ledger, os.environ),
            self.check,
            lambda _node: cast("Pool", InlinePool(self)),
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

    @contextmanager
    def cpus_of_waiting_jobs(self) -> Iterator[None]:
        """In the block, urgent tasks may take the CPUs of the jobs beneath them.

        The jobs beneath wait meanwhile.
        """
        beneath: list[tuple[dict[str, int], int]] = []
        if self.urgent:
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

    def lose(self, worker: int) -> None:
        """What a worker stands for has ended: tell the scheduler once it listens."""
        if self.is_busy:
            self.lost.append(worker)
            self.wake()
            return
        begun = self.pool.commands.begun(worker)
        if self.workers.pop(worker, None) is not None:
            self.on_gone(worker, Death(os.getpid(), begun=begun))

    def _settle(self, effect: effects.Settle) -> None:
        self.results.settle(effect)
        self.forget(effect.task)

    def _forget(self, effect: effects.Forget) -> None:
        self.results.forget(effect)
        self.forget(effect.task)

    def forget(self, task: TaskId) -> None:
        """A task has ended."""
        self.urgent.discard(task)
        job = self.jobs.pop(task, None)
        if job is not None:
            job.on_forgotten()

    def _rearm(self, deadline: float | None) -> None:
        self._timer_at = deadline
        for runner in list(self.runners):
            runner.set_alarm(deadline)

    def on_alarm(self) -> None:
        """Some time is up."""
        self._timer_at = None
        self.feed(Scheduler.wake)

    def wake(self) -> None:
        """Have whoever is at work look for what can begin now."""
        for runner in list(self.runners):
            runner.wake()

    # Whose turn it is.

    def may_begin(self, record: TaskRecord) -> bool:
        """Whether a task may run now, on top of what runs."""
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
        """Whether a worker is for a task that has its turn and has not begun."""
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
        if actor is not None or func.actor is not None:
            self.urgent.add(task)
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
            self.actors.waits.begin(task)
        else:
            self._count_waiters(task, 1)

    def end_wait(self, task: int) -> None:
        """It waits no longer, although the task has not ended."""
        if task >= FIRST_CALL:
            self.actors.waits.end(task)
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
        """A task has ended; nobody waits for it any more."""
        if task >= FIRST_CALL:
            self.actors.waits.end(task)
        elif (job := self.jobs.get(TaskId(task))) is not None:
            job.waiters = 0

    def unstartable(self, runner: LoopRunner) -> Job | None:
        """Return a job that can never start, because waiting plain code has the thread.

        The scheduler finds deadlocks over what tasks hold. This method finds those over
        what actors hold: while plain code waits, neither the program nor the actors
        themselves can run to end an actor.

        Args:
            runner: the runner that asks. The answer is None for the runner of the
                program's loop: while that loop runs, actors can still end.
        """
        if runner is self.actors.runner or self.starting or self.assigned:
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
        if not awaited or not all(map(self._is_blocked, self.stack.running)):
            return None
        # The one that was started last has the least to lose.
        return self.jobs[awaited[-1].id]

    def _is_blocked(self, job: Job) -> bool:
        return job.is_blocked or self.actors.waits.are_by(job)

    def why_unstartable(self, job: Job) -> str:
        """The chain from the first that waits to the one that cannot run."""
        chain = [*self.stack.running, job]
        told = "; ".join(
            f"{one.name} holds {one.func.spec.shape.request} and waits for {two.name}"
            for one, two in pairwise(chain)
        )
        wanted = job.func.spec.shape.request
        others = ", and actors the rest" if self.actors.are_there else ""
        return (
            f"{job.name} asks for {wanted}, and those that wait hold it{others}: {told}"
        )

    # What the program, or a task, wants.

    def cancel(self, task: int) -> None:
        """Stop a task or a call; its receiver is told nothing any more."""
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

    def end_orphans(self, *jobs: Job) -> None:
        """Stop jobs since who has started them has ended."""
        for job in jobs:
            call = self.call_of(job.id)
            if call is not None:
                call.tell_disowned()
            job.stop()

    def hasten(self) -> None:
        """Stop all jobs, and leave those behind that would take their time."""
        self.feed(Scheduler.close)
        self.actors.hasten()
        for job in list(self.jobs.values()):
            if job.worker is not None:
                job.runner.leave_behind(job)


class LoopRunner:
    """Runs jobs of a node on one loop.

    Attributes:
        node: what it shares with the runners of other loops.
        loop: the program's, a user's own inside a task, or one for plain code that
            waits.
        task_tracker: watches over what coroutines start there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, node: InlineNode) -> None:
        self.node = node
        self.loop = loop
        self.task_tracker = TaskTracker(loop, node.executor)
        self._is_woken = False
        self._is_run = False
        self._alarm: asyncio.Handle | None = None
        # What the loop is to call must not inherit the context of a task.
        self._context = Context()
        node.runners.add(self)
        self.set_alarm(node.scheduler.timers.earliest)

    def __repr__(self) -> str:
        return f"<Runner on {self.loop!r} of {self.node!r}>"

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
        # `_is_woken` stays set until here: a `wake` during these steps adds nothing.
        node, job = self.node, None
        while node.lost:
            node.lose(node.lost.popleft())
        node.tell_changed_waits()
        call = node.actors.next_call()
        if call is None:
            if not node.starting and not node.assigned:
                node.feed(Scheduler.wake)
            if node.starting and not node.assigned:
                node.on_started(node.starting.popleft())
            job = node.assigned.popleft() if node.assigned else None
        self._is_woken = False
        if call is not None:
            self.wake()  # there may be more, or a job
            self._begin_call(call)
        elif job is not None:
            if node.starting or node.assigned:
                self.wake()
            self._begin(job)
        elif (unstartable := node.unstartable(self)) is not None:
            unstartable.fail_wait(node.why_unstartable(unstartable))
            self.note_item()

    def _begin_call(self, call: Job) -> None:
        """Run a call of an actor at once, on top of whatever runs."""
        call.runner = self
        self.node.stack.running.append(call)
        self._attempt(call)

    def _begin(self, job: Job) -> None:
        record = job.record
        if record is None or record.worker is None:
            return  # it was left behind before it began
        if record.state is TaskState.STOPPING:
            worker = record.worker.id
            self.node.feed(Scheduler.finish, job.id, worker)
            self.node.lose(worker)
            return
        self.node.urgent.discard(job.id)
        job.runner = self
        job.begin()
        self.node.stack.running.append(job)
        self._attempt(job)

    def _attempt(self, job: Job) -> None:
        assert job.environment is not None, job
        job.environment.apply()
        try:
            self._run(job)
        except BaseException:
            if job.main is None and not job.is_over:
                # A Ctrl-C has found this package's own code; the program ends.
                self._end(job)
            raise

    def _run(self, job: Job) -> None:
        host = TaskHost(job)
        context = job.fresh_context(host)
        call = context.run(self.node.executor.begin, job, host)
        if isinstance(call, Outcome):
            self._finish(job, call)
            return
        if job.id in self.node.streams.senders:
            self.node.streams.enter(job)
            self.node.wake()  # the next one has its turn
        self.task_tracker.begin()
        job.main = self.loop.create_task(
            self.node.executor.finish(job, call), name=job.name, context=context
        )
        ended = partial(self._on_ended, job, call)
        job.main.add_done_callback(ended, context=self._context)
        record = job.record
        if record is not None and record.state is TaskState.STOPPING:
            job.main.cancel()  # its plain part was cancelled

    def note_item(self) -> None:
        """A job has given an item: plain code may wait for it."""
        if self._is_run:
            self.loop.stop()

    def _on_ended(
        self,
        job: Job,
        call: BegunCall,
        main: asyncio.Task[Outcome],
    ) -> None:
        self.task_tracker.end()
        if job.main is not main:
            return  # it was left behind, and is maybe tried again
        job.main = None
        if main.cancelled():
            call.close()  # its task has not begun
            self._end(job)
        else:
            self._finish(job, main.result())

    def _finish(self, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        if not job.goes_on(outcome):
            self._end(job)
        else:
            self._leave_stack(job)
        if outcome.is_ctrl_c and outcome.error is not None:
            raise outcome.error

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
        """Its code has stopped: let the next one have its turn."""
        job.is_over = True
        job.end()
        self._leave_stack(job)

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
        for runner in list(node.runners):
            runner.note_item()  # its plain code may wait for this one
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
