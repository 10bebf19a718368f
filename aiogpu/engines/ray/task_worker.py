"""A task in a worker of Ray's: its interrupts, its event loop, its client, its run."""

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
    READY,
    Done,
    Items,
)
from aiogpu.worker.interrupts import imports
from aiogpu.worker.invoke import (
    OWN_FRAMES,
    Arguments,
    Callables,
    Functions,
    Invoker,
    Raised,
    RetryRules,
    StreamSender,
    invoke,
    is_coroutine,
    let_go,
    open_arguments,
    run_now,
)
from aiogpu.worker.nested import refuse_to_begin_anew
from aiogpu.worker.private_hooks import set_running_loop

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Outcome, Receiver

# Interrupts

LOOK_AGAIN: Final = 0.02
"""Seconds between two looks at whether an interrupt may be raised."""
WAKE: Final = signal.SIGURG
"""Sent to the main thread to end what blocks it. Ray's workers have SIGINT blocked;
a process that does not handle this one ignores it."""
UNHEARD: Final = 0.25
"""Seconds in which a running loop has heard of a cancel."""
WAKES: Final = 50
"""Signals for one interrupt: the main thread may block a moment after the first."""


class Interrupts:
    """Interrupts each task at most once, where it does no harm.

    Ray raises an interrupt at any moment of a task, and may raise several, so that
    the cleanup after the first is cut short by the next. Here the first one ends the
    task's code, as on other engines, and the rest are ignored. Library code and
    imports are not broken off: an interrupt is deferred until they have ended.

    Ray interrupts by `interrupt_main`, which sends no signal, so that a call which
    blocks in the kernel, such as `time.sleep`, would go on. So a thread is told by
    Python's wakeup descriptor, and sends real signals until the interrupt is raised.

    Attributes:
        has_come: whether the running task was interrupted.
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
        """Handle Ray's interrupts in this thread, if it is the main one."""
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
        """An interrupt ends the code of the block, which is a task's."""
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
        """Follow each signal that Python notes, in a thread."""
        while numbers := heard.recv(64):
            if signal.SIGINT in numbers:
                self._insist(main)

    def _insist(self, main: int) -> None:
        """Have the main thread look until its interrupt is raised."""
        wakes = WAKES
        while self._is_enabled and not self.has_come and (wakes or self._is_pending):
            if self._is_pending and not self._depth:
                interrupt_main(WAKE)  # disturbs no system call of an import
            else:
                signal.pthread_kill(main, WAKE)
            time.sleep(LOOK_AGAIN)
            wakes = max(wakes - 1, 0)

    @contextmanager
    def deferred(self, wake: Callable[[], object] | None = None) -> Iterator[None]:
        """Raise an interrupt that comes in the block at the block's end.

        Of nested blocks the outermost raises it, unless it is taken before. Threads
        other than the main one are never interrupted.

        Args:
            wake: called by the signal's handler when an interrupt was deferred; None
                leaves that to the block around this one.
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
        """Return whether one is raised as soon as the running block ends."""
        return self._is_pending and self._depth == 1 and _is_main()

    def take(self) -> bool:
        """Take a deferred interrupt: the caller ends the task's code."""
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
        """End the code of the main thread, unless that has to wait; see `_insist`."""
        if self._depth:
            if self._wake is None:
                return
            # A coroutine that blocks its loop never hears of a cancel.
            if time.monotonic() < self._since + UNHEARD:
                self._wake()
                return
        if not imports(frame) and self.take():
            raise KeyboardInterrupt


def _is_main() -> bool:
    # `threading.current_thread` would make an object for each of Ray's own threads.
    return get_ident() == threading.main_thread().ident


interrupts: Final = Interrupts()
"""Those of this process."""


# Event loops

SLICE: Final = 0.05
"""Seconds of one wait: Ray interrupts a task only between two steps of its code."""
SHARED_SLICE: Final = 0.005
"""The same if the task waits for descriptors of its own as well."""
DELIVERY: Final = 0.001
"""Seconds from Ray's thread to this one for what is ready."""
MOST_ENDS: Final = 10
"""Exceptions by which what is left on a loop may end it."""


