"""A task in one of Ray's workers: its interrupts, event loop, client and execution."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from _thread import get_ident, interrupt_main, start_new_thread
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager, suppress
from selectors import EpollSelector, SelectorKey
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from aiogpu.accelerators.listed_devices import is_left_alone
from aiogpu.client.current import (
    check_task_runs,
    client_of_process,
    current,
    is_loop_running,
)
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.errors import RetriedFailure, TaskFailure, cancelled
from aiogpu.engines.ray.tasks import Calls, RayValues
from aiogpu.engines.ray.values import from_arguments, pack, to_stored
from aiogpu.errors import ActorNameError, MisuseError
from aiogpu.serialization.exceptions import RAISED, UNREADABLE, pack_failure
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    CAPACITY,
    ENDED,
    LOST,
    READY,
    Done,
    Items,
)
from aiogpu.worker.interrupts import is_importing
from aiogpu.worker.invoke import (
    OWN_FRAMES,
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

# Interrupts

LOOK_AGAIN: Final = 0.02
"""Seconds between two checks whether an interrupt may be raised."""
WAKE: Final = signal.SIGURG
"""Sent to the main thread to end a blocking system call. Ray's workers block SIGINT;
processes without a handler ignore this signal."""
UNHEARD: Final = 0.25
"""Seconds within which a running loop handles a cancel."""
WAKES: Final = 50
"""Signals for one interrupt: the main thread may block a moment after the first."""


class Interrupts:
    """Interrupts each task at most once, at a safe point.

    Ray raises an interrupt at any moment of a task, and may raise several, so the next
    would cut the cleanup after the first short. Here the first interrupt ends the
    task's code, as on other engines, and the rest are ignored. Library code and imports
    are not interrupted: an interrupt is deferred until they have ended.

    Ray interrupts by `interrupt_main`, which sends no signal, so a blocking system
    call, such as in `time.sleep`, would go on. So a thread watches Python's wakeup
    descriptor, and sends real signals until the interrupt is raised.

    Attributes:
        has_come: the running task was interrupted.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._is_enabled = False
        self._is_pending = False
        self._since = 0.0
        self._depth = 0
        self._wake: Callable[[], object] | None = None
        self._wakeup: socket.socket | None = None

    def install(self) -> None:
        """Handle Ray's interrupts, if this is the main thread."""
        if not _is_main():
            return
        if signal.getsignal(signal.SIGINT) != self._on_interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
            signal.signal(WAKE, self._look)
        if self._wakeup is None:
            heard, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            start_new_thread(self._relay, (heard, get_ident()))
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Context manager: an interrupt ends the code of the block, a task's code."""
        if not _is_main():
            yield
            return
        self.has_come = self._is_pending = False
        self._is_enabled = True
        try:
            yield
        finally:
            self._is_enabled = False
            self._is_pending = False

    def _relay(self, heard: socket.socket, main: int) -> None:
        """Watch the signals that Python receives, in a thread."""
        while numbers := heard.recv(64):
            if signal.SIGINT in numbers:
                self._insist(main)

    def _insist(self, main: int) -> None:
        """Send signals to the main thread until its interrupt is raised."""
        wakes = WAKES
        while self._is_enabled and not self.has_come and (wakes or self._is_pending):
            if self._is_pending and not self._depth:
                interrupt_main(WAKE)  # does not disturb system calls of an import
            else:
                signal.pthread_kill(main, WAKE)
            time.sleep(LOOK_AGAIN)
            wakes = max(wakes - 1, 0)

    @contextmanager
    def deferred(self, wake: Callable[[], object] | None = None) -> Iterator[None]:
        """Context manager: raise an interrupt of the block at the block's end.

        Of nested blocks the outermost raises it, unless it is taken before. Only the
        main thread is interrupted.

        Args:
            wake: called by the signal handler when an interrupt was deferred; None for
                the outer block's function.
        """
        if not _is_main():
            yield
            return
        before = self._wake
        self._depth += 1
        self._wake = wake or before
        try:
            yield
        finally:
            self._wake = before
            self._depth -= 1
            if not self._depth and self.take():
                raise KeyboardInterrupt

    def is_due(self) -> bool:
        """Return whether an interrupt is raised at the end of the current block."""
        return self._is_pending and self._depth == 1 and _is_main()

    def take(self) -> bool:
        """Take a deferred interrupt; if True, the caller must end the task's code."""
        if not self._is_pending or not _is_main():
            return False
        self._is_pending = False
        self.has_come = True
        return True

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_enabled and not self.has_come:
            if not self._is_pending:
                self._is_pending, self._since = True, time.monotonic()
            self._raise(frame)

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_pending:
            self._raise(frame)

    def _raise(self, frame: FrameType | None) -> None:
        """Interrupt the main thread, unless it must wait; see `_insist`."""
        if self._depth:
            if self._wake is None:
                return
            # A coroutine that blocks its loop never sees a cancel.
            if time.monotonic() < self._since + UNHEARD:
                self._wake()
                return
        if not is_importing(frame) and self.take():
            raise KeyboardInterrupt


