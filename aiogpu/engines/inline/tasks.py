"""Tasks in the calling process: who is next, how their code runs, what they hold.

Nothing runs where a job is added or cancelled, but in callbacks of the loop. A job
whose parent waits for it lies on top of it, with its surroundings and its lease. All
runners of a node share its turns, and one loop runs inside a callback of the other, so
that only the innermost is at work. Plain code that waits runs a loop meanwhile
(`TaskHost`): its children are carried on that as the program's tasks are on the
program's. So they pause when it goes on before they end.

Values pass through pickles as on their way to a worker and back, the function too: what
it closes over is a copy, and so are the globals that it uses if it is defined in
`__main__`. A function of a module is that module's own. A generator lies on top of
nothing between two items: whoever takes them runs meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain, islice, pairwise
from types import CoroutineType, coroutine
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol
from weakref import WeakSet

from aiogpu.client.current import (
    ActorExit,
    current,
    error_inside_task,
    has_exited,
    host_of_task,
    take_kept,
)
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Host, Receiver
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import BundleRef, Shape
from aiogpu.core.model.units import CPU
from aiogpu.core.records import (
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
    move_task,
)
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import (
    bundles_for,
    take_grouped,
    why_infeasible,
)
from aiogpu.core.scheduler.placement_groups import REMOVED, UNKNOWN
from aiogpu.core.scheduler.recovery import may_retry
from aiogpu.engines.admission import check_arguments, check_func
from aiogpu.engines.inline.surroundings import CtrlC, Surroundings, silence
from aiogpu.errors import (
    AiogpuError,
    MisuseError,
    NodeClosedError,
    NodeError,
    SerializationError,
)
from aiogpu.observe.status import PlacementStatus, placement_status
from aiogpu.observe.why import Why, find_shortages, tell_lacks
from aiogpu.runtime.actors.registry import FIRST_CALL
from aiogpu.runtime.callers.caller import Carrying
from aiogpu.runtime.callers.leases import LeaseReceiver, misfit, removed
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.runtime.devices.memory_shortage import told_instead
from aiogpu.runtime.objects.store import filled
from aiogpu.runtime.objects.values import is_complete, unfinished_in
from aiogpu.runtime.pending_tasks import Call, pass_on
from aiogpu.serialization.exceptions import (
    LEFT,
    RAISED,
    UNREADABLE,
    UNSENDABLE,
    pack_failure,
    unpack_failure,
)
from aiogpu.serialization.payload import Payload, has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    dump_result,
    is_retried,
    load_arguments,
    load_function,
    split_results,
)
from aiogpu.wire.messages import ASYNC, LEASE_MARK, Done, Failed
from aiogpu.worker.gpu import has_run_out, peak_memory
from aiogpu.worker.streams import StreamSender, UnsendableError, send_all_async

if TYPE_CHECKING:
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.observe.status import ActorStatus, Holdings
    from aiogpu.runtime.actors.actor import Actor
    from aiogpu.runtime.objects.values import Value


class HostedActor(Protocol):
    """The object of an actor in this process; see `engines.inline.actors`."""

    @property
    def worker_id(self) -> WorkerId:
        """Stands for its process in `status()`."""
        ...

    @property
    def actor(self) -> Actor:
        """Its calls and who waits for it."""

    @property
    def record(self) -> TaskRecord | None:
        """What `status()` shows of it, None before its life."""

    def kill(self) -> None:
        """End at once, or as soon as its code has returned."""


class CallWaiters(Protocol):
    """Which code waits for calls of actors."""

    def begin(self, number: int, /) -> None:
        """The code that runs now waits for a call, which fails if it is in vain."""

    def end(self, number: int, /) -> None:
        """Nobody waits for a call any more."""

    def are_by(self, job: Job, /) -> bool:
        """Return whether this job's code waits for a call."""


class HostedActors(Protocol):
    """All actors in this process, as its tasks need them; see `Residents`."""

    @property
    def runner(self) -> Runner:
        """Carries what they start, on the program's loop."""
        ...

    @property
    def waits(self) -> CallWaiters:
        """Who waits for their calls."""
        ...

    @property
    def are_there(self) -> bool:
        """True if there is any that has not ended."""

    def listed(
        self,
        place_of: Callable[[Actor], tuple[int, int] | None],
        client_of: Callable[[int], int],
    ) -> tuple[ActorStatus, ...]:
        """All of them, as `status()` shows them."""
        ...

    def life(self, actor: int, /) -> HostedActor | None:
        """That of an actor which has not ended."""
        ...

    def living(self) -> Sequence[HostedActor]:
        """Those that have not ended, in the order in which they were wanted."""

    def known(self, actor: int, /) -> Actor:
        """An actor that lives, or to which somebody has a handle."""

    def next_call(self) -> Job | None:
        """The call whose turn it is, None without one."""

    def cancel_call(self, number: int, /) -> None:
        """Nobody wants a call's answer any more."""

    def demand_call(self, number: int, limit: int, /) -> None:
        """Let a call that is a stream yield so many items in all."""

    def close_down(self) -> None:
        """End with the node."""

    def hasten(self) -> None:
        """End now, and leave behind what takes its time."""

    async def closed(self) -> None:
        """Wait until all of them have ended."""


