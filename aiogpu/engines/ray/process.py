"""Runs tasks in Ray's workers: their event loop and client.

Ray runs the code of a task in the main thread. A thread of this process has the event
loop of the process's client: its calls, their answers, timers and streams. So answers
are taken while no code waits for them; an actor may be idle for a long time, and
answers that stay would keep objects alive.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from _thread import get_ident, interrupt_main
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from selectors import DefaultSelector, SelectorKey
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiogpu.accelerators.listed_devices import is_left_alone
from aiogpu.client.current import (
    check_task_runs,
    client_of_process,
    current,
    is_loop_running,
)
from aiogpu.core.model.units import GPU
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.calls import Calls, RayValues
from aiogpu.engines.ray.values import (
    RetriedFailure,
    TaskFailure,
    from_arguments,
    pack,
    pack_raised,
    to_stored,
)
from aiogpu.errors import ActorNameError, MisuseError
from aiogpu.serialization.exceptions import RAISED
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import QUERIES, Done, Items
from aiogpu.worker.interrupts import is_importing
from aiogpu.worker.invoke import (
    Arguments,
    Callables,
    Functions,
    Invoker,
    Raised,
    RetryRules,
    StreamSender,
    clear_frames,
    invoke,
    is_coroutine,
    open_arguments,
    run_now,
)
from aiogpu.worker.nested import refuse_while_importing
from aiogpu.worker.private_hooks import set_running_loop

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Outcome, Receiver

EngineFactory = Callable[[asyncio.AbstractEventLoop], Any]
"""Makes the `RayEngine` of a process. It is sent with the code, since this module
cannot import the class."""

# Event loops

SLICE: Final = 0.05
"""Seconds of one wait in Ray, which no interrupt ends."""
SHARED_SLICE: Final = 0.005
"""The same if the loop also waits for descriptors."""
DELIVERY: Final = 0.001
"""Seconds for the delivery of ready objects from the client's thread."""


class _WaitingSelector(DefaultSelector):
    """Waits in Ray, if there are objects to wait for.

    Ray then knows that the task is blocked, and lends its CPUs to other tasks. Else a
    coroutine that awaits its children on a full cluster would wait for ever.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        # A call may still be sent in the client's thread.
        if self._calls.live:
            slice_ = SLICE if len(self.get_map()) == 1 else SHARED_SLICE
            timeout = slice_ if timeout is None else min(timeout, slice_)
        refs = self._calls.awaited()
        if not refs:
            return super().select(timeout)
        assert timeout is not None, self
        return super().select(DELIVERY if cluster.wait(refs, timeout) else 0)


class TaskLoop:
    """The event loop of one task, in the thread that runs the task.

    Attributes:
        loop: the asyncio loop.
    """

    def __init__(self, calls: Calls) -> None:
        """Make a loop that waits for the objects of these calls while it is idle."""
        self._runner = asyncio.Runner(
            loop_factory=lambda: asyncio.SelectorEventLoop(_WaitingSelector(calls))
        )
        self.loop = self._runner.get_loop()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await an awaitable of the task; an interrupt cancels it, as in `asyncio.run`.

        Ray's interrupt is no real signal, so it ends no system call: the loop is woken
        by a descriptor.
        """
        if get_ident() != threading.main_thread().ident:
            return self._runner.run(_result_of(awaitable))
        descriptor = self.loop._csock.fileno()  # type: ignore[attr-defined]
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        # `asyncio.Runner` replaces this handler only.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return self._runner.run(_result_of(awaitable))
        finally:
            signal.signal(signal.SIGINT, handler)
            signal.set_wakeup_fd(-1)

    def close(self) -> None:
        """Cancel what the task left on the loop, and wait for its end."""
        # Code that ends the loop by an exception may leave the loop's own stop callback
        # behind, which would stop the next run.
        self.loop.call_soon(self.loop.stop)
        with suppress(SystemExit, KeyboardInterrupt):
            self.loop.run_forever()
        self._runner.close()


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


# The client of this process