class _RaySelector(EpollSelector):
    """Waits in Ray, if there is something to wait for.

    Ray then knows that the task is blocked, and gives its CPUs to others meanwhile.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        # Before the look: what ends after it is either seen by that or by Ray.
        refs = self._calls.awaited()
        found = super().select(0)
        if found:
            return found
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
        """Make one that waits for these calls while it is idle."""
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(
            _RaySelector(calls)
        )
        self._runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self._runner.get_loop()
        self._main: asyncio.Task[Any] | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await something of the task's, in a copy of the caller's context.

        An interrupt cancels it, and is raised when it has ended by that.
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
            self._cancel_main()  # an interrupt may have come before
            return await awaitable
        finally:
            self._main = None

    def _wake(self) -> None:
        # A cancel may do anything: take a lock, say, that the interrupted code holds.
        self.loop.call_soon_threadsafe(self._cancel_main)

    def _cancel_main(self) -> None:
        if self._main is not None and interrupts.take():
            self._main.cancel()

    def settle(self) -> None:
        """Run what is due once more.

        Code that ends the loop by an exception of its own may leave the loop's own stop
        behind, which would stop whatever is run next.
        """
        for _ in range(MOST_ENDS):
            stop = self.loop.call_soon(self.loop.stop)
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                stop.cancel()  # other code has ended the loop

    def cancel_all(self) -> None:
        """Cancel what the task has left running on the loop, and wait for its end.

        An interrupt cancels it once more, and is raised when it has ended.
        """
        left = asyncio.all_tasks(self.loop)
        if left:
            self.run(_cancel(left))


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# The client of this process


EngineFactory = Callable[[asyncio.AbstractEventLoop], Any]
"""Makes the `RayEngine` of a process. It comes with the code: that class is above this
module."""


class LoopReceiver:
    """Tells a receiver on its own event loop, from any thread."""

    def __init__(self, receiver: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.receiver = receiver
        self._loop = loop

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome; see `Receiver`."""
        self._tell(self.receiver.settle, outcome)

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items; see `ItemReceiver`."""
        self._tell(self.receiver.receive_items, payloads)

    def _tell(self, take: Callable[[Any], object], what: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(take, what)


class TaskClient:
    """The client of a process of Ray's: of its tasks one after the other, or its actor.

    See `interface.ActorClient`. Its calls end on an event loop that a thread runs. So
    what has come is delivered though no code of the process waits: an actor may be idle
    for long, and would keep alive whatever an answer holds that nobody has looked at.

    Attributes:
        upsets: how many requests of plain code have ended without a result so far.
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
        """Give this thread the engine, and defer interrupts meanwhile."""
        with interrupts.deferred(), self.calls.lock:
            yield self._engine

    @property
    def task_loop(self) -> TaskLoop:
        """The event loop of this thread."""
        found: TaskLoop | None = getattr(self._loops, "loop", None)
        if found is None:
            found = self._loops.loop = TaskLoop(self.calls)
        return found

    def end_task(self) -> None:
        """End what the task has left running, and what it has started."""
        loop: TaskLoop | None = getattr(self._loops, "loop", None)
        # An interrupt has nothing more to end: the task's code has ended.
        with suppress(KeyboardInterrupt), interrupts.deferred():
            try:
                if loop is not None:
                    loop.cancel_all()
            finally:
                current.task = 0
                with self._locked() as engine:
                    engine.end_children()
                if loop is not None:
                    # Else it keeps what has come until the next coroutine.
                    loop.settle()

    # Waits

    def note_wait(self, *_: object, **__: object) -> None:
        """Do nothing: whoever waits is blocked in Ray, which sees that by itself."""

    end_wait = note_wait

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until something is done; return False on timeout.

        Args:
            is_done: asked after each delivery.
            deadline: by `time.monotonic()`; None for no limit.
        """
        with interrupts.deferred():
            while not (is_done() or interrupts.is_due()):
                left = SLICE
                if deadline is not None:
                    left = min(deadline - time.monotonic(), SLICE)
                    if left <= 0:
                        return False
                refs = self.calls.awaited()
                if refs:
                    left = DELIVERY if cluster.wait(refs, left) else 0
                with self._delivered:
                    if left and not is_done():
                        self._delivered.wait(left)
            return True

    # Tasks and calls

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload of what is to be sent; see `Engine.pack`."""
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
        """Call a method of an actor, or ask what `wire.messages` names in its place.

        Returns the call's number; 0 for a question, which cannot be stopped.

        Raises:
            MisuseError: no task runs any more.
        """
        _check_running(method)
        receiver, number = _on_this_loop(receiver), 0
        with self._locked() as engine:
            called = engine.actors.held(actor)
            if method == READY:
                called.await_ready(receiver)
            elif method == ENDED:
                called.await_end(receiver)
            elif method == CAPACITY:
                engine.actors.tell_room(actor, receiver)
            else:
                number = called.call(method, payload, receiver)
        return number

    def report(self, _payload: bytes) -> NoReturn:
        """Refuse: Ray has no way for it that would not make the task wait.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "aiogpu.report() was called in a task on a Ray cluster, from which no "
            "reports come. Yield what you would report: the items of a generator come "
            "one by one there too; or run on a node of aiogpu's own (docs/engines.md)."
        )

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        with self._locked() as engine:
            engine.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Cancel a child whose result is not wanted."""
        self.upsets += 1
        with self._locked() as engine:
            engine.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """Stop such a child where the garbage collector runs."""
        self.calls.loop.call_soon_threadsafe(self.withdraw, child)

    # Actors

    def make(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> Any:
        """Have an actor made, or find the one of that name; see `ActorsPort.create`."""
        _check_running(func.spec.name)
        with self._locked() as engine:
            return engine.actors.create(func, payload, key, get_if_exists)

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Ask which actor has a name; it is told at once."""
        with self._locked() as engine:
            found = engine.actors.find((namespace, name))
            if found is not None:
                self._found[found.id] = found
        if found is None:
            error = ActorNameError(f"no actor named {name!r} lives on this cluster.")
            receiver.settle(error)
        else:
            interface = found.func.actor.packed_interface()
            receiver.settle(dump_whole((found.id, found.name, interface)))
        return 0

    def own(self, actor: int) -> Any:
        """Return the hold on an actor that was found."""
        with self._locked() as engine:
            return self._found.pop(actor, None) or engine.actors.held(actor)

    def actor(self, actor: int, name: str) -> Any:
        """Return the hold on an actor whose handle is being unpickled."""
        with self._locked() as engine:
            return engine.actors.held(actor, name)

    def pass_on(self, hold: Any) -> None:
        """A handle to the actor of a hold is being pickled."""
        hold.pass_on(hold)

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `wire.messages.Stop` for how."""
        with self._locked() as engine:
            if how == AFTER_ALL:
                engine.actors.terminate(actor)
            else:
                engine.actors.kill(actor, no_restart=how != AGAIN)


def _on_this_loop(receiver: Receiver) -> Any:
    """Return what tells a receiver on the running event loop, if there is one."""
    loop = asyncio._get_running_loop()
    return receiver if loop is None else LoopReceiver(receiver, loop)


def _check_running(name: str) -> None:
    """Refuse a request of a task that has ended, or of a module that it imports."""
    if current.is_loading:
        refuse_to_begin_anew()
    if current.actor is None:
        check_task_runs(name)


def task_client() -> TaskClient:
    """Return the client of this process."""
    return cast("TaskClient", client_of_process())


def _leave() -> None:
    """Leave the client to the parent of a fork, which has Ray's threads."""
    current.client = None


# The parts of a call that differ


class TaskInvoker(Invoker):
    """Calls user code, in plain code or on a loop that runs; see `invoke.Invoker`."""

    def load(self, function: Callable[..., Any], payload: bytes) -> Arguments:
        """Unpickle the arguments; handles for a coroutine belong to its loop."""
        # In an actor with coroutines that loop runs already.
        if is_loop_running() or not (has_handles(payload) and is_coroutine(function)):
            return open_arguments(payload)
        loop = task_client().task_loop.loop
        try:
            # Within: an interrupt may come as soon as it is set.
            set_running_loop(loop)
            return open_arguments(payload)
        finally:
            set_running_loop(None)

    async def wait(self, coroutine: Awaitable[Any], _call: int = 0) -> Any:
        """Run what plain code has to await on its loop; suspends nowhere itself."""
        if is_loop_running():
            return await coroutine
        return task_client().task_loop.run(coroutine)

    async def send_items(self, items: Any, _stream: object) -> None:
        """Run a generator of either kind; suspend with each item, packed for Ray.

        Ray takes items out of a generator. So whoever runs `invoke` yields what it
        suspends with, and Ray has that wait for the consumer.
        """
        sent: list[Items] = []
        flow = StreamSender(sent.append, 0, 0, 0, self.pack)
        is_async = hasattr(items, "__anext__")
        try:
            left = items if is_async else iter(items)
            while True:
                item = (
                    await self.wait(anext(left, _END)) if is_async else next(left, _END)
                )
                if item is _END:
                    break
                flow.send(item)
                del item  # it may be large, and the next is as well
                await Suspended(sent.pop().payloads[0])
        finally:
            if hasattr(items, "aclose"):
                await self.wait(items.aclose())
            elif hasattr(items, "close"):
                items.close()

    def pack(self, outgoing: PickledValue) -> Any:
        """Return what Ray keeps of a result, a tuple if there are several."""
        if outgoing.parts:
            return tuple(
                self.pack(part) if type(part) is PickledValue else part
                for part in outgoing.parts
            )
        return to_stored(pack(outgoing))


_invoker: Final = TaskInvoker()
_END: Final = object()
"""In place of an item after the last one."""


class Suspended:
    """Awaitable: suspends a coroutine with an item for Ray, or a future for a loop."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._value


# Code

_retry_rules: Final = RetryRules()
device_kinds: Final[list[str]] = []
"""The kinds of devices that the cluster has, as this process has seen or was told."""
_adopted: Final[set[tuple[str, ...]]] = set()


class RemoteCode:
    """A function or a class with its options, as it comes to a worker.

    Attributes:
        name: of the task or the actor.
        resources: what it holds.
        retried: after which exceptions the task is run again; see `Define.retried`.
        limits: of an actor, by concurrency group, how many calls run at once.
        groups: of an actor, the groups of those methods that are not in the default.
        kinds: the kinds of devices that the cluster has.
        make_engine: makes the engine of its code.
        functions: has the function or class as number 0.
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
        """Have modules found where the program finds them."""
        if self._search_path not in _adopted:
            _adopted.add(self._search_path)
            for place in self._search_path:
                if place not in sys.path and os.path.exists(place):
                    sys.path.append(place)


def make_runner(code: RemoteCode, *, is_stream: bool) -> Callable[..., Any]:
    """Return the function, or the generator function, that Ray runs as a task."""

    def run(*given: Any) -> Any:
        return run_task(code, given)

    def stream(*given: Any) -> Any:
        yield from stream_task(code, given)

    runner = stream if is_stream else run
    runner.__name__ = runner.__qualname__ = code.name
    return runner


# Running

HIDING: Final = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    cluster.NEURON_CORES: "NEURON_RT_VISIBLE_CORES",
}
"""The variables that hide devices, by kind; Ray sets them for tasks that have some."""
DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"