def _is_main() -> bool:
    # `threading.current_thread` would create an object for each of Ray's threads.
    return get_ident() == threading.main_thread().ident


interrupts: Final = Interrupts()
"""The interrupts of this process."""


# Event loops

SLICE: Final = 0.05
"""Seconds of one wait: Ray interrupts a task only between two steps of its code."""
SHARED_SLICE: Final = 0.005
"""The same if the task also waits for descriptors."""
DELIVERY: Final = 0.001
"""Seconds for the delivery of ready objects from Ray's thread."""
MOST_ENDS: Final = 10
"""Exceptions from leftover callbacks that are tolerated when a loop is settled."""


class _RaySelector(EpollSelector):
    """Waits in Ray, if there are objects to wait for.

    Ray then knows that the task is blocked, and lends its CPUs to other tasks.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        # Before the poll: an object that is ready later is seen by the poll or by Ray.
        refs = self._calls.awaited()
        ready = super().select(0)
        if ready:
            return ready
        slice_ = SLICE if len(self.get_map()) == 1 or not refs else SHARED_SLICE
        wait = slice_ if timeout is None else min(timeout, slice_)
        if not refs:
            return super().select(wait)
        return super().select(DELIVERY if cluster.wait(refs, wait) else 0)


class TaskLoop:
    """The event loop of a thread, kept between tasks.

    Attributes:
        loop: the asyncio loop.
    """

    def __init__(self, calls: Calls) -> None:
        """Make a loop that waits for the objects of these calls while it is idle."""
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(
            _RaySelector(calls)
        )
        self._runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self._runner.get_loop()
        self._main: asyncio.Task[Any] | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await an awaitable of the task, in a copy of the caller's context.

        An interrupt cancels the awaitable, and is raised when it has ended.
        """
        with interrupts.deferred(self._wake):
            try:
                return self._runner.run(self._awaited(awaitable))
            except asyncio.CancelledError:
                if not interrupts.has_come:
                    raise
                raise KeyboardInterrupt from None
            except (SystemExit, KeyboardInterrupt):
                self.settle()
                raise

    async def _awaited(self, awaitable: Awaitable[Any]) -> Any:
        self._main = asyncio.current_task()
        try:
            self._cancel_main()  # an interrupt may have arrived before
            return await awaitable
        finally:
            self._main = None

    def _wake(self) -> None:
        # On the loop: a cancel may run any code, and could wait for a lock that the
        # interrupted code holds.
        self.loop.call_soon_threadsafe(self._cancel_main)

    def _cancel_main(self) -> None:
        if self._main is not None and interrupts.take():
            self._main.cancel()

    def settle(self) -> None:
        """Run the callbacks that are due.

        Code that ends the loop by an exception may leave the loop's own stop callback
        behind, which would stop the next run.
        """
        for _ in range(MOST_ENDS):
            stop = self.loop.call_soon(self.loop.stop)
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                stop.cancel()  # other code has ended the loop

    def cancel_all(self) -> None:
        """Cancel the asyncio tasks left on the loop, and wait for their end.

        An interrupt cancels them again, and is raised when they have ended.
        """
        remaining = asyncio.all_tasks(self.loop)
        if remaining:
            self.run(_cancel(remaining))


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# The client of this process