class _Receiver:
    """Settles a receiver on the event loop of the code that made the request.

    Plain code has no loop, and waits for `changed`.
    """

    def __init__(self, receiver: Any, changed: threading.Condition) -> None:
        self.receiver = receiver
        self._changed = changed
        self._loop = asyncio._get_running_loop()

    def settle(self, outcome: Outcome) -> None:
        """Receive the outcome; see `Receiver`."""
        self._tell(self.receiver.settle, outcome)

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Receive pickled items; see `ItemReceiver`."""
        self._tell(self.receiver.receive_items, payloads)

    def _tell(self, take: Callable[[Any], object], what: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(take, what)
            return
        with self._changed:
            take(what)
            self._changed.notify_all()


class TaskClient:
    """The client of one of Ray's processes, for its tasks or its actor.

    See `interface.ActorClient`. The engine is used on its own loop in a thread.

    Attributes:
        calls: the calls of the process.
    """

    waits = None

    def __init__(self, make_engine: EngineFactory) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = make_engine(self._loop)
        self.calls: Calls = self._engine.calls
        self._changed = threading.Condition()
        self.remote_values = RayValues(self.calls, self._run, self._receiver)
        self._threads = threading.local()
        self._found: dict[int, Any] = {}
        thread = threading.Thread(
            target=self._loop.run_forever, name="aiogpu-calls", daemon=True
        )
        thread.start()
        self._thread = thread.ident

    def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the engine on its loop; return the result."""
        if get_ident() == self._thread:
            return call(*arguments)
        result: Future[Any] = Future()

        async def answer() -> None:
            try:
                value = call(*arguments)
                value = await value if asyncio.isfuture(value) else value
            except Exception as error:  # noqa: BLE001 - raised at the caller
                result.set_exception(error)
            else:
                result.set_result(value)

        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(answer()))
        return result.result()

    def _receiver(self, receiver: Any) -> Any:
        return _Receiver(receiver, self._changed)

    @property
    def task_loop(self) -> TaskLoop:
        """The event loop of the task that this thread runs."""
        task_loop: TaskLoop | None = getattr(self._threads, "loop", None)
        if task_loop is None:
            task_loop = self._threads.loop = TaskLoop(self.calls)
        return task_loop

    def end_task(self) -> None:
        """End the task's asyncio tasks and children."""
        task_loop: TaskLoop | None = self._threads.__dict__.pop("loop", None)
        try:
            if task_loop is not None:
                task_loop.close()
        finally:
            current.task = 0
            self._run(self._engine.end_children)

    def interrupt_later(self) -> None:
        """Interrupt the task of the main thread after a pause, if it still runs."""
        task = current.task

        def interrupt() -> None:
            if task and current.task == task:
                interrupt_main()

        add_timer = self._loop.call_later
        self._loop.call_soon_threadsafe(add_timer, IMPORT_PAUSE, interrupt)

    # Waits

    def note_wait(self, *_: object, **__: object) -> None:
        """Do nothing: waiting code is blocked in Ray, which notices this itself."""

    end_wait = note_wait

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until `is_done()`; return False on timeout.

        Args:
            is_done: called after each delivery.
            deadline: by `time.monotonic()`; None for no limit.
        """
        while not is_done():
            seconds = SLICE
            if deadline is not None:
                seconds = min(deadline - time.monotonic(), SLICE)
                if seconds <= 0:
                    return False
            refs = self.calls.awaited()
            if refs:
                seconds = DELIVERY if cluster.wait(refs, seconds) else 0
            with self._changed:
                if not is_done():
                    self._changed.wait(seconds)
        return True

    # Tasks and calls

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value; see `Engine.pack`."""
        payload: bytes = self._engine.pack(outgoing)
        return payload

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; return its number.

        Raises:
            MisuseError: no task runs any more.
        """
        _check_running(func.spec.name)
        receiver = self._receiver(receiver)
        number: int = self._run(self._engine.submit, func, payload, receiver)
        return number

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor, or send a query of `wire.messages` instead.

        Returns:
            The number of the call; 0 for a query, which cannot be cancelled.

        Raises:
            MisuseError: no task runs any more.
        """
        _check_running(method)
        called, receiver = self._engine.actors.held(actor), self._receiver(receiver)
        number: int = (
            self._run(called.ask, method, receiver)
            if method in QUERIES
            else self._run(called.call, method, payload, receiver)
        )
        return number

    def report(self, _payload: bytes) -> NoReturn:
        """Refuse reports: Ray could send them only by blocking the task.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "aiogpu.report() was called in a task on a Ray cluster, which delivers no "
            "reports. Yield the reports from a generator, whose items are delivered "
            "one by one, or run on an aiogpu node (docs/from-ray.md)."
        )

    def demand(self, child: int, limit: int) -> None:
        """Set the number of items that a child's stream may yield in all."""
        self._run(self._engine.demand, child, limit)

    def withdraw(self, child: int) -> None:
        """Cancel a child whose result is not needed."""
        self._run(self._engine.cancel, child)

    def withdraw_soon(self, child: int) -> None:
        """Cancel a child from a finalizer."""
        self._loop.call_soon_threadsafe(self._engine.cancel, child)

    # Actors

    def make(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> Any:
        """Create an actor, or find it by its name; see `ActorsPort.create`."""
        _check_running(func.spec.name)
        actors = self._engine.actors
        return self._run(actors.create, func, payload, key, get_if_exists)

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Look an actor up by its name; the receiver is settled at once."""
        actor = self._run(self._engine.actors.find, (namespace, name))
        if actor is None:
            error = ActorNameError(f"there is no actor named {name!r} on this cluster.")
            receiver.settle(error)
        else:
            self._found[actor.id] = actor
            interface = actor.func.actor.packed_interface()
            receiver.settle(dump_whole((actor.id, actor.name, interface)))
        return 0

    def own(self, actor: int) -> Any:
        """Return the hold of an actor found by name."""
        return self._found.pop(actor, None) or self._engine.actors.held(actor)

    def actor(self, actor: int, name: str) -> Any:
        """Return the hold of an actor while its handle is unpickled."""
        return self._engine.actors.held(actor, name)

    def pass_on(self, hold: Any) -> None:
        """Add an actor's reference to the value that is being pickled."""
        self._engine.actors.pass_on(hold.id, hold)

    def stop(self, actor: int, how: str) -> None:
        """End an actor; `how` is explained at `wire.messages.Stop`."""
        self._run(self._engine.actors.stop, actor, how)


def _check_running(name: str) -> None:
    """Refuse requests of ended tasks and of modules that are being imported."""
    if current.is_loading:
        refuse_while_importing()
    if current.actor is None:
        check_task_runs(name)


def task_client() -> TaskClient:
    """Return the client of this process."""
    client = client_of_process()
    assert isinstance(client, TaskClient), client
    return client


def _leave() -> None:
    """Drop the client in a fork: only the parent has Ray's threads."""
    current.client = None


# The parts of a call that differ


class Suspended:
    """Awaitable: suspends a coroutine with an item for Ray, or a future for a loop."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._value


class TaskInvoker(Invoker):
    """Calls user code, in plain code or on a loop that runs; see `invoke.Invoker`."""

    def load(self, function: Callable[..., Any], payload: bytes) -> Arguments:
        """Unpickle the arguments; handles for a coroutine belong to its loop."""
        # In an actor with coroutines the loop already runs.
        if is_loop_running() or not (has_handles(payload) and is_coroutine(function)):
            return open_arguments(payload)
        loop = task_client().task_loop.loop
        try:
            # Inside the `try`, since an interrupt may arrive as soon as it is set.
            set_running_loop(loop)
            return open_arguments(payload)
        finally:
            set_running_loop(None)

    async def wait(self, coroutine: Awaitable[Any], _call: int = 0) -> Any:
        """Await a coroutine, for plain code on its own loop; then never suspends."""
        if is_loop_running():
            return await coroutine
        return task_client().task_loop.run(coroutine)

    async def send_items(self, items: Any, _stream: object) -> None:
        """Run a plain or async generator; suspend with each item, packed for Ray.

        Ray takes items from a generator. So the caller of `invoke` yields each item
        with which it suspends, and Ray makes the generator wait for the consumer.
        """
        sent: list[Items] = []
        flow = StreamSender(sent.append, 0, 0, 0, self.pack)
        is_async = hasattr(items, "__anext__")
        try:
            iterator = items if is_async else iter(items)
            while True:
                item = (
                    await self.wait(anext(iterator, _END))
                    if is_async
                    else next(iterator, _END)
                )
                if item is _END:
                    break
                flow.send(item)
                del item  # free it before the next item, since both may be large
                await Suspended(sent.pop().payloads[0])
        finally:
            if hasattr(items, "aclose"):
                await self.wait(items.aclose())
            elif hasattr(items, "close"):
                items.close()

    def pack(self, outgoing: PickledValue) -> Any:
        """Return the value that Ray stores for a result, a tuple for several."""
        if outgoing.parts:
            return tuple(
                self.pack(part) if type(part) is PickledValue else part
                for part in outgoing.parts
            )
        return to_stored(pack(outgoing))


_invoker: Final = TaskInvoker()
_END: Final = object()
"""Marks the end of a generator."""


# Code

HIDING: Final = {
    GPU: "CUDA_VISIBLE_DEVICES",
    "neuron_cores": "NEURON_RT_VISIBLE_CORES",
}
"""The variables that hide devices, by kind; Ray sets them for tasks with devices."""
_retry_rules: Final = RetryRules()


class RemoteCode:
    """A function or class with its options, as it is sent to a worker.

    Attributes:
        name: name of the task or actor.
        resources: its resources.
        retried: exceptions after which the task is retried; see `Define.retried`.
        limits: for an actor, number of concurrent calls by concurrency group.
        groups: for an actor, the groups of methods outside the default group.
        functions: holds the function or class as number 0.
    """

    def __init__(
        self,
        func: FunctionSpec,
        resources: Mapping[str, float],
        make_engine: EngineFactory,
    ) -> None:
        """Describe a function.

        Args:
            func: the function or class.
            resources: its resources.
            make_engine: makes the engine for its code.
        """
        self.name = func.spec.name
        self.resources = dict(resources)
        self.retried = func.retried
        self.limits = {} if func.actor is None else dict(func.actor.limits)
        self.groups = {} if func.actor is None else dict(func.actor.groups)
        self.functions = Functions()
        self.functions.payloads[0] = func.function.payload
        self._make_engine = make_engine
        self._search_path = [os.path.abspath(place) for place in sys.path]

    def __repr__(self) -> str:
        return f"<RemoteCode {self.name}>"

    def set_up_process(self) -> None:
        """Hide the devices that the code may not use, and set its context.

        Ray has set the variables of assigned devices.
        """
        for place in self._search_path:
            if place not in sys.path and os.path.exists(place):
                sys.path.append(place)
        devices = cluster.accelerators()
        for kind in set(HIDING) - set(devices):
            if not is_left_alone(HIDING[kind], os.environ):
                os.environ[HIDING[kind]] = ""
        if not is_left_alone(HIDING[GPU], os.environ):
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        node, worker, _ = cluster.process_ids()
        current.node, current.worker = node, int(worker[:12], 16)
        current.name = self.name
        current.resources, current.accelerators = self.resources, devices
        if current.client is None:
            current.client = TaskClient(self._make_engine)
            os.register_at_fork(after_in_child=_leave)


def make_runner(code: RemoteCode, *, is_stream: bool) -> Callable[..., Any]:
    """Return the function, or the generator function, that Ray runs as a task."""

    def run(*arguments: Any) -> Any:
        return run_task(code, arguments)

    def stream(*arguments: Any) -> Any:
        yield from stream_task(code, arguments)

    runner = stream if is_stream else run
    runner.__name__ = runner.__qualname__ = code.name
    return runner


# Running

IMPORT_PAUSE: Final = 0.1
"""Seconds after which an interrupt that came amid an import is tried again."""


def _on_interrupt(_signal: int, frame: FrameType | None) -> None:
    """Let Ray's interrupt end a task's code, but no import.

    Half an import, such as torch's, would break the worker for later tasks.
    """
    if is_importing(frame):
        task_client().interrupt_later()
    elif current.task:  # else it came too late
        raise KeyboardInterrupt


@contextmanager
def _task_context(code: RemoteCode) -> Iterator[None]:
    """Context manager: run a task's code with its devices and ids."""
    set_running_loop(None)  # an interrupt may have kept the last task from it
    code.set_up_process()
    signal.signal(signal.SIGINT, _on_interrupt)
    current.task = int(cluster.task_id()[:12], 16)
    try:
        yield
    finally:
        task_client().end_task()


def call_user(
    functions: Callables,
    name: Any,
    arguments: Sequence[Any],
    *,
    is_stream: bool = False,
) -> Coroutine[Any, Any, Done | Raised]:
    """Return the coroutine that calls user code by `invoke`.

    Args:
        functions: holds the function or method.
        name: its name there.
        arguments: its arguments from Ray; see `from_arguments`.
        is_stream: the coroutine suspends with the items that the call yields.

    Raises:
        TaskFailure: an argument has failed.
    """
    payload = from_arguments(*arguments)
    return invoke(_invoker, 0, functions, name, payload, is_stream or None)


def result_of(name: str, outcome: Done | Raised, retried: bytes = b"") -> Any:
    """Return the value that Ray stores for the outcome of a call.

    Args:
        name: name of the task or actor.
        outcome: outcome of the call.
        retried: errors after which Ray retries the task.

    Raises:
        TaskFailure: the call has failed.
    """
    if type(outcome) is not Raised:
        return outcome.payload
    error = outcome.error
    if isinstance(error, TaskFailure):
        raise error
    failed = pack_raised(outcome)
    if retried and failed.kind == RAISED:
        failed = _retry_rules.mark(failed, name, retried, error)
    clear_frames(error)
    raise (RetriedFailure if failed.is_retried else TaskFailure)(*failed)


def _end_of(code: RemoteCode, outcome: Done | Raised) -> Any:
    if type(outcome) is Raised and isinstance(outcome.error, KeyboardInterrupt):
        raise KeyboardInterrupt  # Ray reports that the task was cancelled
    return result_of(code.name, outcome, code.retried)


def run_task(code: RemoteCode, arguments: Sequence[Any]) -> Any:
    """Run a task; return the value that Ray stores, or a tuple for several results.

    Raises:
        TaskFailure: the task has failed.
    """
    with _task_context(code):
        return _end_of(code, run_now(call_user(code.functions, 0, arguments)))


def stream_task(code: RemoteCode, arguments: Sequence[Any]) -> Iterator[Any]:
    """Run a generator, which Ray makes wait for its consumer.

    Raises:
        TaskFailure: the task has failed.
    """
    with _task_context(code):
        running = call_user(code.functions, 0, arguments, is_stream=True)
        _end_of(code, (yield from running.__await__()))