def set_up_process(code: RemoteCode) -> None:
    """Hide the devices that the code may not use, and fill in its context.

    Ray has set the variables of those that it may use.
    """
    code.adopt_path()
    found = cluster.accelerators()
    device_kinds[:] = code.kinds
    for kind in ("GPU", *code.kinds):
        variable = HIDING.get(kind)
        if variable and not found.get(kind) and not is_left_alone(variable, os.environ):
            os.environ[variable] = ""
    if not is_left_alone(HIDING["GPU"], os.environ):
        os.environ.setdefault(DEVICE_ORDER, "PCI_BUS_ID")
    node, worker, _ = cluster.process_ids()
    current.node, current.worker = node, int(worker[:12], 16)
    current.name = code.name
    current.resources, current.accelerators = code.resources, found
    if current.client is None:
        current.client = TaskClient(code.make_engine)
        os.register_at_fork(after_in_child=_leave)


@contextmanager
def _task_context(code: RemoteCode) -> Iterator[None]:
    """Give a task's code its devices and ids, and interrupt it if asked."""
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
        client.end_task()  # no interrupt is raised any more that could skip it


def call_user(
    functions: Callables,
    name: Any,
    given: Sequence[Any],
    *,
    is_stream: bool = False,
) -> Coroutine[Any, Any, Done | Raised]:
    """Return what calls user code by `invoke`, with what Ray has brought.

    Args:
        functions: has what is called.
        name: its name there.
        given: its arguments; see `from_arguments`.
        is_stream: whether it suspends with the items that the call yields.

    Raises:
        TaskFailure: one of the arguments will never be there.
    """
    payload = from_arguments(*given)
    return invoke(_invoker, 0, functions, name, payload, is_stream or None)