OWN_FRAMES: Final = "/aiogpu/engines/inline/"
"""Marks this package's own frames, which a user's traceback leaves out."""


class Outcome(NamedTuple):
    """What a worker would answer, and what it would not send.

    Attributes:
        answer: the pickled result or error.
        error: the exception itself, with its frames, None for a result.
        is_ctrl_c: whether it is the user at the keyboard who ended it.
        carried: keeps the actors alive whose handles are in the result.
        original: the error as it was raised, where `answer` tells more of it.
    """

    answer: Done | Failed
    error: BaseException | None = None
    is_ctrl_c: bool = False
    carried: list[object] | None = None
    original: Failed | None = None

    @classmethod
    def failed(
        cls, task: int, kind: str, error: BaseException, is_ctrl_c: bool
    ) -> Outcome:
        """The outcome of an attempt that raised; see `pack_failure`."""
        return cls(pack_failure(task, kind, error, OWN_FRAMES), error, is_ctrl_c)

    def show_frames(self, revived: Exception) -> None:
        """Give the exception that the task's owner sees the frames of this one.

        A debugger that looks at it after its end finds the task's own frames.
        """
        trace = self.error.__traceback__ if self.error is not None else None
        while trace is not None and OWN_FRAMES in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        BaseException.with_traceback(revived, trace)


def hold_for(carried: list[object] | None, receiver: Receiver | None) -> None:
    """Keep what is carried alive for as long as who gets the result."""
    while isinstance(receiver, Carrying):
        receiver = receiver.receiver
    if carried and receiver is not None:
        weakref.finalize(receiver, carried.clear).atexit = False


class Raising:
    """A receiver of an answer that is an exception of this process."""

    __slots__ = ("_error", "_receiver")

    def __init__(self, receiver: Receiver, error: Exception) -> None:
        self._receiver = receiver
        self._error = error

    def receive(self, payload: bytes) -> None:
        """Pass on a result."""
        self._receiver.receive(payload)

    def reject(self, _failed: Failed) -> None:
        """Give the exception in place of its description."""
        self._receiver.fail(self._error)

    def fail(self, error: Exception) -> None:
        """Pass on an error."""
        self._receiver.fail(error)


_log: Final = logging.getLogger(__name__)


running_job: Final[ContextVar[Job | None]] = ContextVar("running_job", default=None)
"""The job whose code asks; the asyncio tasks that it starts inherit it."""


acting_job: Final[ContextVar[Job | None]] = ContextVar("acting_job", default=None)
"""The job that has made the actor whose coroutine asks; inherited as well."""


def id_of_caller() -> int:
    """By which the code that asks is told apart from others; 0 for the program."""
    job = running_job.get() or acting_job.get()
    return 0 if job is None else job.id


