"""Calls in the program's own thread: tasks, constructors and methods of actors.

A `Call` runs one function by `worker.invoke`, as a worker does. Plain code runs outside
any event loop, in a callback of the program's loop; coroutines are asyncio tasks. Plain
code that waits runs its children, on top of itself (`TaskClient.wait_until`). A
`Runner` is the queue of an event loop, or of the plain code of one call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar
from enum import Enum
from functools import partial
from itertools import count
from math import inf
from types import CoroutineType, TracebackType, coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from aiogpu.client.current import (
    ActorExit,
    current,
    has_exited,
    inline_client,
    method_called,
    no_call_to_report,
)
from aiogpu.core.model.text import span
from aiogpu.core.resources.placement_group import take_grouped
from aiogpu.core.scheduler.placement_groups import UNKNOWN
from aiogpu.engines.base import NodeOptions, check_arguments, check_func
from aiogpu.errors import (
    AiogpuError,
    DeadlockError,
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeError,
    TaskCancelledError,
)
from aiogpu.serialization.exceptions import LEFT, RAISED, pack_failure, unpack_failure
from aiogpu.serialization.payload import Payload
from aiogpu.worker.invoke import (
    OWN_FRAMES,
    Callables,
    Functions,
    Invoker,
    Raised,
    RetryRules,
    StreamSender,
    invoke,
    send_all_async,
)
from aiogpu.worker.private_hooks import leave_pending, set_running_loop

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Outcome, Receiver
    from aiogpu.core.model.request import Shape
    from aiogpu.core.resources.ledger import Ledger
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.objects.store import Store
    from aiogpu.runtime.objects.values import Value
    from aiogpu.serialization.references import PickledValue
    from aiogpu.wire.messages import Bind, Done, Failed, Items

_log: Final = logging.getLogger(__name__)

running_call: Final[ContextVar[Call | None]] = ContextVar("running_call", default=None)
"""The call of the running code; inherited by the asyncio tasks that it starts."""

_OUR_FRAMES: Final = (OWN_FRAMES, os.path.dirname(__file__))
"""Parts of the paths of frames that are cut from tracebacks."""


# The state of the process while a call's code runs.


@contextmanager
def outside_loop() -> Generator[None]:
    """Context manager: no event loop runs for the block, as in a worker."""
    loop = asyncio._get_running_loop()
    set_running_loop(None)
    try:
        yield
    finally:
        set_running_loop(loop)


class Place:
    """The variables and facts that code sees; a context manager for each of its steps.

    Args:
        environ: variables of the environment.
        facts: values of attributes of `client.current.current`.
    """

    __slots__ = ("_before", "_environ", "_facts")

    def __init__(self, environ: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        self._environ = environ
        self._facts = facts
        self._before: list[tuple[dict[str, str | None], dict[str, Any]]] = []

    def __enter__(self) -> None:
        self._before.append(_swap(self._environ, self._facts))

    def __exit__(self, *_: object) -> None:
        _swap(*self._before.pop())


NOT_SET: Final = Place({}, {})
"""The place of a call that has not begun."""


def _swap(
    environ: Mapping[str, str | None], facts: Mapping[str, Any]
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Set variables and facts; return the former values."""
    environ_before = {name: os.environ.get(name) for name in environ}
    facts_before = {name: getattr(current, name) for name in facts}
    for name, value in environ.items():
        if environ_before[name] == value:
            continue
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    for name, fact in facts.items():
        setattr(current, name, fact)
    return environ_before, facts_before


