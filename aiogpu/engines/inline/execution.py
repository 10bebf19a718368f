"""Runs the code of jobs: on event loops, and inside plain code that waits.

`LoopRunner` begins a job in a callback of its loop, never inside the call that adds or
cancels a job. `InlineExecutor` drives the call of the user's code,
`worker.invoke.invoke`. `TaskHost` is the node as this code sees it.

Plain code that waits runs its own event loop, inside a callback of the outer loop. Its
children run on this inner loop, and pause if the plain code goes on before they end.
Each loop has a `LoopRunner`; only the innermost is active.

Values and functions are pickled and unpickled, as on the way to a worker. So a
function's closure is copied, and its globals too if it is defined in `__main__`. A
function of an imported module is not copied.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from functools import partial
from types import CoroutineType, TracebackType, coroutine
from typing import Any, Final

from aiogpu.client.current import ActorExit, current, has_exited
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.core.model.ids import TaskId
from aiogpu.core.records import TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.engines.inline.environment import CtrlC, silence
from aiogpu.engines.inline.jobs import Job, JobLoop, Outcome, actor_job, running_job
from aiogpu.engines.inline.node import InlineNode
from aiogpu.errors import MisuseError, NodeError
from aiogpu.runtime.actors.actor import FIRST_CALL
from aiogpu.runtime.objects.values import unfinished_in
from aiogpu.serialization.exceptions import LEFT, RAISED, pack_failure
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import load_arguments
from aiogpu.wire.messages import ASYNC, Done
from aiogpu.worker.async_actor import cancel_all
from aiogpu.worker.gpu import has_run_out, peak_memory
from aiogpu.worker.invoke import OWN_FRAMES as INVOKED
from aiogpu.worker.invoke import (
    Arguments,
    Invoker,
    Raised,
    RetryRules,
    StreamSender,
    invoke,
    is_coroutine,
    send_all_async,
)
from aiogpu.worker.private_hooks import set_running_loop


class TaskHost:
    """The node, as the code of one attempt at a task sees it; see `InlineClient`.

    Attributes:
        upsets: number of children that have failed or were withdrawn.
    """

    def __init__(
        self,
        job: Job,
        runner: LoopRunner,
    ) -> None:
        self._job = job
        self._node = runner.node
        self._executor = runner.executor
        self._thread = threading.get_ident()
        self._own: LoopRunner | None = None
        self._runners = {runner.loop: runner}
        self._awaited: list[Job] = []
        self._awaited_calls: list[int] = []
        self.upsets = 0

    def __repr__(self) -> str:
        return f"<TaskHost of {self._job!r}>"

    @property
    def waits(self) -> InlineNode:
        """The waits on an event loop."""
        return self._node

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; return its number.

        Raises:
            MisuseError: the task has ended.
            NodeError: the caller is in another thread than the task.
            SerializationError: the arguments are too large to send.
        """
        self._check(f"{func.spec.name}.remote()")
        loop = asyncio._get_running_loop()
        if loop is None:
            self._own_runner()
        else:
            self._runner_of(loop)  # wakes that loop as well
        return self._node.submit(func, payload, receiver)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; return the number of the call.

        Raises:
            MisuseError: the task has ended.
            NodeError: the caller is in another thread than the task, or the method runs
                on the program's loop, which the caller blocks.
        """
        actors = self._node.actors
        called = actors.known(actor)
        self._check(f"{called.name}.{method}.remote()")
        if called.func.actor is not None and called.func.actor.mode == ASYNC:
            raise NodeError(
                f"{called.name}.{method}.remote() was called by {self._job.name}, "
                f"whose plain code blocks the thread. On an inline node a class with "
                f"`async def` methods runs on the program's event loop, in the same "
                f"thread: make the caller an `async def`, or open a node with "
                f"address='local'."
            )
        number = called.call(method, payload, receiver)
        self.serve_loop()
        return number

    def serve_loop(self) -> None:
        """Let a user's loop that runs in this thread begin jobs."""
        loop = asyncio._get_running_loop()
        if loop is not None:
            self._runner_of(loop).wake()

    remote_values = None

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop of the program that opened the node."""
        return self._node.actors.runner.loop

    def demand(self, child: int, limit: int) -> None:
        """Set the number of items that a child's stream may yield in all."""
        self._node.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Cancel a child whose result is not needed."""
        self.upsets += 1
        self._node.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """Cancel a child from a finalizer, which may run at any point."""
        with suppress(RuntimeError):  # the loop is closed, and the child has ended
            loop = (self._own or self._job.runner).loop
            loop.call_soon_threadsafe(self._node.cancel, child)

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """Note the children for which the task's code waits, or none.

        Raises:
            NodeError: the caller is in another thread than the task.
        """
        if children:
            self._check("aiogpu.get()")
        self.end_wait(waiter)
        jobs = [self._node.jobs.get(TaskId(child)) for child in children]
        self._awaited = [job for job in jobs if job is not None]
        self._awaited_calls = [child for child in children if child >= FIRST_CALL]
        for call in self._awaited_calls:
            self._node.begin_wait(call)
        for job in self._awaited:
            job.waiters = 1
            self._run_next(job)
        if self._awaited:
            self._node.tell_waits(self._job)

    def _run_next(self, job: Job) -> None:
        """Let a job run now, after the jobs that produce its arguments.

        These jobs may have been started by any code. Chains of arguments may be ten
        thousand long, so the depth-first search has an explicit stack.
        """
        jobs, seen = self._node.jobs, set[TaskId]()
        stack: list[tuple[Job, bool]] = [(job, False)]
        while stack:
            current_job, has_its_needs = stack.pop()
            if has_its_needs:
                if current_job.parent is not self._job:
                    self._job.needed.append(current_job)
            elif current_job.worker is None and current_job.id not in seen:
                seen.add(current_job.id)
                stack.append((current_job, True))
                needs = map(jobs.get, self._node.needed_by(current_job.id))
                stack += [(needed, False) for needed in needs if needed is not None]

    def end_wait(self, waiter: object) -> None:
        """Note that the task's plain code no longer waits."""
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
        """Run children until `is_done()`; False if the deadline passes first."""
        stack = self._node.stack
        self._end_strays()
        stack.resume_above(self._job)
        try:
            return self._own_runner().run_until(is_done, deadline)
        finally:
            stack.pause_above(self._job)

    def close(self) -> None:
        """Stop the children of plain code whose function has returned."""
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
        """Stop jobs that are left from a user's loop that has stopped."""
        while (last := self._node.stack.running[-1]) is not self._job:
            self._node.end_orphans(last)
            last.runner.run_until_ended(last)

    def _end_streams(self) -> None:
        """Stop the generators on the loop of plain code, which is about to close."""
        for stream in list(self._node.streams.jobs.values()):
            if self._own is not None and stream.runner is self._own:
                self._node.end_orphans(stream)
                self._own.run_until_ended(stream)

    def _own_runner(self) -> LoopRunner:
        """Return the runner for plain code that waits."""
        if self._own is None:
            self._own = self._runner_of(asyncio.new_event_loop())
        return self._own

    def _runner_of(self, loop: asyncio.AbstractEventLoop) -> LoopRunner:
        runner = self._runners.get(loop)
        if runner is None:
            runner = self._runners[loop] = LoopRunner(loop, self._node, self._executor)
        return runner

    def _check(self, what: str) -> None:
        if self._job.has_ended:
            raise MisuseError(
                f"{what} was called after {self._job.name} had ended, by code that it "
                f"left running."
            )
        if self._thread != threading.get_ident():
            raise NodeError(
                f"{what} was called in a thread that {self._job.name} has started. On "
                f"an inline node a task starts other tasks in its own thread only."
            )


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        # Abandoned tasks were reported; asyncio must not report them again.
        loop.set_exception_handler(lambda loop, context: None)
        loop.close()


