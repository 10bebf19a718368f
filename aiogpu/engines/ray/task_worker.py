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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from selectors import EpollSelector, SelectorKey
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from aiogpu.accelerators.listed_devices import is_left_alone
from aiogpu.client.current import (
    current,
    error_inside_task,
    host_of_task,
    passing,
    take_kept,
)
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.cluster import Ref, SerialThread
from aiogpu.engines.ray.errors import cancelled, pack_error
from aiogpu.engines.ray.tasks import Calls, RayValues
from aiogpu.engines.ray.values import from_arguments, pack, source_of, to_stored
from aiogpu.errors import SerializationError
from aiogpu.serialization.exceptions import RAISED, UNREADABLE, UNSENDABLE
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    SplitResults,
    dump_result,
    load_arguments,
    load_function,
    split_results,
)
from aiogpu.wire.messages import Define
from aiogpu.worker.execute import is_coroutine
from aiogpu.worker.interrupts import imports
from aiogpu.worker.invoke import RetryRules

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Receiver

# Interrupts

AGAIN: Final = 0.02
"""Seconds between two looks at whether an import has ended."""
LOOK: Final = signal.SIGRTMAX
"""The signal whose handler looks, in the main thread; nobody really sends it."""
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
    Python's wakeup descriptor, and sends a real signal.

    Attributes:
        has_come: whether the running task was interrupted.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._is_enabled = False
        self._is_pending = False
        self._depth = 0
        self._wake: Callable[[], object] | None = None
        self._wakeup: socket.socket | None = None
        self._is_forced = False

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """An interrupt ends the code of the block, which is a task's."""
        if not _is_main():
            yield
            return
        if signal.getsignal(signal.SIGINT) != self._on_interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
            signal.signal(WAKE, self._on_wake)
        self._listen()
        self.has_come = self._is_pending = False
        self._is_enabled = True
        try:
            yield
        finally:
            self._is_enabled = False
            self._is_pending = False

    def _listen(self) -> None:
        """Have a thread told of each signal that Python notes."""
        if self._wakeup is None:
            heard, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            start_new_thread(self._relay, (heard, get_ident()))
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def _relay(self, heard: socket.socket, main: int) -> None:
        while numbers := heard.recv(64):
            if signal.SIGINT not in numbers and LOOK not in numbers:
                continue
            for _ in range(WAKES):
                signal.pthread_kill(main, WAKE)
                is_taken = not self._is_enabled or self.has_come or self._is_pending
                if is_taken or signal.SIGINT not in numbers:
                    break
                time.sleep(AGAIN)
            self._force(main)

    def _force(self, main: int) -> None:
        """End a coroutine that blocks its loop, which cannot hear of a cancel."""
        until = time.monotonic() + UNHEARD
        while self._is_pending and self._wake is not None:
            if time.monotonic() > until:
                self._is_forced = True
                signal.pthread_kill(main, WAKE)
                return
            time.sleep(AGAIN)

    def _on_wake(self, _signal: int, frame: FrameType | None) -> None:
        # Without force, the signal only ends what blocks.
        is_forced, self._is_forced = self._is_forced, False
        if is_forced and not imports(frame) and self.take():
            raise KeyboardInterrupt

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
            self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        """End the code of the main thread, now or as soon as it may be ended."""
        if self._depth:
            self._is_pending = True
            if self._wake is not None:
                self._wake()
        elif imports(frame):
            is_watched, self._is_pending = self._is_pending, True
            if not is_watched:
                signal.signal(LOOK, self._look)
                # `threading` takes a lock for it, which the import may hold.
                start_new_thread(self._watch, ())
        else:
            self._is_pending = False
            self.has_come = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        while self._is_pending:
            time.sleep(AGAIN)
            interrupt_main(LOOK)

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_pending and not self._depth:
            self._interrupt(frame)


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
        refs = (
            ref
            for call in calls
            for ref in call.refs or ((call.generator,) if call.generator else ())
        )
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
        self._turns = threading.Condition()
        self._is_run = False
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
        with self._turns:
            if self._waiters:
                return
            if self._delivery_thread is None:
                self._delivery_thread = SerialThread("aiogpu-delivery")
        self._delivery_thread.submit(self._deliver)

    def _deliver(self) -> None:
        if self._begin_turn(lambda: True):
            try:
                self.settle()
            finally:
                self._end_turn()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await something of the task's, in a copy of the caller's context.

        An interrupt cancels it, and is raised when it has ended by that.
        """
        with interrupts.deferred(self._wake):
            while not self._begin_turn(lambda: False):
                continue  # another thread delivers what has come
            try:
                return self._runner.run(self._awaited(awaitable))
            except asyncio.CancelledError:
                if not interrupts.has_come:
                    raise
                raise KeyboardInterrupt from None
            except (SystemExit, KeyboardInterrupt):
                self.settle()
                raise
            finally:
                self._end_turn()

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
                    if self._begin_turn(is_done):
                        try:
                            self._run_slice()
                        finally:
                            self._end_turn()
                return True
            finally:
                self._add_waiters(-1)
                calls = self._selector.calls
                if self._is_of_actor and calls is not None and calls.is_posted:
                    self._deliver_later()

    def _add_waiters(self, more: int) -> None:
        with self._turns:
            self._waiters += more
            self._selector.is_shared = self._waiters > 1

    def _begin_turn(self, is_done: Callable[[], bool]) -> bool:
        """Wait a slice for the turn to run the loop; return whether it has come."""
        with self._turns:
            self._turns.wait_for(lambda: not self._is_run or is_done(), SLICE)
            if self._is_run:
                return False
            self._is_run = True
            return True

    def _end_turn(self) -> None:
        with self._turns:
            self._is_run = False
            self._turns.notify_all()

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


class TaskEngine(Protocol):
    """What a task's client needs of the engine on its loop."""

    @property
    def calls(self) -> Calls:
        """What runs."""
        ...

    @property
    def far(self) -> RayValues:
        """The values of the cluster."""
        ...

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task."""
        ...

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor."""
        ...

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all."""
        ...

    def cancel(self, task: int) -> None:
        """Stop a task or a call."""
        ...

    def end_children(self) -> None:
        """Stop the tasks that are left."""
        ...


EngineFactory = Callable[[asyncio.AbstractEventLoop], TaskEngine]
"""Makes the engine of code on a loop. It comes with the code: no module of a worker's
needs to know the engine's."""
_engines: Final[dict[asyncio.AbstractEventLoop, TaskEngine]] = {}