EngineFactory = Callable[[asyncio.AbstractEventLoop], Any]
"""Makes the `RayEngine` of a process. It is sent with the code, since this module
cannot import the class."""


class LoopReceiver:
    """Settles a receiver on its own event loop, from any thread."""

    def __init__(self, receiver: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.receiver = receiver
        self._loop = loop

    def settle(self, outcome: Outcome) -> None:
        """Receive the outcome; see `Receiver`."""
        self._tell(self.receiver.settle, outcome)

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Receive pickled items; see `ItemReceiver`."""
        self._tell(self.receiver.receive_items, payloads)

    def _tell(self, take: Callable[[Any], object], what: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(take, what)


class TaskClient:
    """The client of one of Ray's processes, for its tasks or its actor.

    See `interface.ActorClient`. Outcomes of calls are delivered on an event loop in a
    thread, also while no code of the process waits: an actor may be idle for a long
    time, and undelivered answers would keep objects alive.

    Attributes:
        upsets: number of plain code's requests that have ended without a result.
        calls: the calls of the process.
    """

    waits = None

    def __init__(self, make_engine: EngineFactory) -> None:
        self.upsets = 0
        loop = asyncio.new_event_loop()
        self._engine = make_engine(loop)
        self.calls: Calls = self._engine.calls
        self.remote_values: RayValues = self._engine.remote_values
        self._delivered = threading.Condition(self.calls.lock)
        self.calls.on_delivered = self._delivered.notify_all
        self._loops = threading.local()
        self._found: dict[int, Any] = {}
        threading.Thread(
            target=loop.run_forever, name="aiogpu-calls", daemon=True
        ).start()

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        """Context manager: lock the engine for this thread, and defer interrupts."""
        with interrupts.deferred(), self.calls.lock:
            yield self._engine

    @property
    def task_loop(self) -> TaskLoop:
        """The event loop of this thread."""
        task_loop: TaskLoop | None = getattr(self._loops, "loop", None)
        if task_loop is None:
            task_loop = self._loops.loop = TaskLoop(self.calls)
        return task_loop

    def end_task(self) -> None:
        """End the task's asyncio tasks and children."""
        loop: TaskLoop | None = getattr(self._loops, "loop", None)
        # An interrupt is dropped: the task's code has already ended.
        with suppress(KeyboardInterrupt), interrupts.deferred():
            try:
                if loop is not None:
                    loop.cancel_all()
            finally:
                current.task = 0
                with self._locked() as engine:
                    engine.end_children()
                if loop is not None:
                    # Else the loop keeps delivered objects until the next coroutine.
                    loop.settle()

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
        with interrupts.deferred():
            while not (is_done() or interrupts.is_due()):
                seconds = SLICE
                if deadline is not None:
                    seconds = min(deadline - time.monotonic(), SLICE)
                    if seconds <= 0:
                        return False
                refs = self.calls.awaited()
                if refs:
                    seconds = DELIVERY if cluster.wait(refs, seconds) else 0
                with self._delivered:
                    if seconds and not is_done():
                        self._delivered.wait(seconds)
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
        with self._locked() as engine:
            number: int = engine.submit(func, payload, _on_this_loop(receiver))
        return number

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor, or send a query of `wire.messages` instead.

        Returns:
            The number of the call; 0 for a query, which cannot be cancelled.

        Raises:
            MisuseError: no task runs any more.
        """
        _check_running(method)
        receiver, number = _on_this_loop(receiver), 0
        with self._locked() as engine:
            called = engine.actors.held(actor)
            if method == READY:
                called.await_ready(receiver)
            elif method == LOST:
                number = called.await_loss(receiver)
            elif method == ENDED:
                called.await_end(receiver)
            elif method == CAPACITY:
                engine.actors.tell_room(actor, receiver)
            else:
                number = called.call(method, payload, receiver)
        return number

    def report(self, _payload: bytes) -> NoReturn:
        """Refuse reports: Ray could send them only by blocking the task.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "aiogpu.report() was called in a task on a Ray cluster, which delivers no "
            "reports. Yield the reports from a generator, whose items are delivered "
            "one by one, or run on an aiogpu node (docs/engines.md)."
        )

    def demand(self, child: int, limit: int) -> None:
        """Set the number of items that a child's stream may yield in all."""
        with self._locked() as engine:
            engine.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Cancel a child whose result is not needed."""
        self.upsets += 1
        with self._locked() as engine:
            engine.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """Cancel a child from a finalizer."""
        self.calls.loop.call_soon_threadsafe(self.withdraw, child)

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
        with self._locked() as engine:
            return engine.actors.create(func, payload, key, get_if_exists)

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Look an actor up by its name; the receiver is settled at once."""
        with self._locked() as engine:
            actor = engine.actors.find((namespace, name))
            if actor is not None:
                self._found[actor.id] = actor
        if actor is None:
            error = ActorNameError(f"there is no actor named {name!r} on this cluster.")
            receiver.settle(error)
        else:
            interface = actor.func.actor.packed_interface()
            receiver.settle(dump_whole((actor.id, actor.name, interface)))
        return 0

    def own(self, actor: int) -> Any:
        """Return the hold of an actor found by name."""
        with self._locked() as engine:
            return self._found.pop(actor, None) or engine.actors.held(actor)

    def actor(self, actor: int, name: str) -> Any:
        """Return the hold of an actor while its handle is unpickled."""
        with self._locked() as engine:
            return engine.actors.held(actor, name)

    def pass_on(self, hold: Any) -> None:
        """Add an actor's reference to the value that is being pickled."""
        hold.pass_on(hold)

    def stop(self, actor: int, how: str) -> None:
        """End an actor; `how` is explained at `wire.messages.Stop`."""
        with self._locked() as engine:
            if how == AFTER_ALL:
                engine.actors.terminate(actor)
            else:
                engine.actors.kill(actor, no_restart=how != AGAIN)


