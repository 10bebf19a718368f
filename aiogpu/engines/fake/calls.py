"""Calls in the program's own thread: tasks, constructors and methods of actors.

A `Call` runs one function by `worker.invoke`, as a worker does. Plain code runs outside
any event loop, in a callback of the program's loop; coroutines are asyncio tasks. Plain
code that waits runs what it waits for, on top of itself (`TaskClient.wait_until`). A
`Runner` is a queue of calls for one event loop, or for the plain code of one call.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from contextvars import Context, ContextVar
from enum import Enum
from functools import partial
from itertools import count
from types import CoroutineType, TracebackType, coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from aiogpu.client.current import (
    ActorExit,
    current,
    has_exited,
    inline_client,
    inline_report,
    no_call_to_report,
)
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.core.model.request import BundleRef, Shape
from aiogpu.core.model.text import span
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import take_grouped
from aiogpu.engines.base import check_arguments, check_func
from aiogpu.errors import (
    AiogpuError,
    DeadlockError,
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeError,
    TaskCancelledError,
)
from aiogpu.serialization.exceptions import (
    LEFT,
    RAISED,
    pack_failure,
    unpack_failure,
)
from aiogpu.serialization.payload import MARK, Contents, Payload
from aiogpu.serialization.references import PickledValue
from aiogpu.wire.messages import Bind, Failed, Items
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
from aiogpu.worker.private_hooks import set_running_loop

if TYPE_CHECKING:
    from aiogpu.engines.fake.actors import InlineActors
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.objects.values import Value

_log: Final = logging.getLogger(__name__)

running_call: Final[ContextVar[Call | None]] = ContextVar("running_call", default=None)
"""The call of the running code; inherited by the asyncio tasks that it starts."""

_OUR_FRAMES: Final = (OWN_FRAMES, os.path.dirname(__file__) + os.sep)
"""Parts of the paths of this package's frames, which are cut from tracebacks."""

_RESUME: Final = "resume"
"""What a suspended plain call yields if `Call.step` shall continue it."""

_ON_LOOP: Final = "on loop"
"""What a plain call yields if an asyncio task shall continue it."""


@coroutine
def _suspend(how: str) -> Generator[str]:
    yield how


@contextmanager
def outside_loop() -> Generator[None]:
    """Context manager: no event loop runs for the block, as in a worker."""
    loop = asyncio._get_running_loop()
    set_running_loop(None)
    try:
        yield
    finally:
        set_running_loop(loop)


# The state of the process while a call's code runs.


class _Nowhere(io.TextIOBase):
    """A text file that drops what is written."""

    def write(self, text: str, /) -> int:
        """Drop the text; return its length."""
        return len(text)


_FACTS: Final = (
    *("actor", "node", "worker", "task", "name"),
    *("resources", "accelerators", "is_stopping"),
)


class Place:
    """The variables and facts that code sees; a context manager for each of its steps.

    Args:
        environ: variables of the environment.
        facts: values of the attributes `_FACTS` of `client.current.current`.
        is_silent: what the code prints is dropped.
    """

    __slots__ = ("_before", "_environ", "_facts", "_is_silent")

    def __init__(
        self, environ: Mapping[str, str], facts: tuple[Any, ...], is_silent: bool
    ) -> None:
        self._environ = environ
        self._facts = facts
        self._is_silent = is_silent
        self._before: list[tuple[dict[str, str | None], list[Any], ExitStack]] = []

    def __enter__(self) -> None:
        environ = {name: os.environ.get(name) for name in self._environ}
        facts = [getattr(current, name) for name in _FACTS]
        output = ExitStack()
        if self._is_silent:
            output.enter_context(redirect_stdout(_Nowhere()))
            output.enter_context(redirect_stderr(_Nowhere()))
        self._before.append((environ, facts, output))
        _set_variables(self._environ)
        _set_facts(self._facts)

    def __exit__(self, *_: object) -> None:
        environ, facts, output = self._before.pop()
        _set_variables(environ)
        _set_facts(facts)
        output.close()


def _set_variables(environ: Mapping[str, str | None]) -> None:
    for name, value in environ.items():
        if os.environ.get(name) != value:
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _set_facts(facts: Iterable[Any]) -> None:
    for name, value in zip(_FACTS, facts, strict=True):
        setattr(current, name, value)


