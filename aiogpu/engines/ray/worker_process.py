"""What runs in the processes of Ray: a task, or an actor's object and its methods.

Ray has set the devices' variables by then. A function is unpickled when it is first
needed in a process. While a task has nothing to do but wait for calls that it has made,
its event loop waits in Ray, which so knows that the task is blocked, and gives its CPUs
to others meanwhile. It never waits long at a time: Ray interrupts a task between two
steps of its code only. A failed constructor is kept and told to whoever calls, with its
cause, which Ray itself would tell in its own words only.

Coroutines have a session on their event loop, as programs have. Plain code has no loop:
what it starts is carried on one of its thread's own, which runs while it waits. Above
the engine, since a task's own calls go through one (`RemoteCode`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cached_property
from inspect import iscoroutinefunction, signature
from itertools import count, islice
from selectors import EpollSelector, SelectorKey
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiogpu.accelerators.listed_devices import is_left_alone
from aiogpu.client.current import (
    ActorExit,
    current,
    error_inside_task,
    has_exited,
    host_of_task,
    method_called,
    passing,
    take_kept,
)
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.actors import Turns, understood
from aiogpu.engines.ray.cancellation import Cancels, interrupts
from aiogpu.engines.ray.engine import ClusterValues, RayEngine
from aiogpu.engines.ray.errors import TaskFailure, packed, stopped
from aiogpu.engines.ray.options import (
    Blueprint,
    Place,
    RemoteCode,
    Work,
    kinds_here,
)
from aiogpu.engines.ray.ray_api import OneThread
from aiogpu.engines.ray.values import (
    Broken,
    Stored,
    arrived,
    kept_in,
    packed_here,
    stored,
)
from aiogpu.errors import SerializationError
from aiogpu.runtime.actors.actor import died, not_made
from aiogpu.serialization.exceptions import (
    RAISED,
    STOPPED,
    UNREADABLE,
    UNSENDABLE,
    pack_own_error,
)
from aiogpu.serialization.payload import Payload, has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    SplitResults,
    dump_result,
    load_arguments,
    split_results,
)
from aiogpu.wire.messages import DEFAULT_GROUP
from aiogpu.worker.actors.serial import Methods
from aiogpu.worker.execute import is_coroutine

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.ray.ray_api import Ref
    from aiogpu.engines.ray.tasks import Calls


SLICE: Final = 0.05
"""Seconds of one wait, so that a cancel is heard."""


SHARED_SLICE: Final = 0.005
"""The same where the task waits for descriptors of its own as well."""


ON_ITS_WAY: Final = 0.001
"""Seconds for what is ready to be told of, from Ray's thread to this one."""


LOOKED_AT: Final = 1000
"""Objects that one wait is for, at most."""


MOST_ENDS: Final = 10
"""Exceptions by which what is left on a loop may end it."""


class _Waiting(EpollSelector):
    """Waits in Ray while there is something to wait for there."""

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
        calls, refs = self.calls, self._awaited()
        is_alone = len(self.get_map()) == 1 and not self.is_shared
        slice_ = SLICE if is_alone or not refs else SHARED_SLICE
        wait = slice_ if timeout is None else min(timeout, slice_)
        if calls is None or not refs:
            return super().select(wait)
        return super().select(ON_ITS_WAY if calls.wait(refs, wait) else 0)

    def _awaited(self) -> Sequence[Ref]:
        if self.calls is None:
            return ()
        # At once: other threads of an actor may make calls meanwhile.
        live = [*islice(self.calls.live.values(), LOOKED_AT)]
        refs = (ref for one in live for ref in one.refs or one.waitables)
        return list(islice(refs, LOOKED_AT))