@dataclass(slots=True, eq=False)
class Job:
    """A task, what it holds, and what it has started.

    Attributes:
        record: its state, as `status()` shows it.
        call: its function and arguments, and who waits for it.
        runner: carries it on its loop.
        due: the loop's time at which its `timeout` passes, None without one.
        parent: the task that has started it, None for one of the program's.
        brood: the tasks that it has started and that have not ended.
        children: those that wait for their turn on top of it; some are no brood of
            its own, but what a task that has ended was not to take with it.
        waiters: how many wait for it.
        lease: what it holds while it runs.
        surroundings: what it finds around it while it runs.
        main: runs its coroutine; None for a plain function.
        started: the asyncio tasks that its code has started.
        timer: rings when its time is up, or its patience with a cancel.
        aside: what has begun on top of it and pauses, while its own code goes on.
        is_urgent: whether it runs on top of whatever runs, since an actor needs it.
        flow: the way out for its items, if it is a generator that has begun.
        error: the last answer as an exception, if it was needed before it is told.
        worn: put on whenever its code runs, where other code runs in between.
    """

    record: TaskRecord
    call: Call
    runner: Runner
    due: float | None = None
    parent: Job | None = None
    brood: dict[TaskId, Job] = field(default_factory=dict)
    children: deque[Job] = field(default_factory=deque)
    waiters: int = 0
    lease: Lease | None = None
    surroundings: Surroundings | None = None
    main: asyncio.Task[Outcome] | None = None
    started: set[asyncio.Task[object]] = field(default_factory=set)
    timer: asyncio.Handle | None = None
    aside: list[Job] = field(default_factory=list)
    is_urgent: bool = False
    worn: Surroundings | None = None
    flow: StreamSender | None = None
    error: Exception | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name} {self.record.state.value}>"

    @property
    def id(self) -> TaskId:
        """The task's number."""
        return self.record.id

    @property
    def name(self) -> str:
        """The task's name."""
        return self.record.spec.name

    @property
    def at_work(self) -> WorkerRecord | None:
        """What stands for the worker that runs its code, None while it waits."""
        return self.record.worker

    @property
    def is_waiting(self) -> bool:
        """True if none of its code has run."""
        return self.record.state is TaskState.WAITING

    @property
    def is_overdue(self) -> bool:
        """True if its time is up."""
        return self.due is not None and self.runner.loop.time() >= self.due

    @property
    def has_ended(self) -> bool:
        """True if its code has stopped, or never ran."""
        return self.record.state is TaskState.ENDED

    @property
    def is_about_to_end(self) -> bool:
        """True if its code has stopped, and the loop is to tell of it next."""
        return self.main is not None and self.main.done()

    @property
    def is_blocked(self) -> bool:
        """True if its code waits for a task that it has started."""
        return any(child.waiters for child in self.brood.values())

    @property
    def actor_id(self) -> int | None:
        """The number of the actor whose code it runs; None for a task."""
        return None

    def worker_id(self, depth: int) -> WorkerId:
        """By which number its code and `status()` know where it runs."""
        return WorkerId(depth)

    def function(self, executor: Executor) -> Callable[..., Any]:
        """Return what is called; raises whatever unpickling it raises."""
        return executor.function(self.call.func)

    def tell(self, outcome: Outcome) -> None:
        """Tell who waits what has come of it."""
        call, answer = self.call, outcome.answer
        hold_for(outcome.carried, call.receiver)
        if type(answer) is Done and call.receiver is not None:
            call.receiver.receive(answer.payload)
        elif type(answer) is Failed:
            error = self.error or unpack_failure(answer, self.name)
            outcome.show_frames(error)
            call.tell(error)

    def let_go(self, result: bytes) -> None:
        """Children to which the result has handles go on without their parent."""
        for task in unfinished_in(result):
            child = self.brood.pop(TaskId(task), None)
            if child is not None:
                child.parent = None

    def is_retried(self, outcome: Outcome) -> bool:
        """Return whether it is to be tried again after an attempt that ended so."""
        answer, original = outcome.answer, outcome.original
        self.error = None
        if type(answer) is not Failed or outcome.is_ctrl_c:
            return False
        is_named = original is not None and self._names(original)
        return (self._names(answer) or is_named) and may_retry(self.record)

    def _names(self, failed: Failed) -> bool:
        """Return whether its options name what was raised; that is kept, to be told."""
        wanted = self.call.func.retry_exceptions
        if wanted is False or failed.kind != RAISED:
            return False
        self.error = unpack_failure(failed, self.name)
        try:
            return is_retried(wanted, self.error)
        except Exception as error:  # noqa: BLE001 - a metaclass of the user's may raise
            _log.warning("! %s is not retried: %r", self.name, error)
            return False

    def pass_item(self, payload: bytes) -> None:
        """Give an item to who waits."""
        call = self.call
        call.passed += 1
        if call.receiver is not None:
            hold_for(take_kept(), call.receiver)
        pass_on(call.receiver, (payload,))
        self.runner.note_item()

    def fail_wait(self, reason: str) -> bool:
        """Tell who waits that the wait can never end; whether the job is over by it."""
        self.call.tell_deadlock(reason)
        return True

    def on_end(self) -> None:
        """Its code has stopped, or never ran."""

    def fresh_context(self, host: Host) -> Context:
        """An empty context, as a worker's is, but for whose it is."""
        context = Context()
        context.run(running_job.set, self)
        context.run(host_of_task.set, host)
        return context

    def stop_timer(self) -> None:
        """Have nothing rung for it any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Expected(Enum):
    """When the arguments of a job come."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


def expect(job: Job) -> None:
    """Have a job looked at again when its arguments come."""
    payload = job.call.payload
    if type(payload) is Payload and not is_complete(payload):
        for value in dict.fromkeys(payload.needs):
            value.watch(lambda _: job.runner.wake())


def needed_by(job: Job) -> tuple[Value, ...]:
    """The arguments of a job that are still to come, each once."""
    payload = job.call.payload
    if type(payload) is not Payload:
        return ()
    return tuple(value for value in dict.fromkeys(payload.needs) if value.is_pending)


def expected(job: Job) -> Expected:
    """When the arguments of a job come; if never, who waits for it is told why."""
    payload = job.call.payload
    if type(payload) is not Payload or is_complete(payload):
        return Expected.NOW
    for value in payload.needs:
        if value.has_failed:
            receiver, job.call.receiver = job.call.receiver, None
            if receiver is not None:
                value.tell(receiver)
            return Expected.NEVER
    return Expected.LATER


def supplied(payload: bytes) -> bytes:
    """The payload of a call that begins, with the values that it needs."""
    return filled(payload) if type(payload) is Payload else payload


def with_shortage(job: Job, outcome: Outcome) -> Outcome:
    """The outcome, told otherwise if its error is that of a task with devices."""
    worker, failed = job.at_work, outcome.answer
    is_ours = worker is not None and worker.lease is not None and worker.lease.shares
    error = None if outcome.is_ctrl_c else outcome.error
    if worker is None or not is_ours or error is None or not has_run_out(error):
        return outcome
    node = job.runner.node
    told = told_instead(job.name, worker, node, failed, peak_memory())  # type: ignore[arg-type]
    return outcome._replace(answer=told, original=failed)  # type: ignore[arg-type]