def _on_this_loop(receiver: Receiver) -> Any:
    """Wrap a receiver to be settled on the running event loop, if there is one."""
    loop = asyncio._get_running_loop()
    return receiver if loop is None else LoopReceiver(receiver, loop)


def _check_running(name: str) -> None:
    """Refuse requests of ended tasks and of modules that are being imported."""
    if current.is_loading:
        refuse_while_importing()
    if current.actor is None:
        check_task_runs(name)


def task_client() -> TaskClient:
    """Return the client of this process."""
    return cast("TaskClient", client_of_process())


def _leave() -> None:
    """Drop the client in a fork: only the parent has Ray's threads."""
    current.client = None


# The parts of a call that differ


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


class Suspended:
    """Awaitable: suspends a coroutine with an item for Ray, or a future for a loop."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._value


# Code

_retry_rules: Final = RetryRules()
device_kinds: Final[list[str]] = []
"""The kinds of devices that the cluster has, as far as this process knows."""
_adopted: Final[set[tuple[str, ...]]] = set()


class RemoteCode:
    """A function or class with its options, as it is sent to a worker.

    Attributes:
        name: name of the task or actor.
        resources: its resources.
        retried: exceptions after which the task is retried; see `Define.retried`.
        limits: for an actor, number of concurrent calls by concurrency group.
        groups: for an actor, the groups of methods outside the default group.
        kinds: the kinds of devices that the cluster has.
        make_engine: makes the engine for its code.
        functions: holds the function or class as number 0.
    """

    def __init__(self, func: FunctionSpec, make_engine: EngineFactory) -> None:
        self.name = func.spec.name
        self.resources = dict(func.resources)
        self.retried = func.retried
        self.limits = {} if func.actor is None else dict(func.actor.limits)
        self.groups = {} if func.actor is None else dict(func.actor.groups)
        self.kinds = tuple(device_kinds)
        self.make_engine = make_engine
        self._search_path = tuple(os.path.abspath(place) for place in sys.path)
        self.functions = Functions()
        self.functions.payloads[0] = func.function.payload

    def __repr__(self) -> str:
        return f"<RemoteCode {self.name}>"

    def adopt_path(self) -> None:
        """Append the program's module search path to this process's."""
        if self._search_path not in _adopted:
            _adopted.add(self._search_path)
            for place in self._search_path:
                if place not in sys.path and os.path.exists(place):
                    sys.path.append(place)


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

HIDING: Final = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    cluster.NEURON_CORES: "NEURON_RT_VISIBLE_CORES",
}
"""The variables that hide devices, by kind; Ray sets them for tasks with devices."""
DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"


def set_up_process(code: RemoteCode) -> None:
    """Hide the devices that the code may not use, and set its context.

    Ray has set the variables of assigned devices.
    """
    code.adopt_path()
    devices = cluster.accelerators()
    device_kinds[:] = code.kinds
    for kind in ("GPU", *code.kinds):
        variable = HIDING.get(kind)
        if (
            variable
            and not devices.get(kind)
            and not is_left_alone(variable, os.environ)
        ):
            os.environ[variable] = ""
    if not is_left_alone(HIDING["GPU"], os.environ):
        os.environ.setdefault(DEVICE_ORDER, "PCI_BUS_ID")
    node, worker, _ = cluster.process_ids()
    current.node, current.worker = node, int(worker[:12], 16)
    current.name = code.name
    current.resources, current.accelerators = code.resources, devices
    if current.client is None:
        current.client = TaskClient(code.make_engine)
        os.register_at_fork(after_in_child=_leave)


@contextmanager
def _task_context(code: RemoteCode) -> Iterator[None]:
    """Context manager: run a task's code with its devices, ids and interrupts."""
    interrupts.install()
    set_up_process(code)
    current.task = int(cluster.task_id()[:12], 16)
    client = task_client()
    try:
        with interrupts.enabled():
            try:
                yield
            finally:
                client.end_task()
    finally:
        client.end_task()  # again, since an interrupt may have skipped the first call


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
    if interrupts.has_come and _is_main():
        raise cancelled(name)
    error = outcome.error
    if isinstance(error, TaskFailure):
        raise error
    failed = pack_failure(0, outcome.kind, error, OWN_FRAMES)
    if retried and failed.kind == RAISED:
        failed = _retry_rules.mark(failed, name, retried, error)
    clear_frames(error)
    raise (RetriedFailure if failed.is_retried else TaskFailure)(*failed)


def run_task(code: RemoteCode, arguments: Sequence[Any]) -> Any:
    """Run a task; return the value that Ray stores, or a tuple for several results.

    Raises:
        TaskFailure: the task has failed.
    """
    with _task_context(code):
        try:
            outcome = run_now(call_user(code.functions, 0, arguments))
        except BaseException as error:  # noqa: BLE001 - an interrupt in library code
            outcome = Raised(UNREADABLE, error)
        return result_of(code.name, outcome, code.retried)


def stream_task(code: RemoteCode, arguments: Sequence[Any]) -> Iterator[Any]:
    """Run a generator, which Ray makes wait for its consumer.

    Raises:
        TaskFailure: the task has failed.
    """
    with _task_context(code):
        try:
            running = call_user(code.functions, 0, arguments, is_stream=True)
            outcome = yield from running.__await__()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - an interrupt in library code
            outcome = Raised(UNREADABLE, error)
        result_of(code.name, outcome, code.retried)
