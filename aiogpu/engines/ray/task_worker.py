"""A task in a worker of Ray's: its interrupts, its event loop, its client, its run.

Coroutines have an engine on their event loop, as programs have. Plain code has no loop:
what it starts is carried by a loop of its thread, which runs while the code waits.
"""

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
from itertools import chain, islice
from selectors import EpollSelector, SelectorKey
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.accelerators.listed_devices import is_left_alone
from aiogpu.client.current import (
    current,
    host_of_task,
    is_loop_running,
)
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.cluster import Ref, SerialThread
from aiogpu.engines.ray.errors import RetriedFailure, TaskFailure, cancelled
from aiogpu.engines.ray.tasks import Calls, RayValues
from aiogpu.engines.ray.values import from_arguments, pack, to_stored
from aiogpu.serialization.exceptions import RAISED, UNREADABLE, pack_failure
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.wire.messages import Done, Items
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
from aiogpu.worker.private_hooks import set_running_loop

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver

# Interrupts

AGAIN: Final = 0.02
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
            time.sleep(AGAIN)
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
AWAITED: Final = 1000
"""Objects that one wait is for, at most."""
MOST_ENDS: Final = 10
"""Exceptions by which what is left on a loop may end it."""


class _RaySelector(EpollSelector):
    """Waits in Ray, if there is something to wait for.

    Ray then knows that the task is blocked, and gives its CPUs to others meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls | None = None
        self.is_shared = False

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        found = super().select(0)
        if found:
            return found
        refs = self._awaited()
        is_alone = len(self.get_map()) == 1 and not self.is_shared
        slice_ = SLICE if is_alone or not refs else SHARED_SLICE
        wait = slice_ if timeout is None else min(timeout, slice_)
        if not refs:
            return super().select(wait)
        return super().select(DELIVERY if cluster.wait(refs, wait) else 0)

    def _awaited(self) -> Sequence[Ref]:
        if self.calls is None:
            return ()
        # A copy: other threads of an actor may make calls meanwhile.
        calls = [*islice(self.calls.live.values(), AWAITED)]
        refs = chain.from_iterable(call.awaited for call in calls)
        return list(islice(refs, AWAITED))


class TaskLoop:
    """The event loop of a thread, kept between tasks, or of all threads of an actor.

    The threads of an actor take turns in running the loop, so that what one of them
    has started another can wait for. What comes while none of them waits is delivered
    by a thread of the loop's own: an actor may be idle for long, and would keep alive
    whatever an answer holds that nobody has looked at.

    Attributes:
        loop: the asyncio loop.
    """

    def __init__(self, *, is_of_actor: bool = False) -> None:
        self._is_of_actor = is_of_actor
        self._delivery_thread: SerialThread | None = None
        self._turn = threading.Lock()  # whoever runs the loop has it
        self._waiters_lock = threading.Lock()
        self._waiters = 0
        self._selector = _RaySelector()
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(self._selector)
        self._runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self._runner.get_loop()
        self._main: asyncio.Task[Any] | None = None

    def wait_for(self, calls: Calls) -> None:
        """Wait for these calls while the loop is idle."""
        self._selector.calls = calls
        if self._is_of_actor:
            calls.on_posted = self._deliver_later

    def _deliver_later(self) -> None:
        """Have what has come delivered, from any thread; those who wait do it."""
        with self._waiters_lock:
            if self._waiters:
                return
            if self._delivery_thread is None:
                self._delivery_thread = SerialThread("aiogpu-delivery")
        self._delivery_thread.submit(self._deliver)

    def _deliver(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._turn.release()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await something of the task's, in a copy of the caller's context.

        An interrupt cancels it, and is raised when it has ended by that.
        """
        # Another thread may be delivering what has come.
        with interrupts.deferred(self._wake), self._turn:
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

    def run_until(self, is_done: Callable[[], bool], deadline: float | None) -> bool:
        """Run what is due until something is done; return False on timeout.

        Args:
            is_done: asked after each step.
            deadline: by `time.monotonic()`, as the loop's own clock; None for no limit.
        """
        with interrupts.deferred():
            self._add_waiters(1)
            try:
                while not (is_done() or interrupts.is_due()):
                    if deadline is not None and self.loop.time() >= deadline:
                        return False
                    if self._turn.acquire(timeout=SLICE):
                        try:
                            if not is_done():  # by another thread's turn
                                self._run_slice()
                        finally:
                            self._turn.release()
                return True
            finally:
                self._add_waiters(-1)
                calls = self._selector.calls
                if self._is_of_actor and calls is not None and calls.is_posted:
                    self._deliver_later()

    def _add_waiters(self, more: int) -> None:
        with self._waiters_lock:
            self._waiters += more
            self._selector.is_shared = self._waiters > 1

    def _run_slice(self) -> None:
        """Wait for what comes, for the length of a slice at most."""
        loop, calls = self.loop, self._selector.calls
        assert calls is not None, self
        alarm = loop.call_later(SLICE, loop.stop)
        calls.on_delivered = loop.stop
        try:
            loop.run_forever()
        finally:
            calls.on_delivered = None
            alarm.cancel()

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


class _Thread(threading.local):
    loop: TaskLoop | None = None


_thread: Final = _Thread()


def task_loop() -> TaskLoop:
    """Return the loop of this thread; make it when it is first asked for."""
    if _thread.loop is None:
        _thread.loop = TaskLoop()
    return _thread.loop


# The client of a task's code


EngineFactory = Callable[[asyncio.AbstractEventLoop], Any]
"""Makes the `RayEngine` of code on a loop. It comes with the code: that class is above
this module."""
_engines: Final[dict[asyncio.AbstractEventLoop, Any]] = {}