COUNTED: Final = 4096
"""Jobs that are counted one by one for a position."""


class Turns:
    """The jobs that run and those that wait, in order of submission.

    More than one runs only where each of them is a child of the one before, which
    gives way to it. A child whose parent has ended is the program's.

    Attributes:
        running: the jobs that have begun, the last one in its turn.
        by_shape: the jobs that have not, in order of submission.
        urgent: those of them that run on top of whatever runs, since it may wait for
            them: makings of actors, and what the methods of actors start.
    """

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.by_shape: dict[Shape, dict[TaskId, Job]] = {}
        self.urgent: deque[Job] = deque()
        self._waiting: deque[Job] = deque()

    def __repr__(self) -> str:
        return f"<Turns {self.running!r}>"

    def parent(self) -> Job | None:
        """The running job whose code asks, None if it is the program's."""
        job = running_job.get()
        if job is None or job.has_ended or job not in self.running:
            return None
        return job

    def add(self, job: Job) -> None:
        """Let a job wait."""
        if job.is_urgent:
            self.urgent.append(job)
        else:
            (job.parent.children if job.parent else self._waiting).append(job)
        self.by_shape.setdefault(job.record.spec.shape, {})[job.id] = job

    def leave(self, job: Job) -> None:
        """Note that a job waits no longer; nothing if it has left before."""
        shape = job.record.spec.shape
        jobs = self.by_shape.get(shape)
        if jobs is not None:
            jobs.pop(job.id, None)
            if not jobs:
                del self.by_shape[shape]

    def waiting(self) -> Iterator[Job]:
        """The jobs of which one may begin now, in their order; some have ended."""
        if self.running and self.running[-1].is_about_to_end:
            return iter(())  # it is told of in a moment, and its children no more its
        for waiting in (self.urgent, self._queue()):
            while waiting and not waiting[0].is_waiting:
                waiting.popleft()
        return chain(self.urgent, self._queue())

    def begin(self, job: Job) -> None:
        """A job that waited has its turn."""
        (self.urgent if job.is_urgent else self._queue()).remove(job)
        self.leave(job)
        self.running.append(job)

    def __iter__(self) -> Iterator[Job]:
        """Those that wait, in the order of their turn."""
        children = (job.children for job in reversed(self.running))
        for line in (self.urgent, *children, self._waiting):
            for job in line:
                if job.is_waiting:
                    yield job

    def position(self, job: Job) -> int:
        """Return how many go before a job; those that left may count, far behind."""
        before = 0
        for other in islice(self, COUNTED):
            if other is job:
                return before
            before += 1
        return max(before, bisect_left(self._waiting, job.id, key=lambda one: one.id))

    def pop_ended(self) -> list[Job]:
        """Remove the jobs that have ended and have nothing running above them."""
        popped: list[Job] = []
        while self.running and self.running[-1].has_ended:
            job = self.running.pop()
            popped.append(job)
            self.let_go(job)
        return popped

    def let_go(self, job: Job) -> None:
        """Give what waits on top of a job, and is not its own, to what is below."""
        orphans = [child for child in job.children if child.is_waiting]
        job.children.clear()
        running = self.running
        below = running[: running.index(job)] if job in running else running
        if below:
            below[-1].children.extend(orphans)
        elif orphans:
            merged = sorted([*self._waiting, *orphans], key=lambda job: job.id)
            self._waiting = deque(merged)

    def bring_up(self, job: Job, above: Job) -> None:
        """Have a job that waits run on top of another, whose code waits for it."""
        for line in (self._waiting, *(below.children for below in self.running)):
            if line is not above.children and job in line:
                line.remove(job)
                above.children.append(job)
                return

    def set_aside(self, job: Job) -> None:
        """Have what runs above a job pause: the job's own code goes on."""
        place = self.running.index(job) + 1
        job.aside = self.running[place:]
        del self.running[place:]
        for above in reversed(job.aside):
            assert above.surroundings is not None, above
            above.surroundings.take_off()

    def resume(self, job: Job) -> None:
        """Have what pauses above a job go on."""
        for above in job.aside:
            assert above.surroundings is not None, above
            above.surroundings.put_on()
        self.running.extend(job.aside)
        job.aside = []

    def abandon(self) -> None:
        """Give the process its own variables back; there is nothing else."""
        for job in reversed(self.running):
            assert job.surroundings is not None, job
            job.surroundings.take_off()
        self.running.clear()

    def _queue(self) -> deque[Job]:
        return self.running[-1].children if self.running else self._waiting