class TaskLoop:
    """See above; one for each thread, kept between tasks, or one for all of an actor.

    The threads of an actor run it by turns, so that what one of them has started or
    was given another can wait for. What comes while none of them waits, a thread of
    the loop's own has delivered: an actor may be idle for long, and would keep alive
    whatever an answer holds that nobody has looked at.

    Attributes:
        loop: the loop.
    """

    def __init__(self, *, is_of_actor: bool = False) -> None:
        self._is_of_actor = is_of_actor
        self._attendant: OneThread | None = None
        self._turns = threading.Condition()
        self._is_run = False
        self._waiters = 0
        self._waiting = _Waiting()
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(self._waiting)
        self._runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self._runner.get_loop()
        self._main: asyncio.Task[Any] | None = None

    def wait_for(self, calls: Calls) -> None:
        """While it is idle, it waits for these."""
        self._waiting.calls = calls
        if self._is_of_actor:
            calls.on_posted = self._attend

    def _attend(self) -> None:
        """In any thread: something has come. Who waits delivers it himself."""
        with self._turns:
            if self._waiters:
                return
            if self._attendant is None:
                self._attendant = OneThread("aiogpu-attendant")
        self._attendant.submit(self._deliver)

    def _deliver(self) -> None:
        if self._begin_turn(lambda: True):
            try:
                self.settle()
            finally:
                self._end_turn()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await something of the task's, in a context that is a copy of the caller's.

        An interrupt cancels it, and is raised when it has ended by that.
        """
        with interrupts.put_off(self._wake):
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
            self._hear()  # what has come before it could be cancelled
            return await awaitable
        finally:
            self._main = None

    def _wake(self) -> None:
        # A cancel may do anything, take a lock say, that the interrupted code holds.
        self.loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
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
                stop.cancel()  # it was another's turn to end the loop

    def run_until(self, is_done: Callable[[], bool], deadline: float | None) -> bool:
        """Run what is due until something is done; False if time is up before.

        Args:
            is_done: asked after each step.
            deadline: by `time.monotonic()`, as the loop's own clock; None for no limit.
        """
        with interrupts.put_off():
            self._note_waiters(1)
            try:
                while not (is_done() or interrupts.is_due()):
                    if deadline is not None and self.loop.time() >= deadline:
                        return False
                    if self._begin_turn(is_done):
                        try:
                            self._turn()
                        finally:
                            self._end_turn()
                return True
            finally:
                self._note_waiters(-1)
                calls = self._waiting.calls
                if self._is_of_actor and calls is not None and calls.is_posted:
                    self._attend()

    def _note_waiters(self, more: int) -> None:
        with self._turns:
            self._waiters += more
            self._waiting.is_shared = self._waiters > 1

    def _begin_turn(self, is_done: Callable[[], bool]) -> bool:
        """Whether it is this thread's to run the loop; waits a slice for that."""
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

    def _turn(self) -> None:
        """Wait for what comes, for the length of a slice at most."""
        loop, calls = self.loop, self._waiting.calls
        assert calls is not None, self
        alarm = loop.call_later(SLICE, loop.stop)
        calls.on_delivered = loop.stop
        try:
            loop.run_forever()
        finally:
            calls.on_delivered = None
            alarm.cancel()

    def end_rest(self) -> None:
        """Cancel what the task has left running on the loop; nothing of it goes on.

        An interrupt cancels it once more, and is raised when it has ended.
        """
        rest = asyncio.all_tasks(self.loop)
        if rest:
            self.run(_ended(rest))


async def _ended(rest: Iterable[asyncio.Task[Any]]) -> None:
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


class _OfThread(threading.local):
    loop: TaskLoop | None = None


_of_thread: Final = _OfThread()


def task_loop() -> TaskLoop:
    """The loop of this thread; made when it is first asked for."""
    if _of_thread.loop is None:
        _of_thread.loop = TaskLoop()
    return _of_thread.loop


def has_loop() -> bool:
    """Return whether this thread has one yet."""
    return _of_thread.loop is not None


_engines: Final[dict[asyncio.AbstractEventLoop, RayEngine]] = {}


def engine_on(loop: asyncio.AbstractEventLoop) -> RayEngine:
    """The engine of code that runs on a loop in this process, which is Ray's."""
    engine = _engines.get(loop)
    if engine is None:
        for closed in [one for one in _engines if one.is_closed()]:
            del _engines[closed]
        engine = _engines[loop] = RayEngine.inside(loop, CODE)
    return engine