class TaskClient(Invoker):
    """The client of one task's code, or of one actor's, and where its calls run.

    See `interface.Host` and `invoke.Invoker`.

    Attributes:
        upsets: how many children of plain code have ended without a result so far.
    """

    def __init__(
        self, make_engine: EngineFactory, loop: TaskLoop | None = None
    ) -> None:
        """Carry plain code's calls on `loop`, or on a loop of each thread's own."""
        self.upsets = 0
        self._make_engine = make_engine
        self._loop = loop
        self._has_ended = False

    @property
    def task_loop(self) -> TaskLoop:
        """The loop of the task's own thread, or of the actor."""
        found = self._loop or task_loop()
        found.wait_for(self.engine(found.loop).calls)
        return found

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop on which plain code of this thread has its calls carried."""
        return self.task_loop.loop

    def engine(self, loop: asyncio.AbstractEventLoop | None) -> Any:
        """Return who takes the calls of code on a loop; None is plain code."""
        loop = loop or self.program
        engine = _engines.get(loop)
        if engine is None:
            for closed in [one for one in _engines if one.is_closed()]:
                del _engines[closed]
            engine = _engines[loop] = self._make_engine(loop)
        return engine

    @property
    def _engine(self) -> Any:
        return self.engine(asyncio._get_running_loop())

    @property
    def remote_values(self) -> RayValues:
        """The values of the cluster."""
        found: RayValues = self._engine.remote_values
        return found

    @property
    def waits(self) -> TaskClient:
        """There is no observer of waits: an idle loop waits in Ray."""
        return self

    def note_wait(self, *_: object, **__: object) -> None:
        """Do nothing; see `waits`."""

    begin_wait = end_wait = settle = note_wait

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until something is done; return False on timeout."""
        return self.task_loop.run_until(is_done, deadline)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; return its number."""
        with interrupts.deferred():
            number: int = self._engine.submit(func, payload, receiver)
        return number

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; return the call's number."""
        with interrupts.deferred():
            called = self._engine.actors.held(actor)
            number: int = called.call(method, payload, receiver)
        return number

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        with interrupts.deferred():
            self._engine.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Cancel a child whose result is not wanted."""
        self.upsets += 1
        with interrupts.deferred():
            self._engine.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """Stop such a child where the garbage collector runs."""
        engine = self._engine
        with suppress(RuntimeError):  # the loop is closed
            engine.calls.loop.call_soon_threadsafe(engine.cancel, child)

    def load(self, function: Callable[..., Any], payload: bytes) -> Arguments:
        """Unpickle the arguments; handles for a coroutine belong to its loop."""
        # In an actor with coroutines that loop runs already.
        if is_loop_running() or not (has_handles(payload) and is_coroutine(function)):
            return open_arguments(payload)
        loop = self.program
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
        return self.task_loop.run(coroutine)

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

    def end(self) -> None:
        """End what the task has started, once; the task has ended."""
        loop = _thread.loop
        if self._has_ended or loop is None:
            return
        # An interrupt has nothing more to end: the task's code has ended.
        with suppress(KeyboardInterrupt), interrupts.deferred():
            try:
                loop.cancel_all()
            finally:
                engine = _engines.get(loop.loop)
                if engine is not None:
                    if engine.calls.is_posted:
                        # Else what has come is kept until this process's next task.
                        loop.settle()
                    engine.end_children()
            self._has_ended = True


_END: Final = object()
"""In place of an item after the last one."""


class Suspended:
    """Awaitable: suspends a coroutine with an item for Ray, or a future for a loop."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, None]:
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


@contextmanager
def _task_context(code: RemoteCode) -> Iterator[TaskClient]:
    """Give a task's code its devices, ids and client, and interrupt it if asked."""
    interrupts.install()
    set_up_process(code)
    current.task = int(cluster.task_id()[:12], 16)
    client = TaskClient(code.make_engine)
    token = host_of_task.set(client)
    try:
        with interrupts.enabled():
            try:
                yield client
            finally:
                client.end()
    finally:
        try:
            client.end()  # no interrupt is raised any more that could skip it
        finally:
            host_of_task.reset(token)


def call_user(
    client: TaskClient,
    functions: Callables,
    name: Any,
    given: Sequence[Any],
    *,
    is_stream: bool = False,
) -> Coroutine[Any, Any, Done | Raised]:
    """Return what calls user code by `invoke`, with what Ray has brought.

    Args:
        client: of the code.
        functions: has what is called.
        name: its name there.
        given: its arguments; see `from_arguments`.
        is_stream: whether it suspends with the items that the call yields.

    Raises:
        TaskFailure: one of the arguments will never be there.
    """
    payload = from_arguments(*given)
    return invoke(client, 0, functions, name, payload, is_stream or None)


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
    with _task_context(code) as client:
        try:
            outcome = run_now(call_user(client, code.functions, 0, given))
        except BaseException as error:  # noqa: BLE001 - an interrupt, amid code of ours
            outcome = Raised(UNREADABLE, error)
        return result_of(code.name, outcome, code.retried)


def stream_task(code: RemoteCode, given: Sequence[Any]) -> Iterator[Any]:
    """Run a generator; Ray has it wait for its consumer.

    Raises:
        TaskFailure: it has failed.
    """
    with _task_context(code) as client:
        try:
            running = call_user(client, code.functions, 0, given, is_stream=True)
            outcome = yield from running.__await__()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - an interrupt, amid code of ours
            outcome = Raised(UNREADABLE, error)
        result_of(code.name, outcome, code.retried)