class Beside:
    """See above.

    Attributes:
        flows: the ways out for their items, by the task's or call's number; also of
            generators of actors, which have no turns.
        jobs: those that have left their turn, in that order.
    """

    def __init__(self, turns: Turns) -> None:
        self.flows: dict[int, StreamSender] = {}
        self.jobs: dict[int, Job] = {}
        self._turns = turns

    def __repr__(self) -> str:
        return f"<Beside {list(self.jobs.values())!r}>"

    def enter(self, job: Job, context: Context) -> None:
        """A job has just begun, and is a generator: others take their turns.

        Args:
            job: the job.
            context: in which its code runs; what it starts runs on top of whatever
                runs then, as what methods of actors start.
        """
        assert job.surroundings is not None, job
        self._turns.running.remove(job)
        job.surroundings.take_off()
        job.worn = job.surroundings.again()
        context.run(acting_job.set, job)
        self.jobs[job.id] = job

    def bring_back(self, job: Job) -> None:
        """If a job has entered, have it lie on top again: it is tried once more."""
        if self.leave(job):
            assert job.surroundings is not None, job
            self._turns.running.append(job)
            job.surroundings.put_on()
            job.worn = None

    def leave(self, job: Job) -> bool:
        """An attempt at a job has ended; False if it had not entered."""
        job.flow = None
        self.flows.pop(job.id, None)
        return self.jobs.pop(job.id, None) is not None

    def rise(self, task: int, limit: int) -> None:
        """Let a generator yield so many items in all."""
        flow = self.flows.get(task)
        if flow is not None:
            flow.rise(limit)


_NO_ITEM: Final = object()


class InlineFlow(StreamSender):
    """The items of one job on their way."""

    def __init__(self, job: Job) -> None:
        call = job.call
        limit = call.limit or call.func.window
        super().__init__(None, job.id, limit, call.passed)  # type: ignore[arg-type]
        self._job = job

    def send(self, item: object) -> None:
        """Give the next item to who waits; see `StreamSender.send`."""
        if not self.counts():
            return
        try:
            payload = dump_result(item)
            if isinstance(payload, PickledValue):
                payload = self._job.runner.node.pack(payload)
        except SerializationError as error:
            take_kept()  # it will never be sent
            raise self.unsendable(error) from error
        self._job.pass_item(payload)


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
        running = self._job.runner.node.turns.running
        loop = asyncio._get_running_loop()
        running.append(self._job)
        asyncio._set_running_loop(None)
        try:
            yield
        finally:
            asyncio._set_running_loop(loop)
            running.remove(self._job)


def begin_stream(
    job: Job, items: Any, host: TaskHost | None
) -> Coroutine[Any, Any, None]:
    """Return what runs a generator to its end.

    Args:
        job: whose it is; its flow is set.
        items: the generator.
        host: of plain code that has no loop of its own; None where it runs on one.
    """
    flow = job.flow = InlineFlow(job)
    job.runner.node.beside.flows[job.id] = flow
    if host is not None and not hasattr(items, "__anext__"):
        items = PlainItems(items, job, host)
    return send_all_async(items, flow, job.runner.loop.create_future)