class ClusterHost:
    """See above: the node of one task, or of one actor.

    Attributes:
        upsets: how many children that plain code may wait for have failed so far.
    """

    def __init__(self, loop: TaskLoop | None = None) -> None:
        """Have plain code's calls carried on a loop, or on one of each thread's own."""
        self.upsets = 0
        self._loop = loop
        self._has_ended = False

    def __repr__(self) -> str:
        return "<ClusterHost>"

    @property
    def task_loop(self) -> TaskLoop:
        """The loop of the task's own thread, or of the actor."""
        found = self._loop or task_loop()
        found.wait_for(engine_on(found.loop).calls)
        return found

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop on which plain code of this thread has its calls carried."""
        return self.task_loop.loop

    def engine(self, loop: asyncio.AbstractEventLoop | None) -> RayEngine:
        """Who takes the calls of code that a loop runs; None for plain code."""
        return engine_on(loop or self.program)

    @property
    def _engine(self) -> RayEngine:
        return self.engine(asyncio._get_running_loop())

    @property
    def remote_values(self) -> ClusterValues:
        """Who knows the values of the cluster."""
        return self._engine.remote_values

    @property
    def waits(self) -> ClusterValues:
        """Who is to be told of waits on an event loop: nobody needs to be."""
        return self._engine.remote_values

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; gives its number."""
        with interrupts.put_off():
            return self._engine.submit(func, payload, receiver)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number."""
        with interrupts.put_off():
            return self._engine.actors.known(actor).call(method, payload, receiver)

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        with interrupts.put_off():
            self._engine.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        with interrupts.put_off():
            self.upsets += 1
            self._engine.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """The same where the collector runs."""
        engine = self._engine
        with suppress(RuntimeError):  # the loop is closed
            engine.loop.call_soon_threadsafe(engine.cancel, child)

    def cancel(self, task: int) -> None:
        """Stop a child or a call."""
        with interrupts.put_off():
            self._engine.cancel(task)

    async def why(self, name: str, task: int) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {name}")

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """The task's code waits: Ray sees that by itself."""

    def end_wait(self, waiter: object) -> None:
        """All that it waited for has ended."""

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until something is done; False if time is up before."""
        return self.task_loop.run_until(is_done, deadline)

    def opened(
        self, function: Callable[..., Any], payload: bytes, load: Callable[..., Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; handles for a coroutine are its loop's."""
        if not (has_references(payload) and is_coroutine(function)):
            return load(payload)  # type: ignore[no-any-return]
        loop = self.program
        try:
            # Within: an interrupt may come as soon as it is set.
            asyncio._set_running_loop(loop)
            return load(payload)  # type: ignore[no-any-return]
        finally:
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """The task has ended: what it has started ends with it; once."""
        if self._has_ended or not has_loop():
            return
        loop = task_loop()
        # The task's code has ended by now: an interrupt has nothing more to end.
        with suppress(KeyboardInterrupt), interrupts.put_off():
            try:
                loop.end_rest()
            finally:
                engine = _engines.get(loop.loop)
                if engine is not None:
                    if engine.calls.is_posted:
                        # Else what has come is kept until this process's next task.
                        loop.settle()
                    engine.end_children()
            self._has_ended = True


def has_references(payload: bytes) -> bool:
    """Return whether unpickling it makes handles."""
    kept = kept_in(payload)
    if kept is None:
        return has_handles(payload)
    parts: tuple[bytes, ...] = payload.parts  # type: ignore[attr-defined]
    return bool(kept.references) or any(map(has_references, parts))


HIDDEN: Final = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    "neuron_cores": "NEURON_RT_VISIBLE_CORES",
}
"""By kind the variable that hides devices; Ray sets it for those who have some."""


ORDER: Final = "CUDA_DEVICE_ORDER"


class NeedFailedError(Exception):
    """An argument will never be there; `fields` say why."""

    def __init__(self, fields: tuple[Any, ...]) -> None:
        super().__init__(*fields)
        self.fields = fields


def runner(work: Work) -> Callable[..., Any]:
    """Return what Ray is given to run as a task."""

    def run(head: Any, places: Any = (), returns: int = 0, *values: Any) -> Any:

        return run_task(work, head, places, returns, values)

    return _named(run, work.name)