OWN_FRAMES: Final = "/aiogpu/engines/inline/"
"""Path of this package's own frames, which are removed from users' tracebacks."""


_NO_ITEM: Final = object()


class PlainItems:
    """A plain generator, whose code runs outside any event loop, as in a worker."""

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
        """Close the generator, and stop its children."""
        with self._in_turn():
            try:
                close: Callable[[], None] | None = getattr(self._items, "close", None)
                if close is not None:
                    close()
            finally:
                self._host.close()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Context manager: the block runs the generator's code, on top of the stack."""
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
    """Tracks the asyncio tasks that jobs start on a loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, executor: InlineExecutor
    ) -> None:
        self._loop = loop
        self._executor = executor
        self._coroutines = 0
        self._factory: Any = self._make
        self._program_factory: Any = None

    def begin(self) -> None:
        """Count a started coroutine; the first installs the task factory."""
        self._coroutines += 1
        if self._coroutines == 1:
            self._program_factory = self._loop.get_task_factory()
            self._loop.set_task_factory(self._factory)

    def end(self) -> None:
        """Count an ended coroutine; the last restores the task factory."""
        self._coroutines -= 1
        if not self._coroutines and self._loop.get_task_factory() is self._factory:
            self._loop.set_task_factory(self._program_factory)

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: AnyCoroutine, **options: Any
    ) -> asyncio.Future[Any]:
        job, started = running_job.get(), None
        if job is not None and job.has_ended:
            job = None
        if job is None:
            job = actor_job.get()
            if job is not None and type(coroutine) is CoroutineType:
                started, coroutine = (
                    coroutine,
                    self._executor.drive_task(job, coroutine),
                )
        make = self._program_factory
        task: asyncio.Task[Any]
        if make is not None:
            task = make(loop, coroutine, **options)
        else:
            task = asyncio.Task(coroutine, loop=loop, **options)
        if job is not None:
            job.started.add(task)
            task.add_done_callback(job.started.discard)
        if started is not None:
            # The task may be cancelled before its first step.
            task.add_done_callback(partial(_close, started))
        return task


def _close(started: Coroutine[Any, Any, Any], _task: asyncio.Task[Any]) -> None:
    started.close()


async def end_started(job: Job) -> None:
    """Cancel the asyncio tasks that a job has left, and wait for their end."""
    if job.started:
        await cancel_all(job.started)


class JobInvoker(Invoker):
    """The parts of `invoke` that differ for an inline job.

    Plain code runs outside any event loop, as in a worker. At the first `await` the
    call suspends once, and continues in an asyncio task.

    Args:
        job: the job.
        host: the host of its plain code; None if the call begins on an event loop.
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
        """Await a coroutine on the job's loop, and return its result."""
        await self._move_to_loop()
        return await coroutine

    async def send_items(self, items: Any, stream: StreamSender) -> None:
        """Run a generator to its end, on the job's loop."""
        job, host = self._job, self._host
        job.node.streams.senders[job.id] = stream
        # Its children run on top of the running code, like the children of actors.
        actor_job.set(job)
        try:
            await self._move_to_loop()
            if host is not None and not hasattr(items, "__anext__"):
                items = PlainItems(items, job, host)
            await send_all_async(items, stream, job.runner.loop.create_future)
        finally:
            job.node.streams.senders.pop(job.id, None)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; children whose handles it holds outlive the job."""
        payload = self._job.node.pack(outgoing)
        # Now, before the remaining children are stopped with this job.
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
    """Drives the calls of the user's code, and classifies failures.

    Attributes:
        ctrl_c: knows whether Ctrl-C has ended the last block of user code.
    """

    def __init__(self, is_silent: bool) -> None:
        self._is_silent = is_silent
        self.ctrl_c = CtrlC()
        self._retry_rules = RetryRules()

    def begin(self, job: Job, host: TaskHost) -> BegunCall | None:
        """Call the function outside any event loop, as in a worker.

        Returns:
            The call if it continues in an asyncio task, by `finish`; None if the job
            has its outcome.
        """
        loop = asyncio._get_running_loop()
        set_running_loop(None)
        try:
            try:
                call = self.call(job, host)
                with self._step(job):
                    call.send(None)
                return call
            except StopIteration as ended:
                job.outcome = self._outcome(job, ended.value)
                return None
            finally:
                host.close()
        finally:
            set_running_loop(loop)

    async def finish(self, job: Job, call: BegunCall) -> None:
        """Drive a call to its end, and cancel the asyncio tasks that it has left.

        The outcome is set on the job and is not the asyncio task's result: a loop that
        ends keeps its tasks for a while, and an error keeps the frames that it has
        passed.
        """
        try:
            job.outcome = self._outcome(job, await self.drive(job, call))
        finally:
            await end_started(job)

    def call(self, job: Job, host: TaskHost | None) -> BegunCall:
        """Make the call of a job; without a host it begins on an event loop."""
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
        is_ctrl_c = self.ctrl_c.is_real(error)
        if (current.exits and has_exited()) or type(error) is ActorExit:
            kind = LEFT
        # A debugger shows only the user's frames.
        BaseException.with_traceback(error, _users_frames(error))
        failed = pack_failure(job.id, kind, error, INVOKED, job.node.pack)
        has_devices = kind != LEFT and job.has_devices
        if has_devices and not is_ctrl_c and has_run_out(error):
            failed = failed._replace(peak=peak_memory())
        if job.func.retried and kind == RAISED and not is_ctrl_c:
            failed = self._retry_rules.mark(failed, job.name, job.func.retried, error)
        return Outcome(failed, error, is_ctrl_c)

    @coroutine
    def drive(
        self, job: Job, started: Coroutine[Any, Any, Any]
    ) -> Generator[Any, Any, Any]:
        """Drive a coroutine, with `_step` around each of its steps."""
        # A list, so that no local variable of this frame keeps a thrown error: the
        # error's traceback holds this frame, which would be a cycle.
        next_step: list[Callable[[], Any]] = [partial(started.send, None)]
        while True:
            with self._step(job):
                try:
                    awaited = next_step.pop()()
                except StopIteration as ended:
                    return ended.value
            try:
                next_step.append(partial(started.send, (yield awaited)))
            except GeneratorExit:
                # The coroutine was abandoned and its loop is closed: it cannot await.
                job.started.clear()
                started.close()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown into the coroutine
                next_step.append(partial(started.throw, error))

    @contextmanager
    def _step(self, job: Job) -> Iterator[None]:
        """Context manager: the block runs user code up to its next suspension."""
        with ExitStack() as stack:
            if job.is_interleaved and job.environment is not None:
                stack.enter_context(job.environment.applied())
            if self._is_silent:
                stack.enter_context(silence())
            stack.enter_context(self.ctrl_c.watched())
            yield

    async def drive_task(self, job: Job, started: Coroutine[Any, Any, Any]) -> Any:
        """Await a coroutine that an actor's code has started, in its environment."""
        return await self.drive(job, started)