@coroutine
def driven(place: Place, code: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a coroutine to its end, each of its steps in a place."""
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
        except BaseException as error:  # noqa: BLE001 - thrown into the coroutine
            following.append(partial(code.throw, error))


def make_task(
    former: Any, loop: asyncio.AbstractEventLoop, code: Any, **options: Any
) -> asyncio.Task[Any]:
    """Make an asyncio task, as a loop's task factory; tasks of a call see its place.

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
    """Something that a runner runs: a call, or an actor with calls."""

    def step(self, runner: Runner, /) -> None:
        """Run as far as possible now."""


class Runner:
    """What is ready to run, first come, first served.

    The runner of an event loop takes one entry in each turn. The runner of a call's
    plain code has a loop only for coroutines; `TaskClient.wait_until` runs both.

    Attributes:
        loop: the event loop; None before plain code needs one.
        ready: what runs next.
        tasks: the coroutines of calls that run on the loop.
    """

    def __init__(
        self, node: InlineNode, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.loop = loop
        self.ready: deque[Step] = deque()
        self.tasks: set[asyncio.Task[Any]] = set()
        self._node = node
        self._is_of_plain_code = loop is None
        self._is_scheduled = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Runner {len(self.ready)} ready, {len(self.tasks)} tasks>"

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
            self.note()

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
            self.loop.set_task_factory(partial(make_task, None))
            self._node.runners[self.loop] = self
        return self.loop

    def note(self) -> None:
        """Let waiting plain code look at what has changed."""
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
        """Hand over what is ready to the program, and close the loop of plain code."""
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
    HELD = "held"
    """A plain generator waits for its consumer to take items."""
    ENDED = "ended"


class Call:
    """One call of a function; tasks use this class itself.

    Attributes:
        node: the node.
        id: the number of the task or call.
        func: the function or class.
        payload: the arguments.
        receiver: gets the outcome; None if nobody wants it.
        parent: the call that made this one; None for the program.
        children: the unfinished calls of tasks that its code has made, by number.
        is_kept: it outlives its parent: it is detached, or its handle was returned.
        is_ready: its arguments are complete.
        state: see `State`.
        runner: runs it.
        place: what its code sees; set when it begins.
        started: asyncio tasks that its code has started.
        limit: for a stream, the number of items that it may yield in all; else 0.
    """

    def __init__(
        self,
        node: InlineNode,
        id_: int,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver | None,
        parent: Call | None,
    ) -> None:
        self.node = node
        self.id = id_
        self.func = func
        self.payload = payload
        self.receiver = receiver
        self.parent = parent
        self.children: dict[int, Call] = {}
        self.is_kept = func.spec.is_detached
        self.is_ready = False
        self.state = State.WAITING
        self.runner: Runner = node.program
        self.place: Place
        self.started: set[asyncio.Task[Any]] = set()
        self.limit = func.window
        self._passed = 0
        self._stream: StreamSender | None = None
        self._retries = func.spec.max_retries
        self._client: TaskClient
        self._code: Coroutine[Any, Any, Any]
        self._context: Context
        self._task: asyncio.Task[Any] | None = None
        self._submitted = time.monotonic()
        self._begun: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        node.calls[id_] = self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name} {self.state.value}>"

    # What differs for calls of actors.

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.func.spec.name

    @property
    def is_coroutine(self) -> bool:
        """True if all of its code runs on an event loop."""
        return self.func.is_coroutine

    @property
    def run_timeout(self) -> float | None:
        """Seconds that its code may run."""
        return self.func.spec.run_timeout

    def target(self) -> tuple[Callables, Any]:
        """Return a table of callables, and the name of the one to call."""
        return self.node.functions, self.node.learn(self.func)

    def make_place(self) -> Place:
        """Return what the code sees."""
        return self.node.place(self.func, self.id, None)

    def set_context(self) -> None:
        """Set the variables of the context in which the code runs."""
        running_call.set(self)
        inline_client.set(self._client)
        inline_report.set(self.report)

    def deliver(self, outcome: bytes | Exception | Failed) -> None:
        """Settle the receiver, once."""
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        try:
            receiver.settle(outcome)
        except Exception as fault:  # noqa: BLE001 - passed to the receiver
            from aiogpu.runtime.pending_tasks import settle_with_fault

            settle_with_fault(receiver, fault)

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Handle an exception of the code; `error` is what the caller gets."""
        self.deliver(error)

    def on_done(self, payload: bytes) -> None:
        """Handle a result."""
        self.deliver(payload)

    def end(self) -> None:
        """Note that the code has stopped, or never begins."""
        self.state = State.ENDED
        self.node.calls.pop(self.id, None)
        if self.parent is not None:
            self.parent.children.pop(self.id, None)
        if self._timer is not None:
            self._timer.cancel()
        self.runner.note()

    # Before it runs.

    def enqueue(self, runner: Runner) -> None:
        """Queue the call, now or when its arguments are complete."""
        self.runner = runner
        timeout = self.func.spec.timeout
        if timeout is not None and self.node.program is runner:
            self._timer = self.node.loop.call_later(
                timeout, self.expire, context=Context()
            )
        if type(self.payload) is Payload and self.payload.needs:
            from aiogpu.runtime.objects.values import await_arguments

            await_arguments(self.payload, self._on_arguments)
        else:
            self.is_ready = True
            self.make_ready()

    def _on_arguments(self, failed: Value | None) -> None:
        if self.state is not State.WAITING:
            return
        self.is_ready = True
        if failed is None:
            self.make_ready()
        else:
            assert failed.outcome is not None, failed
            self.stop(failed.outcome)  # type: ignore[arg-type]

    def make_ready(self) -> None:
        """Queue the call, whose arguments are complete."""
        self.runner.add(self)

    def producers(self) -> list[int]:
        """Return the tasks whose results are its missing arguments."""
        if self.is_ready or type(self.payload) is not Payload:
            return []
        return [value.task for value in self.payload.needs if value.is_pending]

    def is_blocked(self, runner: Runner) -> bool:
        """Return True if it runs where nothing goes on while a runner's code waits."""
        return self.state is State.RUNNING and self.runner is not runner

    def move_to(self, runner: Runner) -> list[int]:
        """Let a runner run this call; return the calls that must end before it."""
        if self.state is not State.RUNNING and self.runner is not runner:
            self.runner = runner
            if self.is_ready:
                self.make_ready()
        return self.producers()

    def deadlock(self, why: str) -> DeadlockError:
        """Return the error of a wait for this call that could never end."""
        return DeadlockError(
            f"{self.name} {why}. An inline node has one thread, so the wait could "
            f"never end. Wait in an `async def`, or open a node with address='local'."
        )

    # While it runs.

    def step(self, runner: Runner) -> None:
        """Begin the call, or continue a generator, unless another runner did."""
        if self.state is State.WAITING and self.is_ready:
            self.runner = runner
            self._begin()
        elif self.state is State.HELD:
            assert self._stream is not None, self
            if not self._stream.is_held:
                self.runner = runner
                self._advance()

    def _begin(self) -> None:
        if self._is_late():
            self.expire()
            return
        try:
            self.place = self.make_place()
        except AiogpuError as error:  # its placement group was removed
            self.stop(error)
            return
        self.state, self._begun = State.RUNNING, time.monotonic()
        self._client = TaskClient(self)
        functions, name = self.target()
        payload = self.payload
        if type(payload) is Payload and payload.needs:
            from aiogpu.runtime.objects.store import filled

            payload = filled(payload)
        if self.limit:
            self._stream = StreamSender(
                self._on_items, self.id, self.limit, self._passed, self.pack
            )
        self._code = invoke(
            CallInvoker(self), self.id, functions, name, payload, self._stream
        )
        self._context = Context()
        self._context.run(self.set_context)
        if self.is_coroutine:
            self._go_on_loop()
        else:
            self._advance()

    def _advance(self) -> None:
        """Run plain code up to its end or its next suspension."""
        self.state = State.RUNNING
        with outside_loop():
            try:
                with self.place:
                    how = self._context.run(self._code.send, None)
            except StopIteration as ended:
                how, outcome = "", ended.value
                self._client.close()
        if how == _ON_LOOP:
            self._go_on_loop()
        elif how == _RESUME:
            self.state = State.HELD
        else:
            self._finish(outcome)

    def _go_on_loop(self) -> None:
        loop = self.runner.event_loop()
        self._task = asyncio.Task(
            driven(self.place, self._code),
            loop=loop,
            name=self.name,
            context=self._context,
        )
        self.runner.tasks.add(self._task)
        self._task.add_done_callback(self._on_task_done, context=Context())
        ends = [end for end in self._ends() if end is not None]
        if ends:
            if self._timer is not None:
                self._timer.cancel()
            delay = max(min(ends) - time.monotonic(), 0.0)
            self._timer = loop.call_later(delay, self.expire, context=Context())

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self.runner.tasks.discard(task)
        self._task = None
        self.cancel_started()
        outcome: Any = Raised(RAISED, asyncio.CancelledError())
        if task.cancelled():
            self._code.close()
        else:
            outcome = task.result()
        error = outcome.error if type(outcome) is Raised else None
        if task.cancelling() and type(error) is asyncio.CancelledError:
            # The loop is ending, or another task of the program has cancelled this.
            self.deliver(NodeClosedError(f"the event loop of {self.name} has ended."))
        self._finish(outcome)

    def cancel_started(self) -> None:
        """Cancel the asyncio tasks that the code has left."""
        for started in self.started:
            started.cancel()

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; children whose handles it holds outlive the call."""
        for reference in outgoing.references:
            child = self.node.calls.get(getattr(reference, "task", 0))
            if child is not None:
                child.is_kept = True
        return self.node.pack(outgoing)

    def resume(self) -> None:
        """Continue a generator, since its consumer has taken items."""
        self.runner.add(self)

    def demand(self, limit: int) -> None:
        """Set the number of items that its generator may yield in all."""
        self.limit = limit
        if self._stream is not None:
            self._stream.raise_limit(limit)

    def _on_items(self, items: Items) -> None:
        self._passed += 1
        if self.receiver is not None:
            self.receiver.receive_items(items.payloads)  # type: ignore[attr-defined]
        self.runner.note()

    def report(self, payload: bytes) -> None:
        """Deliver a report of the code; may be called in any thread.

        Raises:
            MisuseError: the call has ended.
        """
        if self.state is State.ENDED:
            raise no_call_to_report()
        if get_ident() == self.node.thread:
            self._on_report(payload)
        else:
            self.node.loop.call_soon_threadsafe(self._on_report, payload)

    def _on_report(self, payload: bytes) -> None:
        receive = getattr(self.receiver, "receive_report", None)  # `map` has none
        if receive is not None:
            receive(0, payload)
        self.runner.note()

    # Its end.

    def _finish(self, outcome: Any) -> None:
        self.stop_children()
        if self.receiver is not None and self._is_late():
            self.expire()
        if type(outcome) is not Raised:
            self.end()
            self.on_done(outcome.payload)
            return
        failed, error = self._describe(outcome)
        if failed.is_retried and self._retries and self.receiver is not None:
            self._retries -= self._retries > 0
            self.state, self.children = State.WAITING, {}
            self.runner.add(self)
            return
        self.end()
        self.on_failed(failed, error)
        if type(outcome.error) is KeyboardInterrupt:
            raise outcome.error  # it ends the program

    def _describe(self, outcome: Raised) -> tuple[Failed, Exception]:
        """Return the failure as a worker would send it, and the caller's exception."""
        kind, error = outcome.kind, outcome.error
        if type(error) is ActorExit or (current.exits and has_exited()):
            kind = LEFT
        trace = _users_frames(error)
        BaseException.with_traceback(error, trace)
        failed = pack_failure(self.id, kind, error, OWN_FRAMES, self.node.pack)
        if self.func.retried and kind == RAISED:
            rules = self.node.retry_rules
            failed = rules.mark(failed, self.name, self.func.retried, error)
        raised = unpack_failure(failed, self.name)
        # So a debugger finds the frames of the task.
        return failed, BaseException.with_traceback(raised, trace)  # type: ignore[return-value]

    def _ends(self) -> tuple[float | None, float | None]:
        """Return the times at which `timeout` and `run_timeout` are over."""
        timeout, limit = self.func.spec.timeout, self.run_timeout
        late = None if timeout is None else self._submitted + timeout
        begun = self._begun
        return late, None if limit is None or begun is None else begun + limit

    def _is_late(self) -> bool:
        now = time.monotonic()
        return any(end is not None and end <= now for end in self._ends())

    def expire(self) -> None:
        """Fail and stop the call, whose time is over."""
        from aiogpu.runtime.pending_tasks import overrun, too_late

        now, late = time.monotonic(), self._ends()[0]
        ran = "it did not begin"
        if self._begun is not None:
            ran = f"it ran {span(now - self._begun)}"
        if late is not None and late <= now:
            waited = span((self._begun or now) - self._submitted)
            self.stop(too_late(self.func.spec, f"it waited {waited}, and {ran}"))
        else:
            self.stop(overrun(self.name, self.run_timeout, ran))

    def stop(self, outcome: Exception | Failed | None = None) -> None:
        """Stop the call as far as possible; its receiver gets only `outcome`.

        Plain code that runs cannot be stopped.
        """
        if outcome is not None:
            self.deliver(outcome)
        self.receiver = None
        if self.state is State.WAITING:
            self.end()
        elif self._task is not None:
            self._task.cancel()
        elif self.state is State.HELD:
            with outside_loop(), self.place:
                self._context.run(self._code.close)
                self._client.close()
            self.stop_children()
            self.end()

    def stop_children(self) -> None:
        """Stop the children that do not outlive this call."""
        for child in list(self.children.values()):
            if not child.is_kept:
                child.disown()

    def disown(self) -> None:
        """Stop the call, since its parent has ended."""
        self.stop(
            TaskCancelledError(
                f"{self.name} was stopped, since the task that had started it has "
                f"ended or is being stopped."
            )
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


class CallInvoker(Invoker):
    """The parts of `invoke` that differ for a call of an inline node."""

    __slots__ = ("_call", "_is_on_loop")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_on_loop = call.is_coroutine

    async def _move_to_loop(self) -> None:
        if not self._is_on_loop:
            self._is_on_loop = True
            await _suspend(_ON_LOOP)

    async def wait(self, coroutine: CoroutineType[Any, Any, Any], call: int) -> Any:
        """Await a coroutine on an event loop."""
        await self._move_to_loop()
        return await coroutine

    async def send_items(self, items: Any, stream: StreamSender) -> None:
        """Run a generator to its end; a plain one outside of any loop."""
        if self._is_on_loop or hasattr(items, "__anext__"):
            await self._move_to_loop()
            new_future = self._call.runner.event_loop().create_future
            await send_all_async(items, stream, new_future)
            return
        stream.on_open = self._call.resume
        try:
            for item in items:
                stream.send(item)
                del item
                while stream.is_held:
                    await _suspend(_RESUME)
        finally:
            if hasattr(items, "close"):
                items.close()

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value."""
        return self._call.pack(outgoing)


class TaskClient:
    """The node as the code of one call sees it; see `client.interface.InlineClient`.

    Attributes:
        upsets: number of children that have failed or were withdrawn.
    """

    remote_values = None

    def __init__(self, call: Call) -> None:
        self.upsets = 0
        self._call = call
        self._node = call.node
        self._own: Runner | None = None
        self._awaited: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<TaskClient of {self._call!r}>"

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
        """The runner of what the code that runs now starts."""
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
        return self._node.submit(func, payload, receiver, self._call, self.runner)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; return the number of the call.

        Raises:
            MisuseError: the call has ended.
            NodeError: the caller is in another thread, or blocks the actor's loop.
        """
        called = self._node.actors.held_by_caller(actor)
        what = f"{called.name}.{method}.remote()"
        self._check(what)
        if called.is_async:
            raise NodeError(
                f"{what} was called by {self._call.name}, whose plain code blocks the "
                f"thread. On an inline node a class with `async def` methods runs on "
                f"the program's event loop, in the same thread: make the caller an "
                f"`async def`, or open a node with address='local'."
            )
        return called.submit(method, payload, receiver, self._call, self.runner)

    def serve_loop(self) -> None:
        """Do nothing: what is waited for is moved to the waiting loop."""

    def demand(self, number: int, limit: int, /) -> None:
        """Set the number of items that a stream may yield in all."""
        self._node.demand(number, limit)

    def withdraw(self, number: int, /) -> None:
        """Cancel a child whose result is not needed."""
        self.upsets += 1
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

        Raises:
            DeadlockError: nothing is left to run, and there is no deadline.
        """
        runner, awaited = self.runner, self._awaited
        self._node.move(awaited, runner)
        while not is_done():
            if runner.ready:
                runner.ready.popleft().step(runner)
            elif runner.tasks:
                runner.run_tasks(deadline)
            elif deadline is None:
                raise self._stuck(awaited)
            else:
                time.sleep(max(deadline - time.monotonic(), 0.0))
            if deadline is not None and time.monotonic() >= deadline:
                return is_done()
        return True

    def _stuck(self, awaited: tuple[int, ...]) -> DeadlockError:
        calls = [self._node.calls[each] for each in awaited if each in self._node.calls]
        if calls:
            return calls[0].deadlock("can never run")
        return DeadlockError(
            f"{self._call.name} waits for what only the program's event loop can "
            f"bring, and blocks that loop. The wait could never end. Make the caller "
            f"an `async def`, or open a node with address='local'."
        )

    def close(self) -> None:
        """Stop the children of plain code that has returned, and close its loop."""
        self._call.stop_children()
        own, self._own = self._own, None
        for child in list(self._call.children.values()):
            if child.runner not in (own, self._node.program):
                child.disown()  # its loop was stopped by the code that made it
                child.end()
        if own is None:
            return
        until = time.monotonic() + self._node.grace
        while own.tasks and time.monotonic() < until:
            own.run_tasks(until)
        if own.tasks:
            self._node.warn_of(own.tasks)
            for call in list(self._node.calls.values()):
                if call.runner is own and call.state is State.RUNNING:
                    call.disown()
                    call.end()
        own.close()

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


class CopiedBuffers:
    """The large buffers of a payload; each reader gets a copy."""

    def __init__(self, buffers: Iterable[memoryview]) -> None:
        self._buffers = [bytes(buffer) for buffer in buffers]

    def views(self, contents: Contents) -> list[memoryview]:
        """Return copies of the buffers, which the caller may change."""
        return [memoryview(bytearray(buffer)) for buffer in self._buffers]


class InlineNode:
    """All calls and actors of one node, and its resources, which are always idle.

    Attributes:
        loop: the loop of the program.
        thread: the thread of this loop.
        ledger: the resources.
        grace: seconds that a cancelled coroutine has to end.
        program: the runner of the program's loop.
        actors: the actors.
        calls: the calls that have not ended, by number.
        functions: the unpickled functions, as in a worker.
        is_closing: the node is being closed.
        is_stop_announced: the program is about to stop.
    """

    actors: InlineActors

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ledger: Ledger,
        assignment: Assignment,
        grace: float,
        is_silent: bool,
    ) -> None:
        self.loop = loop
        self.thread = get_ident()
        self.ledger = ledger
        self.assignment = assignment
        self.grace = grace
        self.program = Runner(self, loop)
        self.calls: dict[int, Call] = {}
        self.functions = Functions()
        self.retry_rules = RetryRules()
        self.is_closing = self.is_stop_announced = False
        self.new_id: Final = count(1).__next__
        self._is_silent = is_silent
        self._id = f"inline-{os.getpid()}"
        self._mark = object()  # marks functions that were found feasible
        self._binds: dict[Shape, Bind] = {}
        self.runners: WeakKeyDictionary[asyncio.AbstractEventLoop, Runner]
        self.runners = WeakKeyDictionary({loop: self.program})

    def __repr__(self) -> str:
        return f"<InlineNode {len(self.calls)} calls>"

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

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: Call | None,
        runner: Runner,
    ) -> int:
        """Queue a task; return its number. See `Engine.submit`."""
        number = self.new_id()
        try:
            self.check(func, payload)
        except InfeasibleError as error:
            if parent is None:
                raise
            receiver.settle(error)
            return number
        call = Call(self, number, func, payload, receiver, parent)
        if parent is not None:
            parent.children[number] = call
        call.enqueue(self.program if call.is_kept else runner)
        return number

    def learn(self, func: FunctionSpec) -> int:
        """Add a function to `functions`; return its name there."""
        function = func.function
        self.functions.payloads[function.id] = function.payload
        if func.spec.max_calls == 1:
            # A fresh worker would unpickle the function again.
            self.functions.pop(function.id, None)
        return function.id

    @staticmethod
    def pack(outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value; see `Engine.pack`."""
        values = tuple(handle.share() for handle in outgoing.handles)
        parts = tuple(
            part if type(part) is bytes else InlineNode.pack(part)
            for part in outgoing.parts
        )
        contents = Contents(
            stream=outgoing.stream,
            segment=int(bool(outgoing.buffers)),
            needs=tuple(value.id for value in values),
            places=outgoing.places,
            parts=parts,
            values=outgoing.values,
            returns=outgoing.returns,
            actors=outgoing.actors,
        )
        buffers = CopiedBuffers(outgoing.buffers) if outgoing.buffers else None
        # Nobody reads the packed form: the payload stays in this process.
        return Payload.of(contents, outgoing.references, buffers, values, MARK)

    def take(self, func: FunctionSpec) -> Lease:
        """Return the lease that an idle node gives to a request, already given back.

        Raises:
            PlacementRemovedError: the request's placement group was removed.
            InfeasibleError: it does not fit into the group.
        """
        request = func.spec.shape.request
        lease = take_grouped(self.ledger, request)
        if lease is not None:
            self.ledger.give_back(lease)
            return lease
        group = request.placement_group
        assert isinstance(group, BundleRef), request
        from aiogpu.runtime.callers.leases import removed

        raise removed(group.name, func.spec.name, "was removed")

    def bind(self, func: FunctionSpec) -> Bind:
        """Return the devices and variables of a function's calls."""
        shape = func.spec.shape
        bind = self._binds.get(shape)
        if bind is None:
            bind = self.assignment.bind(self.take(func), func.environ)
            if not func.spec.is_grouped:
                self._binds[shape] = bind
        return bind

    def place(self, func: FunctionSpec, number: int, actor: int | None) -> Place:
        """Return what the code of a task or actor sees."""
        bind = self.bind(func)
        facts = (
            *(actor, self._id, number, number, func.spec.name),
            *(func.resources, bind.accelerators, self.is_stopping),
        )
        return Place(bind.environ, facts, self._is_silent)

    def is_stopping(self, task: int) -> bool:
        """Return whether a task, or the node, is to stop."""
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
        """Return the runner of the running code."""
        client: Any = inline_client.get()
        return self.program if client is None else client.runner

    def move(self, numbers: Iterable[int], runner: Runner) -> Call | None:
        """Let a runner run calls and what they need, since its code waits for them.

        Returns:
            A call that runs where nothing goes on while the code waits, or None.
        """
        seen: set[int] = set()
        pending, blocked = list(numbers)[::-1], None
        while pending:
            call = self.calls.get(pending.pop())
            if call is not None and call.id not in seen:
                seen.add(call.id)
                if call.is_blocked(runner):
                    blocked = call
                pending += call.move_to(runner)
        return blocked

    def cancel(self, number: int) -> None:
        """Cancel a task or call; its receiver gets no outcome."""
        call = self.calls.get(number)
        if call is not None:
            call.stop()

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
        """Log coroutines that go on after they were cancelled."""
        names = ", ".join(sorted(task.get_name() for task in tasks))
        _log.warning(
            "! %s: cancelled %g s ago and still running. In its own process it would "
            "be killed; here its code may go on beside other code.",
            names,
            self.grace,
        )

    # Waits on the event loops of tasks; see `client.interface.Waits`.

    def begin_wait(self, task: int) -> None:
        """Let the running loop run what its code waits for.

        Raises:
            DeadlockError: what it waits for cannot go on.
        """
        loop = asyncio._get_running_loop()
        if loop is not None and loop is not self.loop:
            blocked = self.move((task,), self.runner_of(loop))
            if blocked is not None:
                raise blocked.deadlock("runs, and cannot go on while this code waits")

    def end_wait(self, task: int) -> None:
        """Do nothing: see `client.interface.Waits`."""

    def settle(self, task: int) -> None:
        """Do nothing: see `client.interface.Waits`."""