def streamer(work: Work) -> Callable[..., Any]:
    """The same for a generator: each item is an object of its own."""

    def run(head: Any, places: Any = (), returns: int = 0, *values: Any) -> Any:

        yield from pour_task(work, head, places, values)

    return _named(run, work.name)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    run.__name__ = run.__qualname__ = name
    return run


@contextmanager
def surroundings(work: Work) -> Iterator[ClusterHost]:
    """What a task's code finds around it: its devices, ids, a way to the cluster."""
    take_place(work.name, work.resources, work.kinds)
    current.task = int(ray.task_id()[:12], 16)
    host = ClusterHost()
    token = host_of_task.set(host)
    try:
        yield host
    finally:
        try:
            host.end()  # no interrupt is heard any more that could have it skipped
        finally:
            host_of_task.reset(token)


def take_place(
    name: str, resources: Mapping[str, float], kinds: tuple[str, ...]
) -> None:
    """Note what this process may use, in its variables and for whoever asks."""
    found = ray.accelerators()
    kinds_here[:] = kinds
    for kind in ("GPU", *kinds):
        variable = HIDDEN.get(kind)
        if not variable or found.get(kind):
            continue
        if not is_left_alone(variable, os.environ):
            os.environ[variable] = ""
    if not is_left_alone(HIDDEN["GPU"], os.environ):
        os.environ.setdefault(ORDER, "PCI_BUS_ID")
    node, worker, _ = ray.facts()
    current.node, current.worker = node, int(worker[:12], 16)
    current.name = name
    current.resources, current.accelerators = resources, found


def arguments(
    head: Any, places: Sequence[int | str], returns: int, values: Sequence[Any]
) -> bytes:
    """The payload that has come in pieces.

    Raises:
        NeedFailedError: one of the arguments will never be there.
    """
    for value in values:
        if isinstance(value, Broken):
            raise NeedFailedError(value.fields)
    if not isinstance(head, Stored) and not values and not returns:
        return head  # type: ignore[no-any-return]
    opened = arrived(head if isinstance(head, Stored) else Stored(head))
    assert isinstance(opened, Payload), head
    opened.contents = opened.contents._replace(places=tuple(places), returns=returns)
    opened.parts = tuple(arrived(value) for value in values)
    return opened