def result_of(name: str, outcome: Done | Raised, retried: bytes = b"") -> Any:
    """Return what Ray keeps of what a call has returned.

    Args:
        name: of the task or the actor.
        outcome: of the call.
        retried: after which errors of its code Ray is to run it again.

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
    let_go(error)
    raise (RetriedFailure if failed.is_retried else TaskFailure)(*failed)


def run_task(code: RemoteCode, given: Sequence[Any]) -> Any:
    """Run a task; return what Ray keeps of its result, or of each of several.

    Raises:
        TaskFailure: it has none.
    """
    with _task_context(code):
        try:
            outcome = run_now(call_user(code.functions, 0, given))
        except BaseException as error:  # noqa: BLE001 - an interrupt, amid code of ours
            outcome = Raised(UNREADABLE, error)
        return result_of(code.name, outcome, code.retried)


def stream_task(code: RemoteCode, given: Sequence[Any]) -> Iterator[Any]:
    """Run a generator; Ray has it wait for its consumer.

    Raises:
        TaskFailure: it has failed.
    """
    with _task_context(code):
        try:
            running = call_user(code.functions, 0, given, is_stream=True)
            outcome = yield from running.__await__()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - an interrupt, amid code of ours
            outcome = Raised(UNREADABLE, error)
        result_of(code.name, outcome, code.retried)