class TaskClient:
    """The client of one task's code, or of one actor's; see `interface.Host`.

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

    def __repr__(self) -> str:
        return "<TaskClient>"

    @property
    def task_loop(self) -> TaskLoop:
        """The loop of the task's own thread, or of the actor."""
        found = self._loop or task_loop()
        found.wait_for(self._engine_on(found.loop).calls)
        return found

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop on which plain code of this thread has its calls carried."""
        return self.task_loop.loop

    def engine(self, loop: asyncio.AbstractEventLoop | None) -> TaskEngine:
        """Return who takes the calls of code on a loop; None is plain code."""
        return self._engine_on(loop or self.program)

    def _engine_on(self, loop: asyncio.AbstractEventLoop) -> TaskEngine:
        engine = _engines.get(loop)
        if engine is None:
            for closed in [one for one in _engines if one.is_closed()]:
                del _engines[closed]
            engine = _engines[loop] = self._make_engine(loop)
        return engine

    @property
    def _engine(self) -> TaskEngine:
        return self.engine(asyncio._get_running_loop())

    @property
    def far(self) -> RayValues:
        """The values of the cluster."""
        return self._engine.far

    @property
    def waits(self) -> TaskClient:
        """Nobody needs to be told of waits: a loop that is idle waits in Ray."""
        return self

    def begin_wait(self, task: int) -> None:
        """Do nothing; see `waits`."""

    def settle(self, task: int) -> None:
        """Do nothing; see `waits`."""

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """Do nothing; see `waits`."""

    def end_wait(self, waiter: object) -> None:
        """Do nothing; see `waits`."""

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until something is done; return False on timeout."""
        return self.task_loop.run_until(is_done, deadline)

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; return its number."""
        with interrupts.deferred():
            return self._engine.submit(site, payload, receiver)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; return the call's number."""
        with interrupts.deferred():
            return self._engine.call(actor, method, payload, receiver)

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        with interrupts.deferred():
            self._engine.demand(child, limit)

    def cancel(self, task: int) -> None:
        """Stop a child or a call."""
        with interrupts.deferred():
            self._engine.cancel(task)

    def withdraw(self, child: int) -> None:
        """Stop a child whose result nobody wants."""
        self.upsets += 1
        self.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """Stop such a child where the garbage collector runs."""
        engine = self._engine
        with suppress(RuntimeError):  # the loop is closed
            engine.calls.loop.call_soon_threadsafe(engine.cancel, child)

    async def why(self, name: str, task: int) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {name}")

    def load(
        self, function: Callable[..., Any], payload: bytes
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unpickle the arguments; handles for a coroutine belong to its loop."""
        if not (_has_references(payload) and is_coroutine(function)):
            return load_arguments(payload)
        loop = self.program
        try:
            # Within: an interrupt may come as soon as it is set.
            asyncio._set_running_loop(loop)
            return load_arguments(payload)
        finally:
            asyncio._set_running_loop(None)

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


def _has_references(payload: bytes) -> bool:
    """Return whether unpickling it makes handles."""
    source = source_of(payload)
    if source is None:
        return has_handles(payload)
    parts: tuple[bytes, ...] = payload.parts  # type: ignore[attr-defined]
    return bool(source.references) or any(map(_has_references, parts))


# Code

_retry_rules: Final = RetryRules()
_adopted: Final[set[tuple[str, ...]]] = set()


class RemoteCode:
    """A function or a class with its options, as it comes to a worker.

    Attributes:
        name: of the task or the actor.
        resources: what it holds.
        retried: after which exceptions the task is run again; see `Define.retried`.
        limits: of an actor, by concurrency group, how many calls run at once.
        groups: of an actor, the groups of those methods that are not in the default.
        make_engine: makes the engine of its code.
    """

    def __init__(self, site: Site, make_engine: EngineFactory) -> None:
        self.name = site.spec.name
        self.resources = dict(site.resources)
        self.retried = site.retried
        self.limits = {} if site.actor is None else dict(site.actor.limits)
        self.groups = {} if site.actor is None else dict(site.actor.groups)
        self.make_engine = make_engine
        self._search_path = tuple(os.path.abspath(place) for place in sys.path)
        self._payload = site.function.payload
        self._loaded: Any = None

    def __repr__(self) -> str:
        return f"<RemoteCode {self.name}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}

    def load(self) -> Any:
        """Unpickle it, once. Modules are found where the program finds them.

        Ray has set the variables of devices by then.
        """
        if self._loaded is None:
            if self._search_path not in _adopted:
                _adopted.add(self._search_path)
                for place in self._search_path:
                    if place not in sys.path and os.path.exists(place):
                        sys.path.append(place)
            self._loaded = load_function(self._payload)
        return self._loaded

    def wants_retry(self, error: BaseException) -> bool:
        """Return whether the options want the task run again after that error."""
        if not self.retried:
            return False
        definition = Define(0, 0, self.name, {}, b"", self.retried)
        return _retry_rules.wants(definition, error)


def make_runner(code: RemoteCode) -> Callable[..., Any]:
    """Return the function that Ray runs as a task."""

    def run(*given: Any) -> Any:
        return run_task(code, given)

    run.__name__ = run.__qualname__ = code.name
    return run


def make_streamer(code: RemoteCode) -> Callable[..., Any]:
    """Return the generator function that Ray runs as a task."""

    def run(*given: Any) -> Any:
        yield from stream_task(code, given)

    run.__name__ = run.__qualname__ = code.name
    return run


# Running

HIDING: Final = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    cluster.NEURON_CORES: "NEURON_RT_VISIBLE_CORES",
}
"""The variables that hide devices, by kind; Ray sets them for tasks that have some."""
DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"


def set_up_process(name: str, resources: Mapping[str, float]) -> None:
    """Hide the devices that the code may not use, and fill in its context."""
    found = cluster.accelerators()
    for kind, variable in HIDING.items():
        if not found.get(kind) and not is_left_alone(variable, os.environ):
            os.environ[variable] = ""
    if not is_left_alone(HIDING["GPU"], os.environ):
        os.environ.setdefault(DEVICE_ORDER, "PCI_BUS_ID")
    node, worker, _ = cluster.process_ids()
    current.node, current.worker = node, int(worker[:12], 16)
    current.name = name
    current.resources, current.accelerators = resources, found


@contextmanager
def _task_context(code: RemoteCode) -> Iterator[TaskClient]:
    """Give a task's code its devices, ids and client."""
    set_up_process(code.name, code.resources)
    current.task = int(cluster.task_id()[:12], 16)
    client = TaskClient(code.make_engine)
    token = host_of_task.set(client)
    try:
        yield client
    finally:
        try:
            client.end()  # no interrupt is raised any more that could skip it
        finally:
            host_of_task.reset(token)


def run_task(code: RemoteCode, given: Sequence[Any]) -> Any:
    """Run a task; return what Ray keeps of its result, or of each of several.

    Raises:
        TaskFailure: it has none.
    """
    with _task_context(code) as client, interrupts.enabled():
        kind = UNREADABLE
        try:
            function = code.load()
            payload = from_arguments(*given)
            args, kwargs = client.load(function, payload)
            kind = RAISED
            value = function(*args, **kwargs)
            if type(value) is CoroutineType:
                value = client.task_loop.run(value)
            value = split_results(value, payload)
            kind = UNSENDABLE
            return pack_result(value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            raise _failure(code, kind, error) from None
        finally:
            client.end()
            release_pickled_handles()


def stream_task(code: RemoteCode, given: Sequence[Any]) -> Iterator[Any]:
    """Run a generator; Ray has it wait for its consumer.

    Raises:
        TaskFailure: it has failed.
    """
    with _task_context(code) as client, interrupts.enabled():
        kind = UNREADABLE
        try:
            function = code.load()
            args, kwargs = client.load(function, from_arguments(*given))
            kind = RAISED
            items = _iterate(function(*args, **kwargs), client)
            for place, item in enumerate(items, 1):
                kind = UNSENDABLE
                yield pack_item(place, item)
                kind = RAISED
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            raise _failure(code, kind, error) from None
        finally:
            client.end()
            release_pickled_handles()


def _iterate(items: Any, client: TaskClient) -> Iterator[Any]:
    if not hasattr(items, "__anext__"):
        yield from items
        return
    loop = client.task_loop
    try:
        while True:
            try:
                yield loop.run(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run(items.aclose())


def _failure(code: RemoteCode, kind: str, error: BaseException) -> BaseException:
    if interrupts.has_come:
        return cancelled(code.name)
    wants_retry = kind == RAISED and code.wants_retry(error)
    return pack_error(kind, error, is_retried=wants_retry)


def pack_result(value: object) -> Any:
    """Return what Ray keeps of a result, a tuple if there are several."""
    if type(value) is SplitResults:
        return tuple(map(pack_result, value))
    result = dump_result(value)
    release_pickled_handles()  # Ray's handles of these actors go along
    return to_stored(pack(result) if isinstance(result, PickledValue) else result)


def pack_item(place: int, item: object) -> Any:
    """Return what Ray keeps of an item of a stream.

    Raises:
        SerializationError: it cannot be pickled; `place` is in the message.
    """
    try:
        return pack_result(item)
    except SerializationError as error:
        raise SerializationError(
            f"item {place} of its stream is lost: {error}"
        ) from error


def release_pickled_handles() -> None:
    """Keep no actor alive whose handle was pickled here: it was sent, or never is."""
    if passing:
        take_kept()