def run_task(
    work: Work, head: Any, places: Any, returns: int, values: Sequence[Any]
) -> Any:
    """Run a task; gives what Ray is to keep of its result, or of each of them.

    Raises:
        TaskFailure: it has none.
    """
    with surroundings(work) as host, interrupts.heard():
        kind = UNREADABLE
        try:
            function = work.load()
            payload = arguments(head, places, returns, values)
            args, kwargs = host.opened(function, payload, load_arguments)
            kind = RAISED
            value = function(*args, **kwargs)
            if type(value) is CoroutineType:
                value = host.task_loop.run(value)
            value = split_results(value, payload)
            kind = UNSENDABLE
            return returned(value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            raise _failure(work, kind, error) from None
        finally:
            host.end()
            let_go_of_passed()


def pour_task(
    work: Work, head: Any, places: Any, values: Sequence[Any]
) -> Iterator[Any]:
    """The same for a generator; Ray has it wait for its consumer."""
    with surroundings(work) as host, interrupts.heard():
        kind = UNREADABLE
        try:
            function = work.load()
            payload = arguments(head, places, 0, values)
            args, kwargs = host.opened(function, payload, load_arguments)
            kind = RAISED
            items = function(*args, **kwargs)
            for place, item in enumerate(_each(items, host), 1):
                kind = UNSENDABLE
                yield returned_item(place, item)
                kind = RAISED
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            raise _failure(work, kind, error) from None
        finally:
            host.end()
            let_go_of_passed()


def _each(items: Any, host: ClusterHost) -> Iterator[Any]:
    if not hasattr(items, "__anext__"):
        yield from items
        return
    loop: TaskLoop = host.task_loop
    try:
        while True:
            try:
                yield loop.run(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run(items.aclose())


def returned(value: object) -> Any:
    """Return what Ray is to keep of a result, a tuple if there are several."""
    if type(value) is SplitResults:
        return tuple(map(returned, value))
    result = dump_result(value)
    let_go_of_passed()  # Ray's handles of these actors go along
    return stored(packed_here(result) if isinstance(result, PickledValue) else result)


def let_go_of_passed() -> None:
    """Keep no actor alive whose handle was pickled here; it was sent, or never is."""
    if passing:
        take_kept()


def returned_item(place: int, item: object) -> Any:
    """Return what Ray is to keep of an item of a stream.

    Raises:
        SerializationError: it cannot be pickled; says which one it is.
    """
    try:
        return returned(item)
    except SerializationError as error:
        raise SerializationError(
            f"item {place} of its stream is lost: {error}"
        ) from error


def _failure(work: Work, kind: str, error: BaseException) -> BaseException:
    if isinstance(error, NeedFailedError):
        return TaskFailure(*error.fields)
    if interrupts.has_come:
        return TaskFailure(0, STOPPED, "", stopped(work.name), "", None)
    wants_retry = kind == RAISED and work.wants_retry(error)
    return packed(kind, error, is_retried=wants_retry)


class Stage:
    """The user's object, or why there is none, and what its code finds around it."""

    _name = "actor"
    # Ray asks for its `repr` where an argument has failed, and this never runs.

    def __init__(self, blueprint: Blueprint, given: Sequence[Any]) -> None:
        self._name = blueprint.name
        own_id = ray.facts()[2]
        self._cancels = Cancels(own_id)
        self._failure: TaskFailure | None = None
        self._host = ClusterHost(TaskLoop(is_of_actor=True))
        self._object: Any = None
        self._groups = blueprint.groups
        take_place(blueprint.name, blueprint.resources, blueprint.kinds)
        self._place: Place = current.node, os.getpid()
        current.actor = int(own_id[:12], 16)
        host_of_task.set(self._host)
        kind = UNREADABLE
        try:
            made = blueprint.load()
            head, places, _, *values = (*given, (), 0)[: max(3, len(given))]
            args, kwargs = load_arguments(arguments(head, places, 0, values))
            kind = RAISED
            self._object = made(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - foreign code may raise anything
            failed = failure(kind, error).failed
            self._failure = TaskFailure(*not_made(self._name, failed))
        let_go_of_passed()
        self._methods = Methods(self._object)

    def _stopped(self) -> TaskFailure:
        """Return what is told of a call that was cancelled."""
        return TaskFailure(0, STOPPED, "", stopped(self._name), "", None)

    def __repr__(self) -> str:
        return f"<actor {self._name}>"

    def _begin(self) -> None:
        host_of_task.set(self._host)
        if self._failure is not None:
            raise self._failure

    def _called(
        self, method: str, payload: bytes, given: Sequence[Any]
    ) -> tuple[Any, bytes]:
        """Call a method; gives what it has given, and the arguments' payload."""
        kind = UNREADABLE
        method_called.set(method)
        try:
            if given:
                head, places, returns, *values = given
                payload = arguments(head, places, returns, values)
                found = self._methods[method]
                args, kwargs = self._host.opened(found, payload, load_arguments)
            else:
                found = self._methods[method]
                args, kwargs = load_arguments(payload)
            kind = RAISED
            value = found(*args, **kwargs)
            raise_exit()
            return value, payload
        except ActorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise_exit()
            raise failure(kind, error) from None

    def _returned(self, value: Any, payload: bytes) -> Any:
        kind = RAISED
        try:
            found = split_results(value, payload)
            kind = UNSENDABLE
            return returned(found)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise failure(kind, error) from None

    def _drop(self) -> None:
        """Let go of the object, so that it may still do what it does at its end."""
        self._object, self._methods = None, Methods(None)
        gc.collect()

    def __ray_shutdown__(self) -> None:
        """Ray ends this process in an orderly way."""
        self._drop()


class PlainHost(Stage):
    """An actor whose methods are plain: one at a time, or each in a thread."""

    def __init__(self, blueprint: Blueprint, *given: Any) -> None:
        self._left = count(1)
        super().__init__(blueprint, given)
        self._is_threaded = len(blueprint.limits) > 1
        self._cancels.watch()

    def ready(self) -> Place:
        """The constructor has returned, in this place; raises why not."""
        self._begin()
        return self._place

    def call(self, said: bytes, *given: Any) -> Any:
        """Call a method of the object."""
        self._begin()
        _, method, payload = understood(said)
        if self._is_threaded:
            # Ray's threads have no names of their own, which logs would show.
            group = self._groups.get(method, DEFAULT_GROUP)
            threading.current_thread().name = f"aiogpu-{group}"
        cancels = self._cancels
        if cancels.has():
            raise self._stopped()
        try:
            with cancels.heard():
                value, payload = self._called(method, payload, given)
            return self._returned(value, payload)
        except ActorExit:
            leave_now()
        except (KeyboardInterrupt, TaskFailure):
            if cancels.has_come:
                raise self._stopped() from None
            raise
        finally:
            let_go_of_passed()

    def pour(self, said: bytes, *given: Any) -> Iterator[Any]:
        """The same for a generator."""
        self._begin()
        _, method, payload = understood(said)
        if self._cancels.has():
            raise self._stopped()
        items, _ = self._called(method, payload, given)
        kind = RAISED
        try:
            for place, item in enumerate(items, 1):
                kind = UNSENDABLE
                yield returned_item(place, item)
                kind = RAISED
                if self._cancels.has():
                    items.close()
                    return
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise failure(kind, error) from None
        finally:
            let_go_of_passed()

    def leave(self, groups: int) -> None:
        """End, after all that was sent before: each of so many groups is told."""
        if next(self._left) >= groups:
            leave_now()


def failure(kind: str, error: BaseException) -> TaskFailure:
    """Return what is told of a call that has failed, or of what it was given."""
    if isinstance(error, TaskFailure):
        return error
    if isinstance(error, NeedFailedError):
        return TaskFailure(*error.fields)
    return packed(kind, error)


def raise_exit() -> None:
    """End the actor if its method called `exit_actor()` and swallowed the exception."""
    if current.exits and has_exited():
        raise ActorExit


def leave_now() -> NoReturn:
    """End the actor's process, once this call has ended."""
    ray.exit_actor()
    raise ActorExit  # it has raised by now


CLOSE_LIMIT: Final = 5.0
"""Seconds for an object's `close()` when its last handle has gone, and for calls to
end that are cancelled as another ends the actor."""


class SoftHost(Stage):
    """See above."""

    def __init__(self, blueprint: Blueprint, *given: Any) -> None:
        super().__init__(blueprint, given)
        self._present = 0
        self._running: set[_Visit] = set()
        self._quiet: asyncio.Event | None = None
        self._ended: TaskFailure | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        limits = blueprint.limits.items()
        self._rooms = {name: asyncio.Semaphore(most) for name, most in limits}
        self._turns = Turns()

    async def ready(self) -> Place:
        """The constructor has returned, in this place; raises why not."""
        self.listen()
        self._begin()
        return self._place

    def listen(self) -> None:
        """Hear of cancelled calls, from the first one on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._cancels.fileno() >= 0:
                self._loop.add_reader(self._cancels.fileno(), self._hear)

    def _hear(self) -> None:
        if self._cancels.take():
            for visit in list(self._running):
                if self._cancels.forget(visit.call):
                    visit.cancel()

    async def enter(self, visit: _Visit) -> None:
        """Wait until a call may begin; raises `TaskFailure` if it never may."""
        self._present += 1
        await self._turns.come(visit.number)
        self._begin()
        await visit.room.acquire()
        visit.has_room = True
        if self._ended is not None:
            raise self._ended
        if self._cancels.has():
            raise self._stopped()
        self._running.add(visit)

    def leave_call(self, visit: _Visit) -> TaskFailure:
        """A call has ended; gives what is told of it if its code was cancelled."""
        self._running.discard(visit)
        if visit.has_room:
            visit.room.release()
        self._present -= 1
        if self._quiet is not None and not self._present:
            self._quiet.set()
        return self._ended or self._stopped()

    def _visit(self, number: int, method: str) -> _Visit:
        self.listen()
        room = self._rooms[self._groups.get(method, DEFAULT_GROUP)]
        return _Visit(self, number, room)

    async def call(self, said: bytes, *given: Any) -> Any:
        """Call a method of the object."""
        number, method, payload = understood(said)
        try:
            async with self._visit(number, method):
                value, payload = self._called(method, payload, given)
                if type(value) is CoroutineType:
                    value = await _awaited(value)
                return self._returned(value, payload)
        except ActorExit:
            await self._exit()

    async def _exit(self) -> NoReturn:
        """A call ends the actor: others are cancelled, and told so."""
        error = died(self._name, "a call ended it by exit_actor().")
        self._ended = TaskFailure(*pack_own_error(error))
        for visit in list(self._running):
            visit.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._until_quiet(), CLOSE_LIMIT)
        leave_now()

    async def _until_quiet(self) -> None:
        if self._present:
            self._quiet = self._quiet or asyncio.Event()
            await self._quiet.wait()

    async def pour(self, said: bytes, *given: Any) -> AsyncIterator[Any]:
        """The same for a generator of either kind."""
        number, method, payload = understood(said)
        kind = RAISED
        try:
            async with self._visit(number, method):
                items, _ = self._called(method, payload, given)
                place = 0
                async for item in _each_async(items):
                    kind, place = UNSENDABLE, place + 1
                    yield returned_item(place, item)
                    kind = RAISED
        except (GeneratorExit, asyncio.CancelledError, TaskFailure):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise failure(kind, error) from None

    async def leave(self, number: int) -> None:
        """End, after all that was sent before, and the object's own `close()`."""
        await self._turns.come(number)
        await self._until_quiet()
        await self._close()
        self._drop()
        leave_now()

    async def _close(self) -> None:
        """The object's own `close()`, once."""
        host_of_task.set(self._host)
        close = getattr(self._object, "close", None)
        is_closed, self._is_closed = self._is_closed, True
        if is_closed or not iscoroutinefunction(close) or signature(close).parameters:
            return
        try:
            await close()
        except BaseException:  # noqa: BLE001 - whatever it is, the actor ends
            sys.excepthook(*sys.exc_info())

    def __ray_shutdown__(self) -> None:
        """Ray ends this process in an orderly way: its last handle has gone."""
        loop = self._loop
        # Ray has stopped it by now, and leaves it as it is.
        if loop is not None and not loop.is_running() and not loop.is_closed():
            with suppress(TimeoutError):
                loop.run_until_complete(asyncio.wait_for(self._close(), CLOSE_LIMIT))
        super().__ray_shutdown__()


class _Visit:
    """One call, for as long as it is in the actor.

    Attributes:
        number: its caller's; see `turns`.
        room: has a place for each call of its group that may run.
        has_room: whether it has one of these.
    """

    def __init__(self, host: SoftHost, number: int, room: asyncio.Semaphore) -> None:
        self.number = number
        self.room = room
        self.has_room = False
        self._host = host
        self._context = copy_context()
        self._task = asyncio.current_task()
        self._is_cancelled = False

    @cached_property
    def call(self) -> bytes:
        """Ray's id of it, which is asked for when one was cancelled."""
        return bytes.fromhex(self._context.run(ray.task_id))

    def cancel(self) -> None:
        """Have its code cancelled where it waits."""
        assert self._task is not None, self
        self._is_cancelled = True
        self._task.cancel()

    async def __aenter__(self) -> None:
        try:
            await self._host.enter(self)
        except BaseException:
            self._host.leave_call(self)
            raise

    async def __aexit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        told = self._host.leave_call(self)
        if self._is_cancelled and isinstance(error, asyncio.CancelledError):
            assert self._task is not None, self
            self._task.uncancel()
            raise told from None


async def _awaited(value: Any) -> Any:
    task = asyncio.current_task()
    try:
        result = await value
        raise_exit()
        return result
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise failure(RAISED, error) from None
    except ActorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
        raise_exit()
        raise failure(RAISED, error) from None


async def _each_async(items: Any) -> AsyncIterator[Any]:
    if hasattr(items, "__anext__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


CODE: Final = RemoteCode(runner, streamer, PlainHost, SoftHost)
"""What this module has run in processes of Ray's."""


def create_engine(options: NodeOptions, loop: asyncio.AbstractEventLoop) -> RayEngine:
    """The engine of a program; it is not open yet."""
    return RayEngine(options, loop, CODE)