async def driven(place: Place, code: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, each of its steps in a place.

    Not the generator itself: from Python 3.12, asyncio makes no task of one.
    """
    return await _steps(place, code)


@coroutine
def _steps(place: Place, code: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    # A list, so that no variable of this frame keeps a thrown error, whose traceback
    # holds this frame.
    following: list[Callable[[], Any]] = [partial(code.send, None)]
    while True:
        with place:
            try:
                awaited = following.pop()()
            except StopIteration as ended:
                return ended.value
        try:
            following.append(partial(code.send, (yield awaited)))
        except GeneratorExit:
            code.close()  # it was abandoned, and cannot await
            raise
        except BaseException as error:  # noqa: BLE001 - thrown into the coroutine
            following.append(partial(code.throw, error))


def create_task(
    former: Any, loop: asyncio.AbstractEventLoop, code: Any, **options: Any
) -> asyncio.Task[Any]:
    """Make an asyncio task, as a loop's task factory; tasks of a call see its place.

    Named as in asyncio, since `Handle.__repr__` looks for that name.

    Args:
        former: the loop's own task factory, or None.
        loop: the loop.
        code: the coroutine.
        **options: see `asyncio.Task`.
    """
    call = running_call.get()
    if call is not None and type(code) is CoroutineType:
        code = driven(call.place, code)
    task: asyncio.Task[Any] = (former or asyncio.Task)(code, loop=loop, **options)
    if call is not None:
        call.started.add(task)
        task.add_done_callback(call.started.discard)
    return task


# Queues


class Step(Protocol):
    """An entry of a queue: a call, or an actor with calls."""

    def step(self, runner: Runner, /) -> None:
        """Run as far as possible now."""


class Runner:
    """What is ready to run, first come, first served.

    The runner of an event loop takes one entry in each turn. The runner of a call's
    plain code has a loop only for coroutines; `TaskClient.wait_until` runs both.

    Attributes:
        loop: the event loop; None before plain code needs one.
        ready: what runs next.
        tasks: the asyncio tasks of calls that run on the loop, each with its call.
    """

    def __init__(
        self, node: InlineNode, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.loop = loop
        self.ready: deque[Step] = deque()
        self.tasks: dict[asyncio.Task[Any], Call] = {}
        self._node = node
        self._is_of_plain_code = loop is None
        self._is_scheduled = False
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """True if tasks may go on, and do not all wait for consumers of streams."""
        return any(not call.is_held for call in self.tasks.values())

    def add(self, step: Step) -> None:
        """Queue an entry; with the program if this runner's loop has ended."""
        if self._is_closed or (self.loop is not None and self.loop.is_closed()):
            self._node.program.add(step)
            return
        self.ready.append(step)
        self._wake()

    def _wake(self) -> None:
        if self.loop is not None and not self._is_scheduled:
            self._is_scheduled = True
            # Not in the caller's context, which would keep the caller's call.
            self.loop.call_soon(self._take_turn, context=Context())

    def _take_turn(self) -> None:
        self._is_scheduled = False
        step = self.ready.popleft() if self.ready else None
        if self.ready:
            self._wake()
        if step is not None:
            step.step(self)

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop for coroutines; make it at first use."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            self.loop.set_task_factory(partial(create_task, None))
            self._node.runners[self.loop] = self
        return self.loop

    def note(self) -> None:
        """Let plain code that waits look at what has changed."""
        if self._is_of_plain_code and self.loop is not None:
            self.loop.stop()

    def run_tasks(self, until: float | None) -> None:
        """Run the loop of plain code until something changes or time is up."""
        loop = self.event_loop()
        timer = None
        if until is not None:
            timer = loop.call_later(max(until - time.monotonic(), 0.0), loop.stop)
        try:
            loop.run_forever()
        finally:
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Give what is ready to the program, and close the loop of plain code."""
        self._is_closed = True
        while self.ready:
            self._node.program.add(self.ready.popleft())
        if self.loop is not None:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


# Calls


class State(Enum):
    """The state of a call."""

    WAITING = "waiting"
    """For its turn, or for its arguments."""
    RUNNING = "running"
    ENDED = "ended"


class Call:
    """One call of a function; a task is of this class itself.

    Attributes:
        node: the node.
        id: the number of the task or call.
        func: the function or class.
        payload: the arguments.
        receiver: gets the outcome; None if nobody wants it.
        parent: the call that made this one; None for the program.
        children: the unfinished tasks that its code has made, by number.
        started: asyncio tasks that its code has started.
        name: the name in errors.
        called: for a method, its name on the wire and the number of the call.
        is_coroutine: all of its code runs on an event loop.
        run_timeout: seconds that its code may run.
        actor_id: the number of its actor; None for a task.
        place: what its code sees; a task gets it when it begins.
        is_kept: it outlives its parent: it is detached, or its handle was returned.
        is_ready: its arguments are complete.
        state: see `State`.
        runner: runs it.
        limit: for a stream, the number of items that it may yield in all; else 0.
        passed: the number of items that its consumer has received.
    """

    def __init__(
        self,
        node: InlineNode,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver | None,
        parent: Call | None = None,
        number: int = 0,
    ) -> None:
        self.node = node
        self.id = number or node.new_id()
        self.func = func
        self.payload = payload
        self.receiver = receiver
        self.parent = parent
        self.children: dict[int, Call] = {}
        self.started: set[asyncio.Task[Any]] = set()
        self.name = func.spec.name
        self.called = ("", 0)
        self.is_coroutine = func.is_coroutine
        self.run_timeout = func.spec.run_timeout
        self.actor_id: int | None = None
        self.place = NOT_SET
        self.is_kept = func.spec.is_detached
        self.is_ready = False
        self.state = State.WAITING
        self.runner: Runner = node.program
        self.limit = func.window
        self.passed = 0
        self._stream: StreamSender | None = None
        self._retries = func.spec.max_retries
        self._client = TaskClient(self)
        self._code: Coroutine[Any, Any, Any]
        self._context = Context()
        self._task: asyncio.Task[Any] | None = None
        self._submitted = time.monotonic()
        self._begun = inf
        self._deadline = inf
        self._late_error: Callable[[str], Exception]
        self._timer: asyncio.TimerHandle | None = None
        node.calls[self.id] = self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name} {self.state.value}>"

    @property
    def is_held(self) -> bool:
        """True if its stream waits for the consumer."""
        return self._stream is not None and self._stream.is_held

    def target(self) -> tuple[Callables, Any]:
        """Return a table of callables, and the name of the one to call."""
        return self.node.functions, self.node.learn(self.func)

    def move_to(self, runner: Runner) -> bool:
        """Let a runner run the call, since its code waits; False if that is too late.

        Then the call goes on only when the waiting code has returned.
        """
        if self.state is State.WAITING and self.runner is not runner and self.is_ready:
            runner.add(self)
            return True
        return self.runner is runner or self.state is State.ENDED

    # From its submission to its code's end.

    def enqueue(self, runner: Runner) -> None:
        """Queue the call, now or when its arguments are complete."""
        self.runner = runner
        spec = self.func.spec
        if spec.timeout is not None:
            from aiogpu.runtime.pending_tasks import too_late

            self._limit(self._submitted + spec.timeout, partial(too_late, spec))
        if type(self.payload) is Payload and self.payload.needs:
            from aiogpu.runtime.objects.values import await_arguments

            await_arguments(self.payload, self._on_arguments)
        else:
            self._on_arguments(None)

    def _on_arguments(self, failed: Value | None) -> None:
        self.is_ready = True
        if failed is not None:
            self.stop(failed.outcome)
        elif self.state is State.WAITING:
            self.runner.add(self)

    def step(self, runner: Runner) -> None:
        """Begin the call, unless another runner did."""
        if self.state is not State.WAITING:
            return
        self.runner = runner
        if time.monotonic() < self._deadline:
            self.begin()
        else:
            self._expire()

    def begin(self) -> None:
        """Run the code, up to its first suspension."""
        try:
            if self.place is NOT_SET:
                self.place = self.node.place(self)
        except AiogpuError as error:  # its placement group was removed
            self.stop(error)
            return
        self.state, self._begun = State.RUNNING, time.monotonic()
        functions, name = self.target()
        payload = self.payload
        if type(payload) is Payload and payload.needs:
            from aiogpu.runtime.objects.store import filled

            payload = filled(payload)
        if self.limit:
            self._stream = StreamSender(
                self.on_items, self.id, self.limit, self.passed, self.pack
            )
        if self.run_timeout is not None:
            from aiogpu.runtime.pending_tasks import overrun

            lateness = partial(overrun, self.name, self.run_timeout)
            if self.actor_id is not None and self.is_coroutine:
                stopping = "It is cancelled at its next await"
                lateness = partial(lateness, what_next=stopping)
            self._limit(self._begun + self.run_timeout, lateness)
        self._code = self._run(functions, name, payload)
        self._context.run(running_call.set, self)
        self._context.run(inline_client.set, self._client)
        self._context.run(method_called.set, self.called)
        if self.is_coroutine:
            self._go_on_loop()
        else:
            self._run_plain_code()

    async def _run(self, functions: Callables, name: Any, payload: bytes) -> Any:
        invoker, stream = CallInvoker(self), self._stream
        outcome = await invoke(invoker, self.id, functions, name, payload, stream)
        if type(outcome) is Raised:
            # Here, since `has_exited` knows the code by its thread or asyncio task.
            has_left = bool(current.exits) and has_exited()
            if has_left or type(outcome.error) is ActorExit:
                outcome.kind = LEFT
        self.end_started()
        try:
            return outcome
        finally:
            # From Python 3.12 the frame of a failed coroutine keeps the frames of its
            # callers. A name here would hold the error, which holds that frame.
            del outcome

    def _run_plain_code(self) -> None:
        """Run to the end, or to the first suspension; then go on on a loop."""
        outcome = None
        with outside_loop():
            try:
                with self.place:
                    self._context.run(self._code.send, None)
            except StopIteration as ended:
                outcome = ended.value
        if outcome is None:
            self._go_on_loop()
        else:
            self._finish(outcome)
        del outcome  # as in `_run`, which this frame has called

    def _go_on_loop(self) -> None:
        loop = self.runner.event_loop()
        code = driven(self.place, self._code)
        self._task = asyncio.Task(
            code, loop=loop, name=self.name, context=self._context
        )
        self.runner.tasks[self._task] = self
        self._task.add_done_callback(self._on_task_done, context=Context())
        self._start_timer()  # on this loop

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        del self.runner.tasks[task]
        self._task = None
        outcome: Any = Raised(RAISED, asyncio.CancelledError())
        if task.cancelled():
            self._code.close()  # it has not begun
        else:
            outcome = task.result()
        error = outcome.error if type(outcome) is Raised else None
        if task.cancelling() and type(error) is asyncio.CancelledError:
            # The loop is ending, or other code of the program has cancelled the task.
            self.deliver(NodeClosedError(f"the event loop of {self.name} has ended."))
        self._finish(outcome)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; children whose handles it holds outlive the call."""
        for reference in outgoing.references:
            child = self.node.calls.get(getattr(reference, "task", 0))
            if child is not None:
                child.is_kept = True
        return self.node.pack(outgoing)

    def demand(self, limit: int) -> None:
        """Set the number of items that its generator may yield in all."""
        self.limit = limit
        if self._stream is not None:
            self._stream.raise_limit(limit)

    def on_items(self, items: Items) -> None:
        """Pass items on to the consumer."""
        self.passed += 1
        if self.receiver is not None:
            self.receiver.receive_items(items.payloads)  # type: ignore[attr-defined]
        self.runner.note()

    def report(self, payload: bytes) -> None:
        """Deliver a report of the code; see `client.interface.Client`."""
        if self.state is State.ENDED:
            raise no_call_to_report()
        if get_ident() == self.node.thread:
            self._on_report(payload)
        else:
            self.node.soon(partial(self._on_report, payload))

    def _on_report(self, payload: bytes) -> None:
        receive = getattr(self.receiver, "receive_report", None)  # `map` has none
        if receive is not None:
            receive(0, payload)
        self.runner.note()

    # Its end.

    def end_started(self) -> None:
        """Stop the children and asyncio tasks that do not outlive this call."""
        end_started(self.children, self.started)

    def deliver(self, outcome: Outcome) -> None:
        """Settle the receiver, once."""
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        try:
            receiver.settle(outcome)
        except Exception as fault:  # noqa: BLE001 - passed to the receiver
            from aiogpu.runtime.pending_tasks import settle_with_fault

            settle_with_fault(receiver, fault)

    def _finish(self, outcome: Any) -> None:
        if not self.is_coroutine:
            self._client.close()
        if self.receiver is not None and time.monotonic() >= self._deadline:
            self._expire()  # plain code cannot be stopped
        if type(outcome) is not Raised:
            self.end()
            self.on_done(outcome)
            return
        failed, error = self._describe(outcome)
        if failed.is_retried and self._retries and self.receiver is not None:
            self._retries -= self._retries > 0
            self.state, self._context = State.WAITING, Context()
            self._deadline = inf  # `run_timeout` is for one attempt
            self._start_timer()
            self.enqueue(self.runner)
            return
        self.end()
        self.on_failed(failed, error)

    def _describe(self, outcome: Raised) -> tuple[Failed, Exception]:
        """Return the failure as a worker would send it, and the caller's exception."""
        kind, error = outcome.kind, outcome.error
        trace = _users_frames(error)
        BaseException.with_traceback(error, trace)
        failed = pack_failure(self.id, kind, error, OWN_FRAMES, self.node.pack)
        if self.func.retried and kind == RAISED:
            rules = self.node.retry_rules
            failed = rules.mark(failed, self.name, self.func.retried, error)
        raised = unpack_failure(failed, self.name)
        BaseException.with_traceback(raised, trace)  # a debugger finds the task's
        return failed, raised

    def end(self) -> None:
        """Note that the code has stopped, or never begins."""
        self.state = State.ENDED
        self.payload = b""  # it may hold actors and shared memory
        self.node.calls.pop(self.id, None)
        if self.parent is not None:
            self.parent.children.pop(self.id, None)
        if self._timer is not None:
            self._timer.cancel()
        self.runner.note()

    def on_done(self, done: Done) -> None:
        """Handle the result."""
        self.deliver(done.payload)

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Handle an exception of the code; `error` is what the caller gets."""
        self.deliver(error)

    def _limit(self, when: float, error: Callable[[str], Exception]) -> None:
        """Fail the call at a time, unless it has an earlier limit."""
        if when < self._deadline:
            self._deadline, self._late_error = when, error
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._deadline < inf:
            loop = self.runner.loop or self.node.loop
            delay = max(self._deadline - time.monotonic(), 0.0)
            self._timer = loop.call_later(delay, self._expire, context=Context())

    def _expire(self) -> None:
        """Fail and stop the call, whose time is over."""
        now = time.monotonic()
        begun = min(self._begun, now)
        lapse = f"it ran {span(now - begun)}"
        if self.actor_id is None:
            waited, request = (
                span(begun - self._submitted),
                self.func.spec.shape.request,
            )
            lapse = f"it waited {waited} for {request} and ran {span(now - begun)}"
        self.stop(self._late_error(lapse))

    def stop(self, outcome: Outcome | None = None) -> None:
        """Stop the call as far as possible; its receiver gets only `outcome`.

        Plain code that runs cannot be stopped.
        """
        if outcome is not None:
            self.deliver(outcome)
        self.receiver = None
        if self.state is State.WAITING:
            self.end()
            return
        task = self._task
        # Once: another cancel would interrupt the cleanup.
        if task is not None and not (task.cancelling() or task.get_loop().is_closed()):
            task.cancel()

    def disown(self) -> None:
        """Stop the call, since its parent has ended."""
        self.stop(
            TaskCancelledError(
                f"{self.name} was stopped, since the task that had started it has "
                f"ended or is being stopped."
            )
        )


def end_started(children: dict[int, Call], started: set[asyncio.Task[Any]]) -> None:
    """Stop children and asyncio tasks of code that has ended; see `Call`."""
    for task in started:
        task.cancel()
    for child in list(children.values()):
        if not child.is_kept:
            child.disown()


def deadlock(name: str) -> DeadlockError:
    """Return the error of a wait for a call or an actor that could never end."""
    return DeadlockError(
        f"{name} cannot run while this code waits for it: an inline node has one "
        f"thread, which this code blocks. The wait could never end. Wait in an `async "
        f"def`; let a method call another one directly, by self; or use "
        f"address='local'."
    )


def _users_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of user code."""
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not any(ours in path for ours in _OUR_FRAMES):
            break
        trace = trace.tb_next
    return trace


@coroutine
def _suspend() -> Generator[None]:
    """Suspend plain code, which goes on as an asyncio task."""
    yield


def _outside_loop(items: Any) -> Generator[Any]:
    """Run each step of a plain generator outside of any loop, as in a worker."""
    iterator = iter(items)
    try:
        while True:
            with outside_loop():
                item = next(iterator, _END)
            if item is _END:
                return
            yield item
            del item
    finally:
        if hasattr(items, "close"):
            with outside_loop():
                items.close()


_END: Final = object()


class CallInvoker(Invoker):
    """The parts of `invoke` that differ for a call of an inline node."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_on_loop = call.is_coroutine

    async def _move_to_loop(self) -> None:
        if not self._is_on_loop:
            self._is_on_loop = True
            await _suspend()

    async def wait(self, coroutine: CoroutineType[Any, Any, Any], call: int) -> Any:
        """Await a coroutine on an event loop."""
        await self._move_to_loop()
        return await coroutine

    async def send_items(self, items: Any, stream: StreamSender) -> None:
        """Run a generator to its end, on an event loop, where it waits to go on."""
        await self._move_to_loop()
        if not (self._call.is_coroutine or hasattr(items, "__anext__")):
            items = _outside_loop(items)
        new_future = self._call.runner.event_loop().create_future
        await send_all_async(items, stream, new_future)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value."""
        return self._call.pack(outgoing)


class TaskClient:
    """The node as the code of one call sees it; see `client.interface.InlineClient`."""

    remote_values = None

    def __init__(self, call: Call) -> None:
        self._call = call
        self._node = call.node
        self._own: Runner | None = None
        self._awaited: tuple[int, ...] = ()

    @property
    def waits(self) -> InlineNode:
        """The observer of waits on event loops."""
        return self._node

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop of the program that opened the node."""
        return self._node.loop

    @property
    def runner(self) -> Runner:
        """The runner of what the running code starts."""
        loop = asyncio._get_running_loop()
        if loop is not None:
            return self._node.runner_of(loop)
        if self._own is None:
            self._own = Runner(self._node, None)
        return self._own

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child; return its number.

        Raises:
            MisuseError: the call has ended.
            NodeError: the caller is in another thread.
            SerializationError: the arguments are too large.
        """
        self._check(f"{func.spec.name}.remote()")
        return self._node.start(func, payload, receiver, self._call, self.runner)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; return the number of the call.

        Raises:
            MisuseError: the call has ended.
            NodeError: the caller is in another thread.
        """
        called = self._node.actors.known(actor)
        self._check(f"{called.name}.{method}.remote()")
        return int(called.call(method, payload, receiver))

    def report(self, payload: bytes) -> None:
        """Deliver a report of the call's code; may be called in any thread.

        Raises:
            MisuseError: the call has ended.
        """
        self._call.report(payload)

    def demand(self, number: int, limit: int, /) -> None:
        """Set the number of items that a stream may yield in all."""
        self._node.demand(number, limit)

    def withdraw(self, number: int, /) -> None:
        """Cancel a child whose result is not needed."""
        self._node.cancel(number)

    def withdraw_soon(self, child: int) -> None:
        """Cancel a child from a finalizer, which may run at any point."""
        self._node.soon(partial(self._node.cancel, child))

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """Note the calls for which the code is about to wait, or none.

        Raises:
            NodeError: the caller is in another thread.
        """
        if children:
            self._check("aiogpu.get()")
        self._awaited = children

    def end_wait(self, waiter: object) -> None:
        """Note that a wait is over."""
        self._awaited = ()

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Run calls until `is_done()`; False if the deadline passes first.

        The order: what this code has started, what it waits for, and only if both
        depend on others, what the program has started.

        Raises:
            DeadlockError: nothing is left to run, and there is no deadline.
        """
        runner, program = self.runner, self._node.program
        found = [self._node.find(number) for number in self._awaited]
        awaited = [each for each in found if each is not None]
        for each in awaited:
            each.move_to(runner)
        while not is_done():
            if runner.ready:
                runner.ready.popleft().step(runner)
            elif runner.is_busy:
                runner.run_tasks(deadline)
            elif program.ready:
                program.ready.popleft().step(program)
            elif deadline is not None:
                time.sleep(max(deadline - time.monotonic(), 0.0))
            else:
                raise deadlock(awaited[0].name if awaited else self._call.name)
            if deadline is not None and time.monotonic() >= deadline:
                return is_done()
        return True

    def close(self) -> None:
        """Let stopped children of plain code end, and close its loop."""
        own, self._own = self._own, None
        if own is not None:
            with outside_loop():
                self._end_tasks(own)
                own.close()
        living = self._node.program, self._call.runner
        for child in list(self._call.children.values()):
            if child.state is State.RUNNING and child.runner not in living:
                child.disown()  # it goes on no more: its loop has stopped
                child.end()

    def _end_tasks(self, own: Runner) -> None:
        until = time.monotonic() + self._node.options.cancel_grace
        while own.tasks and time.monotonic() < until:
            own.run_tasks(until)
        self._node.warn_of(own.tasks)
        for task in own.tasks:
            leave_pending(task)

    def _check(self, what: str) -> None:
        if self._call.state is State.ENDED:
            raise MisuseError(
                f"{what} was called after {self._call.name} had ended, by code that it "
                f"left running."
            )
        if self._node.thread != get_ident():
            raise NodeError(
                f"{what} was called in a thread that {self._call.name} has started. On "
                f"an inline node a task starts other tasks in its own thread only."
            )


# The node


class InlineNode:
    """All calls and actors of one node, and its resources, which are always idle.

    Attributes:
        options: the options of `init`.
        loop: the loop of the program.
        thread: the thread of this loop.
        ledger: the resources; known once the node is open.
        assignment: assigns their devices.
        program: the runner of the program's loop.
        runners: all runners with a loop.
        calls: the calls that have not ended, by number; those of actors from their
            begin.
        closing: the asyncio tasks that run `close()` of actors.
        functions: the unpickled functions, as in a worker.
        retry_rules: decide which failures are retried.
        is_closing: the node is being closed.
        is_stop_announced: the program is about to stop.
        node_id: the node's id, as tasks see it.
        new_id: returns the number of the next task or actor.
    """

    ledger: Ledger
    assignment: Assignment

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options
        self.loop = loop
        self.thread = get_ident()
        self.program = Runner(self, loop)
        self.runners: WeakKeyDictionary[asyncio.AbstractEventLoop, Runner]
        self.runners = WeakKeyDictionary({loop: self.program})
        self.calls: dict[int, Call] = {}
        self.closing: set[asyncio.Task[None]] = set()
        self.functions = Functions()
        self.retry_rules = RetryRules()
        self.is_closing = self.is_stop_announced = False
        self.new_id: Final = count(1).__next__
        self.node_id = f"inline-{os.getpid()}"
        self._mark = object()  # marks functions that were found feasible
        self._binds: dict[Shape, Bind] = {}
        self._store: Store | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.calls)} calls>"

    @property
    def actors(self) -> Any:
        """The actors, `InlineActors`."""
        raise NotImplementedError

    def find(self, number: int) -> Any:
        """Return a call, or its actor until it begins; None if it has ended."""
        raise NotImplementedError

    def cancel(self, number: int) -> None:
        """Cancel a task or call; its receiver gets no outcome."""
        raise NotImplementedError

    def check(self, func: FunctionSpec, payload: bytes) -> None:
        """Check a request.

        Raises:
            NodeClosedError: the node is being closed.
            InfeasibleError: the node can never meet the request.
            SerializationError: the arguments are too large.
        """
        if self.is_closing:
            raise NodeClosedError("this node is being shut down.")
        check_arguments(func, payload)
        if func.checked_by is not self._mark:
            check_func(func, self.ledger)
            if not func.spec.is_grouped:
                func.checked_by = self._mark

    def start(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: Call | None,
        runner: Runner,
    ) -> int:
        """Queue a task; return its number. See `Engine.submit`."""
        try:
            self.check(func, payload)
        except InfeasibleError as error:
            if parent is None:
                raise
            receiver.settle(error)
            return self.new_id()
        call = Call(self, func, payload, receiver, parent)
        if parent is not None:
            parent.children[call.id] = call
        call.enqueue(self.program if call.is_kept else runner)
        return call.id

    def learn(self, func: FunctionSpec) -> int:
        """Add a function to `functions`; return its name there."""
        function = func.function
        self.functions.payloads[function.id] = function.payload
        if func.spec.max_calls == 1:
            # A fresh worker would unpickle the function again.
            self.functions.pop(function.id, None)
        return function.id

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value; see `Engine.pack`."""
        if self._store is None:
            from aiogpu.runtime.objects.segments import ObjectMemory
            from aiogpu.runtime.objects.store import Store

            memory = ObjectMemory(
                self.options.object_memory, self.options.spill_directory
            )
            self._store = Store(self.loop, memory)
        return self._store.pack(outgoing)

    def bind(self, func: FunctionSpec) -> Bind:
        """Return the devices and variables that an idle node assigns to a function.

        Raises:
            PlacementRemovedError: its placement group was removed.
        """
        shape = func.spec.shape
        bind = self._binds.get(shape)
        if bind is not None:
            return bind
        lease = take_grouped(self.ledger, shape.request)
        if lease is None:  # `check` has found that it fits
            from aiogpu.runtime.callers.leases import removed

            group: Any = shape.request.placement_group
            raise removed(group.name, func.spec.name, UNKNOWN)
        self.ledger.give_back(lease)
        bind = self.assignment.bind(lease, func.environ)
        if not func.spec.is_grouped:
            self._binds[shape] = bind
        return bind

    def place(self, call: Call) -> Place:
        """Return what the code of a call sees."""
        func, bind = call.func, self.bind(call.func)
        number = call.actor_id or call.id
        facts = {
            "actor": call.actor_id,
            "node": self.node_id,
            "worker": number,
            "task": number,
            "name": func.spec.name,
            "resources": func.resources,
            "accelerators": bind.accelerators,
            "is_stopping": self._is_stopping,
        }
        return Place(bind.environ, facts)

    def _is_stopping(self, task: int) -> bool:
        call = self.calls.get(task)
        is_unwanted = call is not None and call.receiver is None
        return is_unwanted or self.is_closing or self.is_stop_announced

    def runner_of(self, loop: asyncio.AbstractEventLoop) -> Runner:
        """Return the runner of a loop: the program's, or a loop of a task's code."""
        runner = self.runners.get(loop)
        if runner is None:
            runner = self.runners[loop] = Runner(self, loop)
        return runner

    def runner_here(self) -> Runner:
        """Return the runner of what the running code starts."""
        client: Any = inline_client.get()
        return self.program if client is None else client.runner

    def demand(self, number: int, limit: int) -> None:
        """Set the number of items that a stream may yield in all."""
        call = self.calls.get(number)
        if call is not None:
            call.demand(limit)

    def soon(self, call: Callable[[], object]) -> None:
        """Call a function on the program's loop, from any thread or finalizer."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call)

    def warn_of(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Log coroutines that go on after they were cancelled, if there are any."""
        names = ", ".join(sorted(task.get_name() for task in tasks))
        if names:
            _log.warning(
                "! %s: cancelled %g s ago and still running. A worker would be killed; "
                "here the code is abandoned.",
                names,
                self.options.cancel_grace,
            )

    # Waits on event loops; see `client.interface.Waits`.

    def begin_wait(self, task: int) -> None:
        """Let the running loop, if it is a task's, run what its code waits for.

        Raises:
            DeadlockError: what it waits for cannot go on.
        """
        loop = asyncio._get_running_loop()
        if loop is None or loop is self.loop:
            return
        found = self.find(task)
        if found is not None and not found.move_to(self.runner_of(loop)):
            raise deadlock(found.name)

    def end_wait(self, task: int) -> None:
        """Do nothing."""

    def settle(self, task: int) -> None:
        """Do nothing."""