def _users_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of user code."""
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if OWN_FRAMES not in path and INVOKED not in path:
            break
        trace = trace.tb_next
    return trace


class LoopRunner(JobLoop):
    """Begins the jobs of a node on one loop.

    Attributes:
        executor: runs the jobs' code.
        task_tracker: tracks asyncio tasks that jobs start on the loop.
    """

    node: InlineNode

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node: InlineNode,
        executor: InlineExecutor,
    ) -> None:
        super().__init__(loop, node)
        self.task_tracker = TaskTracker(loop, executor)
        self.executor = executor

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
        if node.lost:
            self.wake()  # a worker whose task was cancelled before the start
        if call is not None:
            self.wake()  # there may be more calls, or a job
            self._begin_call(call)
        elif job is not None:
            if node.starting or node.assigned:
                self.wake()
            self._begin(job)
        elif (unstartable := node.unstartable(self)) is not None:
            unstartable.fail_wait(node.why_unstartable(unstartable))
            self.note_item()

    def _begin_call(self, call: Job) -> None:
        """Run a call of an actor at once, on top of the running code."""
        call.runner = self
        self.node.stack.running.append(call)
        self._attempt(call)

    def _begin(self, job: Job) -> None:
        record = job.record
        if record is None or record.worker is None:
            return  # it was abandoned before it began
        if record.state is TaskState.STOPPING:
            worker = record.worker.id
            self.node.feed(Scheduler.finish, job.id, worker)
            self.node.lose(worker)
            return
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
                # Ctrl-C has hit this package's own code; the program ends.
                self._end(job)
            raise

    def _run(self, job: Job) -> None:
        host = TaskHost(job, self)
        context = job.fresh_context(host)
        call = context.run(self.executor.begin, job, host)
        if call is None:
            self._finish(job)
            return
        if job.id in self.node.streams.senders:
            self.node.streams.enter(job)
            self.node.wake()  # the next job may begin
        self._go_on(job, call, context)
        record = job.record
        if record is not None and record.state is TaskState.STOPPING:
            job.interrupt()  # it was cancelled during its plain part

    def interleave(self, job: Job, context: Context) -> None:
        """Run a call on this loop, interleaved with other code."""
        job.runner = self
        self._go_on(job, self.executor.call(job, None), context)

    def _go_on(self, job: Job, call: BegunCall, context: Context) -> None:
        self.task_tracker.begin()
        # Not by the loop's factory, which would count the task as the caller's.
        job.main = asyncio.Task(
            self.executor.finish(job, call),
            loop=self.loop,
            name=job.name,
            context=context,
        )
        ended = partial(self._on_ended, job, call)
        job.main.add_done_callback(ended, context=self._context)

    def _on_ended(self, job: Job, call: BegunCall, main: asyncio.Task[None]) -> None:
        self.task_tracker.end()
        if job.main is not main:
            return  # it was abandoned, and may be retried
        job.main, job.is_cancelled = None, main.cancelling() > 0
        if main.cancelled():
            call.close()  # its task has not begun
            self._end(job)
        else:
            main.result()  # None; raises if this package's own code has failed
            self._finish(job)

    def _finish(self, job: Job) -> None:
        outcome = job.outcome
        assert outcome is not None, job
        if not job.goes_on(outcome):
            self._end(job)
        else:
            self._leave_stack(job)
        if outcome.is_ctrl_c and outcome.error is not None:
            raise outcome.error