AnyCoroutine = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class Offspring:
    """Keeps watch over a loop while coroutines of jobs run on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor) -> None:
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
        if job is not None and job.record.state is TaskState.ENDED:
            job = None
        if job is None:
            job = acting_job.get()
            if job is not None and type(coroutine) is CoroutineType:
                begun, coroutine = coroutine, self._executor.dressed(job, coroutine)
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


BegunCoroutine = Coroutine[Any, Any, Any]


class Executor:
    """The functions that this process knows as a worker would, and how to run them."""

    def __init__(self, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._ctrl_c = CtrlC()
        self._functions: dict[int, Callable[..., Any]] = {}

    def call(self, job: Job, host: TaskHost) -> Outcome | BegunCoroutine:
        """Call the function, outside of any event loop, as in a worker.

        Gives the coroutine where that is what the function gives; `finish` it.
        """
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            try:
                return self._call(job, host)
            finally:
                host.close()
        finally:
            asyncio._set_running_loop(loop)

    def _call(self, job: Job, host: TaskHost | None = None) -> Outcome | BegunCoroutine:
        kind = UNREADABLE
        try:
            with self._step(job):
                function = job.function(self)
                args, kwargs = _arguments(job)
                kind = RAISED
                value = function(*args, **kwargs)
                if type(value) is CoroutineType:
                    return value
                value = split_results(value, job.call.payload)
                _raise_exit()
                if job.call.limit or job.call.func.window:
                    return begin_stream(job, value, host)
                kind = UNSENDABLE
                return _packed(job, value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            return self._failed(job, kind, error)

    async def interleave(self, job: Job) -> Outcome:
        """Call an actor's method on the loop that runs, and await what it gives."""
        outcome = self._call(job)
        return (
            outcome if isinstance(outcome, Outcome) else await self.finish(job, outcome)
        )

    async def finish(self, job: Job, begun: BegunCoroutine) -> Outcome:
        """Await a coroutine to its end, and end what it has started."""
        kind = RAISED
        try:
            value = await self.stepwise(job, begun)
            value = split_results(value, job.call.payload)
            _raise_exit()
            kind = UNSENDABLE
            with self._step(job):
                return _packed(job, value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            kind = UNSENDABLE if type(error) is UnsendableError else kind
            return self._failed(job, kind, error)
        finally:
            await end_started(job)

    def _failed(self, job: Job, kind: str, error: BaseException) -> Outcome:
        take_kept()  # the result that they were in will never be sent
        if (current.exits and has_exited()) or type(error) is ActorExit:
            kind = LEFT
        outcome = Outcome.failed(job.id, kind, error, self.is_ctrl_c(error))
        if kind != LEFT:
            outcome = with_shortage(job, outcome)
        return outcome._replace(carried=take_kept())

    def is_ctrl_c(self, error: BaseException) -> bool:
        """Whether the code that has run last was ended by the user at the keyboard."""
        return self._ctrl_c.is_real(error)

    @coroutine
    def stepwise(self, job: Job, begun: BegunCoroutine) -> Generator[Any, Any, Any]:
        """Drive a coroutine, so that it is seen when its code begins and pauses."""
        # Not a name of its own: an error would hold itself, by its frames.
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
            if job.worn is not None:
                stack.enter_context(job.worn.on())
            if self._is_silent:
                stack.enter_context(silence())
            stack.enter_context(self._ctrl_c.watched())
            yield

    async def dressed(self, job: Job, begun: BegunCoroutine) -> Any:
        """Await what an actor's code has started, in the actor's surroundings."""
        return await self.stepwise(job, begun)

    def function(self, func: FunctionSpec) -> Callable[..., Any]:
        """Return what a function stands for; raises whatever unpickling it raises."""
        sent = func.function
        if func.spec.max_calls == 1:
            # Its worker would have run nothing before.
            return self._load(sent.payload)
        found = self._functions.get(sent.id)
        if found is None:
            found = self._functions[sent.id] = self._load(sent.payload)
        return found

    def _load(self, payload: bytes) -> Callable[..., Any]:
        loaded: Callable[..., Any] = load_function(payload)
        return loaded


def _raise_exit() -> None:
    """End the actor if its method called `exit_actor()` and swallowed the exception."""
    if current.exits and has_exited():
        raise ActorExit


def _arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a call is given; handles for a coroutine are its loop's."""
    payload = supplied(job.call.payload)
    if asyncio._get_running_loop() is not None or not (
        has_handles(payload) and job.call.func.is_coroutine
    ):
        return load_arguments(payload)
    asyncio._set_running_loop(job.runner.loop)
    try:
        return load_arguments(payload)
    finally:
        asyncio._set_running_loop(None)


def _packed(job: Job, value: object) -> Outcome:
    result = dump_result(value)
    if isinstance(result, PickledValue):
        result = job.runner.node.pack(result)
        job.let_go(result)
    return Outcome(Done(job.id, result), carried=take_kept())


class TaskHost:
    """The node as the code of one attempt at a task sees it; see `family.Host`.

    Attributes:
        upsets: how many children that plain code may wait for have failed so far.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._node = job.runner.node
        self._thread = threading.get_ident()
        self._home: Runner | None = None
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
        runner = self._at_home() if loop is None else self._beside(loop)
        return runner.submit(func, payload, receiver)

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
            self._beside(loop).wake()
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
            loop = (self._home or self._job.runner).loop
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
            self._bring_up(job)

    def _bring_up(self, job: Job) -> None:
        """Have a job run now, and before it what it needs, whoever has started them.

        What a job needs may need others in turn, ten thousand in a row, so this is a
        depth-first search with a stack of its own.
        """
        jobs, seen = self._node.jobs, set[TaskId]()
        stack: list[tuple[Job, bool]] = [(job, False)]
        while stack:
            one, has_its_needs = stack.pop()
            if has_its_needs:
                self._node.turns.bring_up(one, self._job)
            elif one.is_waiting and one.id not in seen:
                seen.add(one.id)
                stack.append((one, True))
                needs = (jobs.get(TaskId(value.task)) for value in needed_by(one))
                stack += [(needed, False) for needed in needs if needed is not None]

    def end_wait(self, waiter: object) -> None:
        """Nobody of the task's plain code waits any more."""
        for job in self._awaited:
            job.waiters = 0
        for call in self._awaited_calls:
            self._node.end_wait(call)
        self._awaited, self._awaited_calls = [], []

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Run the children until something is done; False if time is up before."""
        turns = self._node.turns
        self._end_strays()
        turns.resume(self._job)
        try:
            return self._at_home().run_until(is_done, deadline)
        finally:
            turns.set_aside(self._job)

    def close(self) -> None:
        """End what plain code has started: its function has returned."""
        job, turns = self._job, self._node.turns
        job.runner.disown(job)
        turns.let_go(job)
        try:
            self._end_strays()
            turns.resume(job)
            while (last := turns.running[-1]) is not job:
                last.runner.see_off(last)
            self._end_streams()
        finally:
            home, self._home = self._home, None
            if home is not None:
                _close_loop(home.loop)

    def _end_strays(self) -> None:
        """End what was left unfinished by a loop of the user's that has stopped."""
        while (last := self._node.turns.running[-1]) is not self._job:
            last.call.tell_disowned()
            last.runner.stop(last)
            last.runner.see_off(last)

    def _end_streams(self) -> None:
        """End the generators that run on the loop of plain code, which is closed."""
        for stream in list(self._node.beside.jobs.values()):
            if self._home is not None and stream.runner is self._home:
                stream.call.tell_disowned()
                self._home.stop(stream)
                self._home.see_off(stream)

    def _at_home(self) -> Runner:
        """The runner for plain code that waits."""
        if self._home is None:
            self._home = self._beside(asyncio.new_event_loop())
        return self._home

    def _beside(self, loop: asyncio.AbstractEventLoop) -> Runner:
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


class InlinePlacements:
    """Those that are held or asked for, and those that end.

    Attributes:
        names: of all of them, by key.
    """

    def __init__(self, node: InlineNode) -> None:
        self._node = node
        self.names: dict[str, str] = {}
        self._ending: dict[str, Lease] = {}

    def __repr__(self) -> str:
        return f"<InlinePlacements {list(self.names.values())}>"

    def refusal(self, spec: TaskSpec) -> AiogpuError | None:
        """Why nobody with this spec is taken; None if he is in none, or may be."""
        placement_group = spec.shape.request.placement_group
        if not isinstance(placement_group, BundleRef):
            return None
        if placement_group.key not in self.names:
            return removed(placement_group.name, spec.name, UNKNOWN)
        reason = why_infeasible(self._node.ledger, spec.shape.request)
        return None if reason is None else misfit(spec, reason)

    def open(self, key: str) -> None:
        """It is granted: who can never run in it is told."""
        for job in self._jobs_in(key):
            refusal = self.refusal(job.record.spec)
            if refusal is not None and job.record.state is TaskState.WAITING:
                _end(job, refusal)
                job.runner.stop(job)

    def remove(self, key: str, lease: Lease | None) -> None:
        """End those who are in it; what it holds is free when they have stopped."""
        name = self.names.pop(key)
        if lease is not None:
            self._ending[key] = lease
        for resident in self._residents_in(key):
            actor = resident.actor
            actor.fail(removed(name, actor.name, REMOVED))
            resident.kill()
        for job in self._jobs_in(key):
            _end(job, removed(name, job.name, REMOVED))
            job.runner.stop(job)

    def look(self) -> None:
        """Give back what nobody is in any more."""
        ledger = self._node.ledger
        for key, lease in list(self._ending.items()):
            if all(part.is_idle for part in bundles_for(ledger, BundleRef(key, ""))):
                del self._ending[key]
                ledger.give_back(lease)

    def members_of(self, record: TaskRecord) -> int:
        """Return how many tasks and actors were given one that have not ended."""
        placement_group = record.spec.shape.request.placement_group
        assert placement_group is not None, record
        actors = {one.actor.id for one in self._residents_in(placement_group.key)}
        return len({*actors, *(job.id for job in self._jobs_in(placement_group.key))})

    def _jobs_in(self, key: str) -> list[Job]:
        return [job for job in self._node.jobs.values() if _is_in(key, job.record.spec)]

    def _residents_in(self, key: str) -> list[HostedActor]:
        living = self._node.actors.living()
        return [one for one in living if _is_in(key, one.actor.func.spec)]


def _is_in(key: str, spec: TaskSpec) -> bool:
    placement_group = spec.shape.request.placement_group
    return isinstance(placement_group, BundleRef) and placement_group.key == key


def _end(job: Job, error: AiogpuError) -> None:
    job.call.tell(error)
    job.waiters = 0


FIRST_HOLDER = 1 << 24
"""Ids of those who hold leases begin here; what stands for workers is below."""


@dataclass(slots=True, eq=False)
class Tenant:
    """Who has asked for a lease."""

    record: TaskRecord
    receiver: LeaseReceiver


class InlineLeases:
    """All leases of one node, and who waits for one.

    Attributes:
        placements: those of them that are placements.
    """

    def __init__(self, node: InlineNode) -> None:
        self._node = node
        self._tenants: dict[int, Tenant] = {}
        self.placements = InlinePlacements(node)

    def __repr__(self) -> str:
        return f"<InlineLeases {len(self.granted)} held>"

    @property
    def granted(self) -> dict[WorkerId, WorkerRecord]:
        """Who stands for the holders, by id."""
        records = (tenant.record.worker for tenant in self._tenants.values())
        return {holder.id: holder for holder in records if holder is not None}

    @property
    def pids(self) -> dict[int, int]:
        """The holders' processes, by id."""
        return {
            tenant.record.worker.id: tenant.receiver.pid
            for tenant in self._tenants.values()
            if tenant.record.worker is not None
        }

    @property
    def waiting(self) -> list[TaskRecord]:
        """Those that are not granted yet, in the order of their turn."""
        records = [tenant.record for tenant in self._tenants.values()]
        return [record for record in records if record.worker is None]

    def placements_seen(self) -> tuple[PlacementStatus, ...]:
        """Those of them that are placements, as people are told of them."""
        ledger = self._node.ledger
        records = [tenant.record for tenant in self._tenants.values()]
        return tuple(
            placement_status(
                *(record, ledger, self.placements.members_of(record), self.pids),
                "" if record.worker else tell_lacks(self._node, record),
            )
            for record in records
            if record.spec.is_grouped
        )

    def take(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        node = self._node
        if node.is_closing:
            raise NodeClosedError("this node is being shut down.")
        check_func(func, node.ledger)
        record = node.new_record(func)
        if (placement_group := func.spec.shape.request.placement_group) is not None:
            self.placements.names[placement_group.key] = placement_group.name
        self._tenants[record.id] = Tenant(record, receiver)
        self.look()
        return record.id

    def look(self) -> None:
        """Grant what there is enough for."""
        self.placements.look()
        for task, tenant in list(self._tenants.items()):
            record = tenant.record
            if record.worker is None and task in self._tenants:
                lease = take_grouped(self._node.ledger, record.spec.shape.request)
                if lease is not None:
                    self._grant(tenant, lease)

    def _grant(self, tenant: Tenant, lease: Lease) -> None:
        record = tenant.record
        holder = WorkerId(FIRST_HOLDER + record.id)
        record.worker = WorkerRecord(
            holder, state=WorkerState.BUSY, task=record, lease=lease
        )
        move_task(record, TaskState.RUNNING)
        if lease.parts:
            tenant.receiver.receive(b"")
            self.placements.open(lease.parts[0].key)
            self._node.wake()
            return
        # msgpack comes with it, which a node in this process does not need otherwise.
        from aiogpu.wire.codec import pack

        bind = self._node.assignment.bind(lease, {})
        mark = f"inline-{tenant.receiver.pid}.{record.id}"
        environ = {**bind.environ, LEASE_MARK: mark}
        granted = bind._replace(environ=environ, cpus=())
        tenant.receiver.receive(pack(granted))

    def give_back(self, task: int) -> bool:
        """Give a lease up, or back; False if it is none."""
        tenant = self._tenants.pop(task, None)
        if tenant is None:
            return False
        holder = tenant.record.worker
        lease = None if holder is None else holder.lease
        placement_group = tenant.record.spec.shape.request.placement_group
        if placement_group is not None:
            self.placements.remove(placement_group.key, lease)
        elif lease is not None:
            self._node.ledger.give_back(lease)
        self.look()
        self._node.wake()
        return True

    def close_down(self) -> None:
        """The node ends, and all of them with it."""
        tenants, self._tenants = self._tenants, {}
        for tenant in tenants.values():
            name = tenant.record.spec.name
            error = NodeClosedError(f"the node was shut down before {name} had ended.")
            tenant.receiver.fail(error)

    def why(self, task: TaskId, holdings: Holdings) -> Why | None:
        """Say what a lease waits for, or that it is held; None if it is none."""
        tenant = self._tenants.get(task)
        if tenant is None:
            return None
        record = tenant.record
        waits, waiting = record.worker is None, self.waiting
        return Why(
            name=record.spec.name,
            task=task,
            state=record.state.value,
            seconds=holdings.now - record.since,
            request=record.spec.shape.request.as_numbers(),
            where=str(record.spec.shape.request.where or ""),
            position=waiting.index(record) + 1 if waits else None,
            of=len(waiting) if waits else 0,
            reasons=tuple(find_shortages(self._node, record, holdings))
            if waits
            else (),
            pid=0 if waits else tenant.receiver.pid,
            is_lease=True,
        )


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
    actors: HostedActors = field(init=False)
    is_closing: bool = False
    beside: Beside = field(init=False)
    leases: InlineLeases = field(init=False)
    reservation: None = None
    _last_task: int = 0
    # Left on functions that were found feasible.
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

    def new_record(self, func: FunctionSpec) -> TaskRecord:
        """A record for one more task, with the next number."""
        self._last_task += 1
        spec, now = func.spec, self.clock()
        return TaskRecord(TaskId(self._last_task), spec, now)

    def grace_of(self, job: Job) -> float:
        """Seconds after which this job, if cancelled, is left behind."""
        spec = job.record.spec
        if spec.cancel_grace is None or spec.is_endless:
            return self.cancel_grace
        return spec.cancel_grace

    def surroundings(self, job: Job, lease: Lease, worker: WorkerId) -> Surroundings:
        """Return what a job that has begun finds around it."""
        func = job.call.func
        bind = self.assignment.bind(lease, func.environ)
        return Surroundings(
            bind.environ,
            {
                "actor": job.actor_id,
                "node": f"inline-{os.getpid()}",
                "worker": worker,
                "task": job.id,
                "name": job.name,
                "resources": func.resources,
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
        check_arguments(call.func, call.payload)
        if call.func.spec.is_grouped:
            return self.leases.placements.refusal(call.func.spec)
        if call.func.checked_by is not self._mark:
            try:
                check_func(call.func, self.ledger)
            except AiogpuError as error:
                if parent is None:
                    raise
                return error
            call.func.checked_by = self._mark
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
        terms, ledger = job.call.func.actor, self.ledger
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

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Let a task wait for its turn; see `Engine.submit`."""
        node = self.node
        call, parent = Call(func, payload, receiver), self._turns.parent()
        maker = None if parent is not None else acting_job.get()
        refusal = node.refusal(call, parent or maker)
        record = node.new_record(func)
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
