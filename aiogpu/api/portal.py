"""Calls from threads without an event loop to the loop that has the node.

A `Portal` runs functions and coroutines on a loop of another thread and waits for what
they return, so that the objects of a node are touched on its loop alone. `portal_for`
finds the portal of the running code, or starts a loop in a thread of its own. The
classes below it stand for what the loop has made: handles, iterators over results,
actors, the node. The last is an executor. `aiogpu.sync` consists of them. This module
imports asyncio and `concurrent.futures`, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import suppress
from functools import lru_cache, partial
from inspect import isawaitable
from itertools import chain, islice
from math import inf
from queue import Empty, SimpleQueue
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)
from weakref import WeakSet

from aiogpu.api import node as nodes
from aiogpu.api.actors import pool as pools
from aiogpu.api.actors import queue as queues
from aiogpu.api.actors.actor import ActorHandle, RemoteMethod
from aiogpu.api.calls import packed_call
from aiogpu.api.decorator import remote
from aiogpu.api.map import Results
from aiogpu.api.options import check_wait
from aiogpu.api.remote_function import RemoteFunction, kind_of
from aiogpu.api.results import handle as handles
from aiogpu.api.results.stream import IteratedOnce, Stream
from aiogpu.api.run import new_runner
from aiogpu.api.session import refuse_in_worker
from aiogpu.api.usage_errors import PUT_NAME, NotItsResult
from aiogpu.client.current import is_in_task, is_loop_running
from aiogpu.errors import (
    MisuseError,
    NodeError,
    NoLoopError,
    OptionError,
    SerializationError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_arguments

if TYPE_CHECKING:
    from aiogpu.api.actors.pool import PoolMethod
    from aiogpu.api.results.reports import Report
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


LOOK_AGAIN: Final = 1.0
"""Seconds after which a thread that waits for a loop looks whether it was closed."""


class Portal:
    """Runs calls on an event loop of another thread, in the order in which they come.

    Attributes:
        loop: the event loop.
        thread: the number of the thread that runs it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self.thread = thread
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.loop!r}>"

    @property
    def is_here(self) -> bool:
        """True if the loop's own thread asks, as in a callback of a handle."""
        return get_ident() == self.thread

    @property
    def is_usable(self) -> bool:
        """True if the loop is there, and a thread of this process runs it."""
        return self._pid == os.getpid() and not self.loop.is_closed()

    def check(self) -> None:
        """Raise `NodeError` if the loop is closed, or this process is a fork."""
        if self._pid != os.getpid():
            raise NodeError(
                f"this node belongs to process {self._pid}, of which process "
                f"{os.getpid()} is a fork. Open one here by aiogpu.sync.init()."
            )
        if self.loop.is_closed():
            raise NodeError("this node is shut down; open one by aiogpu.sync.init().")

    def post(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon; it must raise nothing.

        Raises:
            NodeError: the loop is closed, or this process is a fork.
        """
        self.check()
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # it was closed in this very moment
            self.check()
            raise

    def call(self, function: Callable[..., T], /, *args: Any, **named: Any) -> T:
        """Call a function on the loop; return what it returns, or raise its error.

        Raises:
            NodeError: the loop is closed, or this process is a fork.
        """
        if self.is_here:
            return function(*args, **named)
        ended = allocate_lock()
        ended.acquire()
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function(*args, **named))
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                errors.append(error)
            finally:
                ended.release()

        self.post(run)
        while not ended.acquire(timeout=LOOK_AGAIN):
            self.check()
        if not errors:
            return results[0]
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback refers to this frame

    def run(self, what: str, begin: Callable[[], Awaitable[T]]) -> T:
        """Await something on the loop; return its result, or raise its error.

        Ctrl-C here cancels what is awaited there.

        Args:
            what: the call, for the message.
            begin: called on the loop; returns what is awaited.

        Raises:
            MisuseError: the loop's own thread would wait.
            NodeError: the loop is closed, or this process is a fork.
        """
        if self.is_here:
            raise _blocks_loop(what)
        self.check()

        async def wait() -> T:
            return await begin()

        ended = asyncio.run_coroutine_threadsafe(wait(), self.loop)
        try:
            while not concurrent.futures.wait([ended], LOOK_AGAIN).done:
                self.check()
            return ended.result()
        except BaseException:
            ended.cancel()
            raise
        finally:
            del ended  # its error's traceback refers to this frame


class LoopThread(Portal):
    """An event loop in a thread of its own, for a program without one.

    The thread is a daemon, so that it keeps no program from ending; the end of the
    interpreter closes the node all the same.
    """

    def __init__(self) -> None:
        begun: concurrent.futures.Future[asyncio.AbstractEventLoop]
        begun = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._serve, args=(begun,), name="aiogpu-loop", daemon=True
        )
        self._thread.start()
        super().__init__(begun.result(), self._thread.ident or 0)
        atexit.register(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Close the loop, and let Ctrl-C end the program as it would without one.

        After a KeyboardInterrupt Python ends by the signal, so that a shell leaves its
        loop too. What is evaluated until then, as imports do, takes the note of that
        away (CPython's `run_eval_code_obj`), and one that fails so sets it again.
        """
        self.end()
        if getattr(sys, "last_type", None) is KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _serve(
        self, begun: concurrent.futures.Future[asyncio.AbstractEventLoop]
    ) -> None:
        async def stay() -> None:
            self._over = asyncio.Event()
            begun.set_result(asyncio.get_running_loop())
            await self._over.wait()

        try:
            with new_runner() as runner:
                runner.run(stay())
        except BaseException as error:
            if begun.done():
                raise
            begun.set_exception(error)

    def end(self) -> None:
        """Close the loop, and the node with it if there is one; idempotent."""
        atexit.unregister(self._end_at_exit)
        if self._pid == os.getpid():
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._over.set)
            self._thread.join()


_own: Final[list[LoopThread]] = []
"""The loop that was started for code without one, if there is one."""


_starting: Final = threading.Lock()


def portal_for(what: str, *, opens: bool = False) -> Portal | None:
    """The portal of the running code; None for a task's code, which needs none.

    It leads to the loop that has the program's node, whichever thread that runs in. For
    a program without a node a loop is started in a thread of its own.

    Args:
        what: the call, for the message.
        opens: whether a fork of a program with a node shall have one of its own.

    Raises:
        MisuseError: an event loop runs in this thread, and would be blocked.
        NoLoopError: several event loops of the program have a node.
        NodeError: this process was forked by a task, or by a program with a node.
    """
    if is_in_task():
        return None
    refuse_in_worker(what)
    own = _own_loop()
    if own is not None and own.is_here:
        return own
    if is_loop_running():
        raise _blocks_loop(what)
    there = own or portal_to_program(what)
    if there is not None:
        return there
    for inherited in handles.sessions.values():
        if inherited.is_forked and not opens:
            raise inherited.unusable()
    with _starting:
        own = _own_loop()
        if own is None:
            own = LoopThread()
            _own[:] = [own]
        return own


def _own_loop() -> LoopThread | None:
    """The loop that was started for code without one, if it is still there."""
    return next((one for one in _own if one.is_usable), None)


def close_own_loop() -> None:
    """Close the loop that was started for code without one, and its node."""
    with _starting:
        own = _own_loop()
        _own.clear()
    if own is not None:
        own.end()


def portal_to_program(what: str) -> Portal | None:
    """The portal to the loop that has this program's node; None if none has.

    Raises:
        NoLoopError: several have one.
    """
    there = [one for one in handles.sessions.values() if not one.is_forked]
    if len(there) > 1:
        raise NoLoopError(
            f"{what} cannot tell which node is meant: {len(there)} event loops of this "
            f"program have one. Write `asyncio.run_coroutine_threadsafe(call(), loop)"
            f".result()`, where `async def call()` awaits what you want of that loop."
        )
    if not there:
        return None
    return Portal(there[0].loop, there[0].thread)


def _blocks_loop(what: str) -> MisuseError:
    return MisuseError(
        f"{what} is for threads without an event loop, and would block the one that "
        f"runs in this thread: use the functions of `aiogpu` itself, and `await` them."
    )


@overload
def from_thread(
    call: Callable[P, handles.Handle[T]], /, *args: P.args, **named: P.kwargs
) -> Handle[T]: ...


@overload
def from_thread(
    call: Callable[P, IteratedOnce[T]], /, *args: P.args, **named: P.kwargs
) -> ResultIterator[T]: ...


@overload
def from_thread(
    call: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **named: P.kwargs
) -> T: ...


@overload
def from_thread(call: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T: ...


def from_thread(call: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Make a call of aiogpu on the program's event loop, from another thread.

    For code that runs beside the loop and may block: a plain `def` endpoint of FastAPI,
    what `asyncio.to_thread` runs, a thread pool.

    Args:
        call: what is called on the loop: `f.remote`, `actor.method.remote`, `f.map`,
            `aiogpu.status`.
        *args: its arguments.
        **named: those by name.

    Returns:
        In place of a `Handle` an `aiogpu.sync.Handle`, whose `result(timeout)` waits;
        of a stream or of `map` a plain iterator; of another awaitable its result,
        which is waited for. All else as it is.

    Raises:
        MisuseError: an event loop runs in this thread.
        NoLoopError: no event loop of the program has a node, or several have.
        Exception: what the call raises.

    Example:
        `score = aiogpu.from_thread(predict.remote, image).result(timeout=5)`
    """
    what = "aiogpu.from_thread()"
    if is_in_task():
        return call(*args, **named)
    if is_loop_running():
        raise _blocks_loop(what)
    portal = portal_to_program(what)
    if portal is None:
        raise NoLoopError(
            f"{what} needs a node that an event loop of this program has opened, by "
            f"aiogpu.init(). A program without an event loop uses `aiogpu.sync`."
        )
    made = call_on(portal, call, args, named)
    if isinstance(made, _Proxy) or not isawaitable(made):
        return made
    result = portal.run(what, lambda: made)
    return portal.call(wrap, portal, result)


# Proxies of the loop's objects.


def wrap(portal: Portal, made: Any) -> Any:
    """Return the proxy of an object of the loop; of others, the object."""
    if isinstance(made, handles.Handle):
        return Handle[Any](portal, made.task_name).follow(made)
    if isinstance(made, Stream | Results):
        return ResultIterator(portal, made)
    if isinstance(made, ActorHandle):
        return SyncActorHandle(portal, made)
    if isinstance(made, tuple) and made and isinstance(made[0], handles.Handle):
        return tuple(wrap(portal, one) for one in made)
    return made


def unwrap(given: Any) -> Any:
    """Undo `wrap`. Call it on the loop: a handle is posted there before it has one."""
    return given._target if isinstance(given, _Proxy) else given


def call_on(
    portal: Portal,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Call a function on the loop; return its result, or a proxy of that."""

    def make() -> Any:
        given = {name: unwrap(one) for name, one in named.items()}
        return wrap(portal, function(*(unwrap(one) for one in args), **given))

    return portal.call(make)


class _OnlyOnLoopError(MisuseError):
    """A proxy was to be pickled in another thread than the loop's."""


def call_function(
    portal: Portal, remote: RemoteFunction[..., Any], args: Any, kwargs: Any
) -> Any:
    """Start a task; return its handle, its iterator, or a tuple of handles.

    As a rule nobody waits for the loop; see `_post`.
    """
    func = remote._func or portal.call(remote._prepare)
    if func.window or remote._returns:
        return call_on(portal, remote.remote, args, kwargs)
    remote._definition.parameters.check(args, kwargs)
    made = _post(portal, func.spec.name, partial(remote._submit, func), args, kwargs)
    if made is None:
        return call_on(portal, remote.remote, args, kwargs)
    return made


def call_method(portal: Portal, remote: RemoteMethod, args: Any, kwargs: Any) -> Any:
    """Call an actor's method; see `call_function`."""
    method, made = remote._method, None
    if remote._link.interface is not None and not (method.window or method.returns):
        method.parameters.check(args, kwargs)
        send = partial(remote._link.call, method.label, method.name)
        made = _post(portal, method.label, send, args, kwargs)
    if made is None:
        return call_on(portal, remote.remote, args, kwargs)
    return made


def _post(
    portal: Portal,
    name: str,
    send: Callable[[bytes], handles.Handle[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Handle[Any] | None:
    """Pickle the arguments here, have the loop make the call, and wait for neither.

    A round trip to the loop takes ten times as long as the call, as the interpreter
    lets one thread run at a time.

    Returns:
        The handle; None if there is a handle among the arguments, since the loop alone
        can pickle these.
    """
    if any(isinstance(one, _Proxy) for one in (*args, *kwargs.values())):
        return None
    try:
        payload = dump_arguments(name, args, kwargs)
    except _OnlyOnLoopError:
        return None
    except SerializationError as error:
        if isinstance(error.__cause__, _OnlyOnLoopError):
            return None
        raise
    handle: Handle[Any] = Handle(portal, name)

    def begin() -> handles.Handle[Any]:
        if isinstance(payload, PickledValue):
            return send(packed_call(name, args, kwargs, payload))
        return send(payload)

    portal.post(partial(handle.start, begin))
    return handle


class _Proxy:
    """Base of what stands for an object of the loop; pickled, it is that object.

    Attributes:
        _portal: the way to its loop.
        _target: the object, for the loop; a handle has one when its call was made.
    """

    _portal: Portal
    _target: Any

    def __reduce__(self) -> Any:
        return self._on_loop().__reduce__()

    def _on_loop(self) -> Any:
        """Return the object that this one stands for.

        Raises:
            MisuseError: this is another thread than the loop's.
        """
        if not self._portal.is_here:
            raise _OnlyOnLoopError(
                f"{self!r} can only be pickled as a part of what a task or an actor is "
                f"given; pass on its value."
            )
        return self._target


class Handle(_Proxy, NotItsResult, concurrent.futures.Future[T]):
    """The future result of a task, in a thread without an event loop.

    `result(timeout)` waits. `concurrent.futures.wait` and `as_completed` take it, and
    `asyncio.wrap_future` makes it awaitable. Cancelling it stops the work.

    Attributes:
        task_name: name of the task.
    """

    def __init__(self, portal: Portal, task_name: str) -> None:
        super().__init__()
        self._portal = portal
        self.task_name = task_name

    @property
    def __aiogpu_handle__(self) -> handles.Handle[T]:
        """The handle of the loop; see `serialization.references.HANDLE_MARK`."""
        return self._on_loop()  # type: ignore[no-any-return]

    def follow(self, made: handles.Handle[T]) -> Self:
        """Note the handle of the loop, on the loop."""
        self._target = made
        made.add_done_callback(self._settle)
        return self

    def start(self, begin: Callable[[], handles.Handle[T]]) -> None:
        """Make the call, on the loop; its error is that of the task."""
        try:
            made = begin()
        except Exception as error:  # noqa: BLE001 - it is told by `result`
            made = handles.Handle(self.task_name, cast("Any", None), self._portal.loop)
            made.settle(error)
        self.follow(made)

    def __repr__(self) -> str:
        state = (
            "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        )
        return f"<Handle {self.task_name} {self.task_id} {state}>"

    def _how_to_wait(self) -> str:
        if self.task_name == PUT_NAME:
            return "`aiogpu.sync.get(handle)`"
        return f"`aiogpu.sync.get(...)` around {self.task_name}.remote(...)"

    @property
    def task_id(self) -> int:
        """Number of the task, 0 before it has one."""
        made: handles.Handle[T] | None = getattr(self, "_target", None)
        return 0 if made is None else made.task_id

    def _settle(self, made: handles.Handle[T]) -> None:
        """Take the outcome, on the loop."""
        if self.done():
            return  # `cancel` has told of it
        if made.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error := made.exception():
            self.set_exception(error)
        else:
            self.set_result(made.result())

    def cancel(self) -> bool:
        """Cancel the handle and stop the work; False if it had ended before."""
        return self._portal.call(self._cancel)

    def _cancel(self) -> bool:
        if not self._target.cancel():
            return False
        self._settle(self._target)
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for the task's result.

        Args:
            timeout: seconds, 0 to look only; None waits as long as it takes.

        Raises:
            Exception: what the task has raised, or what kept it from starting.
            TaskTimeoutError: time was up; the task goes on.
            TaskCancelledError: it was cancelled.
            MisuseError: the wait would block the loop that is to settle it.
        """
        try:
            self._wait(timeout)
            return super().result()
        finally:
            del self  # the error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the task's end; return its error, or None. Raises as `result`."""
        self._wait(timeout)
        return super().exception()

    def _wait(self, timeout: float | None) -> None:
        if not self.done() and next(completed([self], timeout), None) is None:
            raise TaskTimeoutError(
                f"{self.task_name} did not end within {timeout:g} s; it goes on, and "
                f"handle.cancel() stops it."
            )
        if self.cancelled():
            raise TaskCancelledError(f"{self.task_name} was cancelled.")

    def __await__(self) -> NoReturn:
        raise MisuseError(
            f"the handle of {self.task_name} was made without an event loop: wait by "
            f"handle.result(), or write `await asyncio.wrap_future(handle)`."
        )

    def reports(self) -> ResultIterator[Report]:
        """Return the reports of the task as they come, by `for`; ends with the task.

        See `aiogpu.report` and `aiogpu.Handle.reports`.
        """

        def read() -> Any:
            # A call that was posted has its handle once the loop comes here.
            return self._target.reports()

        return ResultIterator(self._portal, self._portal.call(read))

    def why(self) -> Why:
        """Say why the task waits, or what it does; see `aiogpu.Handle.why`."""

        async def ask() -> Why:
            return await self._target.why()  # type: ignore[no-any-return]

        return self._portal.run("handle.why()", ask)


def checked_handles(name: str, given: Any) -> list[Handle[Any]]:
    """The handles that a function of `aiogpu.sync` was given, as a list.

    Raises:
        MisuseError: there is something else among them.
    """
    what = f"aiogpu.sync.{name}()"
    if isinstance(given, _Proxy | str | bytes) or not hasattr(given, "__iter__"):
        or_one = "a handle, or " if name == "get" else ""
        raise MisuseError(
            f"{what} was given {given!r}; give it {or_one}a list of handles."
        )
    found = list(given)
    for one in found:
        if not isinstance(one, Handle):
            raise MisuseError(
                f"{what} was given {one!r}; give it what .remote() of "
                f"`aiogpu.sync.remote` has returned."
            )
    return found


def completed(
    found: list[Handle[Any]], timeout: float | None = None
) -> Iterator[Handle[Any]]:
    """Yield handles as they end, until all have or the time is up.

    Raises:
        OptionError: the timeout is ill-valued.
        MisuseError: the loop's own thread would wait.
        NodeError: the loop was closed, and will settle none of them.
    """
    if timeout is not None:
        check_wait("timeout", timeout)
    deadline = inf if timeout is None else time.monotonic() + timeout
    ended: SimpleQueue[Handle[Any]] = SimpleQueue()
    for one in found:
        one.add_done_callback(ended.put)  # type: ignore[arg-type]
    pending = set(map(id, found))
    while pending:
        left = min(LOOK_AGAIN, max(0.0, deadline - time.monotonic()))
        if ended.empty():
            portal = found[0]._portal
            if portal.is_here:
                raise _blocks_loop(f"waiting for {found[0].task_name}")
            portal.check()
        try:
            one = ended.get(timeout=left)
        except Empty:
            if time.monotonic() >= deadline:
                return
        else:
            pending.discard(id(one))
            yield one


def results_of(given: Any, timeout: float | None) -> Any:
    """Wait for results, or for an actor; see `aiogpu.sync.get`."""
    if isinstance(given, SyncActorHandle):
        given._portal.run("aiogpu.sync.get()", lambda: given._target)
        return given
    if isinstance(given, Handle):
        return given.result(timeout)
    found = checked_handles("get", given)
    for one in completed(found, timeout):
        if one.cancelled() or super(Handle, one).exception() is not None:
            return one.result()
    late = sum(not one.done() for one in found)
    if late:
        raise TaskTimeoutError(
            f"{late} of {len(found)} tasks did not end within {timeout:g} s; they go "
            f"on."
        )
    return [one.result() for one in found]


class ResultIterator(_Proxy, Iterator[T]):
    """Results one by one, in a thread without an event loop: of a generator or a map.

    `with` stops the work at the end of its block. Without it that happens when the last
    reference goes, which in `for item in f.remote()` is when the loop is left.
    """

    def __init__(
        self, portal: Portal, made: IteratedOnce[T] | AsyncGenerator[T]
    ) -> None:
        self._portal = portal
        self._target: IteratedOnce[T] | AsyncGenerator[T] = made

    def __repr__(self) -> str:
        return repr(self._target)

    def __next__(self) -> T:
        made = self._target
        try:
            return self._portal.run("the next item", made.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        except concurrent.futures.CancelledError:
            raise TaskCancelledError(f"{made!r} gives no more.") from None
        finally:
            del made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the work, and drop what was not taken; idempotent."""
        self._portal.run("close()", self._target.aclose)


class SyncActorHandle(_Proxy, Generic[A]):
    """A handle to an actor, in a thread without an event loop.

    Methods are called by `handle.method.remote(...)`. `aiogpu.sync.get(handle)` waits
    until the actor was made. It ends when the last handle is gone; `with` ends it at
    the end of the block, after what it was sent.
    """

    def __init__(self, portal: Portal, made: ActorHandle[A]) -> None:
        self._portal = portal
        self._target = made

    def __repr__(self) -> str:
        return repr(self._target)

    def __getattr__(self, name: str) -> SyncMethod:
        found = self._portal.call(getattr, self._target, name)
        return SyncMethod(self._portal, found)

    def __enter__(self) -> Self:
        self._portal.run("`with` of an actor", self._target.__aenter__)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._portal.run(
            "`with` of an actor", lambda: self._target.__aexit__(kind, error, trace)
        )


class SyncMethod:
    """A method of an actor or a pool; call it by `.remote(...)`."""

    def __init__(self, portal: Portal, method: RemoteMethod | PoolMethod) -> None:
        self._portal = portal
        self._method: Any = method

    def __repr__(self) -> str:
        return repr(self._method)

    def options(self, **options: Any) -> SyncMethod:
        """Return an actor's method with other options; see `aiogpu.method`."""
        return SyncMethod(self._portal, self._method.options(**options))

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it; gives the call's handle at once, a generator's iterator."""
        if isinstance(self._method, RemoteMethod):
            return call_method(self._portal, self._method, args, kwargs)
        return call_on(self._portal, self._method.remote, args, kwargs)

    def map(self, iterable: Iterable[Any], /, **options: Any) -> ResultIterator[Any]:
        """Call it with each item; see `aiogpu.sync.RemoteFunction.map`."""
        return map_on(self._portal, self._method, iterable, options)

    def __call__(self, /, *_args: object, **_kwargs: object) -> Any:
        """Refuse a direct call.

        Raises:
            MisuseError: always; it says what to write.
        """
        name = self._method.__name__.rpartition(".")[2]
        raise MisuseError(
            f"{self._method.__name__} runs in its actor's process: write "
            f"`actor.{name}.remote(...)`."
        )


class ActorPool(Generic[A]):
    """Several actors called as one, in a thread without an event loop.

    The arguments and methods are those of `aiogpu.ActorPool`; what is awaited there
    blocks here. `with` waits until the actors are ready, and ends at the end of its
    block those that the pool has made. Handles, and the actors of functions for
    `submit` and `map`, are those of the event loop.

    Args:
        actor: the class under `@aiogpu.sync.remote`, a function that makes an actor, or
            a list of actors.
        size: actors at first.
        **options: `min_size`, `max_size`, `target`, `idle_after`.

    Raises:
        OptionError: an option is invalid.
        MisuseError: `actor` is something else, or this is a task.

    Example:
        `ActorPool([a, b]).map(lambda actor, x: actor.double.remote(x), range(9))`
    """

    def __init__(self, actor: Any, size: int | None = None, **options: Any) -> None:
        what = "aiogpu.sync.ActorPool()"
        portal = portal_for(what)
        if portal is None:
            raise MisuseError(
                f"{what} is for programs; in a task write `async def` and use "
                f"aiogpu.ActorPool, or call the actors one by one."
            )
        given = getattr(actor, "_made", actor)
        if isinstance(given, list | tuple):
            given = [unwrap(one) for one in given]
        elif isinstance(given, FunctionType):
            given = partial(_made, actor)
        self._portal = portal
        self._target: pools.ActorPool[A]
        self._target = portal.call(pools.ActorPool, given, size, **options)

    def __repr__(self) -> str:
        return repr(self._target)

    def __len__(self) -> int:
        """Return how many actors there are, ready or not."""
        return self._portal.call(len, self._target)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> SyncMethod:
        return SyncMethod(self._portal, self._portal.call(getattr, self._target, name))

    def __enter__(self) -> Self:
        self._portal.run("`with` of a pool", self._target.__aenter__)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._portal.run(
            "`with` of a pool", lambda: self._target.__aexit__(kind, error, trace)
        )

    def submit(self, fn: Callable[[ActorHandle[A], T], Any], value: T, /) -> None:
        """Call `fn(actor, value)` with an actor that has no calls, when there is one.

        It is called on the event loop: it starts a call, and waits for nothing.
        """
        self._portal.call(lambda: self._target.submit(fn, unwrap(value)))

    def get_next(self, timeout: float | None = None) -> Any:
        """Wait for the next result, in the order of `submit`."""
        return self._portal.run("get_next()", lambda: self._target.get_next(timeout))

    def get_next_unordered(self, timeout: float | None = None) -> Any:
        """Wait for the result of whichever call ends first."""
        next_of = self._target.get_next_unordered
        return self._portal.run("get_next_unordered()", lambda: next_of(timeout))

    def has_next(self) -> bool:
        """Return whether `get_next` has a result to give or to wait for."""
        return self._portal.call(self._target.has_next)

    def has_free(self) -> bool:
        """Return whether an actor is ready that has no calls."""
        return self._portal.call(self._target.has_free)

    def map(
        self, fn: Callable[[ActorHandle[A], T], Any], values: Iterable[T], /
    ) -> ResultIterator[Any]:
        """Call `fn(actor, value)` for each value; gives the results in their order.

        All values are read at once.
        """
        return self._mapped(self._target.map, fn, values)

    def map_unordered(
        self, fn: Callable[[ActorHandle[A], T], Any], values: Iterable[T], /
    ) -> ResultIterator[Any]:
        """As `map`, but each result as soon as it is there."""
        return self._mapped(self._target.map_unordered, fn, values)

    def _mapped(self, map_on_loop: Any, fn: Any, values: Any) -> ResultIterator[Any]:
        # Read here: what it reads may block.
        given = list(values)
        made = map_on_loop(fn, (unwrap(value) for value in given))
        return ResultIterator(self._portal, made)

    def push(self, actor: SyncActorHandle[A], /) -> None:
        """Add an actor to a pool of given actors."""
        self._portal.call(lambda: self._target.push(unwrap(actor)))

    def pop_idle(self) -> SyncActorHandle[A] | None:
        """Take an actor that has no calls out of a pool of given ones; or None."""
        return call_on(self._portal, self._target.pop_idle, (), {})  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the actors that the pool has made, after their calls; idempotent."""
        self._portal.run("close()", self._target.aclose)


class Queue(_Proxy, Generic[T]):
    """A queue in an actor, in a thread without an event loop; see `aiogpu.Queue`.

    What is awaited there blocks here. It may be an argument of `.remote()`.

    Args:
        maxsize: items at most, above which `put` waits; 0 for any number.
        **options: those of its actor.

    Raises:
        OptionError: an option is invalid.
        MisuseError: this is a task, which is given a queue.
    """

    def __init__(self, maxsize: int = 0, **options: Any) -> None:
        what = "aiogpu.sync.Queue()"
        portal = portal_for(what)
        if portal is None:
            raise MisuseError(
                f"{what} is for programs; in a task write aiogpu.Queue(), or give the "
                f"task the queue."
            )
        self._portal = portal
        self._target: queues.Queue[T] = portal.call(queues.Queue, maxsize, **options)
        portal.run(what, lambda: self._target)

    def __repr__(self) -> str:
        return repr(self._target)

    def put(self, item: T, timeout: float | None = None) -> None:
        """Put an item in; wait until there is room, or raise `QueueFullError`."""
        self._run("put()", lambda: self._target.put(unwrap(item), timeout))

    def put_nowait(self, item: T) -> None:
        """Put an item in if there is room; else raise `QueueFullError`."""
        self.put(item, 0)

    def put_batch(self, items: Iterable[T], timeout: float | None = None) -> None:
        """Put items in, each when there is room for it, by one call."""
        given = list(items)
        self._run(
            "put_batch()",
            lambda: self._target.put_batch([unwrap(one) for one in given], timeout),
        )

    def get(self, timeout: float | None = None) -> T:
        """Take the next item; wait until there is one, or raise `QueueEmptyError`."""
        return self._run("get()", lambda: self._target.get(timeout))

    def get_nowait(self) -> T:
        """Take the next item if there is one; else raise `QueueEmptyError`."""
        return self.get(0)

    def get_batch(self, most: int, timeout: float | None = None) -> list[T]:
        """Take up to `most` items, by one call; wait until there is one."""
        return self._run("get_batch()", lambda: self._target.get_batch(most, timeout))

    def size(self) -> int:
        """Return how many items are in the queue."""
        return self._run("size()", self._target.size)

    def empty(self) -> bool:
        """Return whether there is no item."""
        return self._run("empty()", self._target.empty)

    def full(self) -> bool:
        """Return whether there is no room."""
        return self._run("full()", self._target.full)

    def shutdown(self, at_once: bool = False) -> None:
        """Take no more items: `put` raises, and `get` when no item is left."""
        self._run("shutdown()", lambda: self._target.shutdown(at_once))

    def _run(self, what: str, begin: Callable[[], Awaitable[A]]) -> A:
        return self._portal.run(f"{what} of a queue", begin)


def _made(make: Callable[[], Any]) -> Any:
    """Call what makes an actor; return the handle of the loop."""
    return unwrap(make())


class SyncNode:
    """The node of a program without an event loop; `with` closes it."""

    def __init__(self, portal: Portal, node: nodes.Node) -> None:
        self._portal = portal
        self._node = node

    def __repr__(self) -> str:
        return repr(self._node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def is_open(self) -> bool:
        """True until the node is closed or dies."""
        return self._node.is_open

    def status(self) -> NodeStatus:
        """Return who holds what, what waits and why; see `aiogpu.status`."""
        return self._portal.run("status()", self._node.status)

    def why(self, task_id: int) -> Why:
        """Return why a task waits; see `aiogpu.why`."""
        return self._portal.run("why()", lambda: self._node.why(task_id))

    def cluster_resources(self) -> dict[str, float]:
        """Return all resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`."""
        return self._portal.run("cluster_resources()", self._node.cluster_resources)

    def available_resources(self) -> dict[str, float]:
        """Return the free amount of each resource, 0.0 included."""
        return self._portal.run("available_resources()", self._node.available_resources)

    def shutdown(self, at_once: bool = False) -> None:
        """Close the node: stop its tasks, leave nothing behind; idempotent.

        Ctrl-C while it waits for tasks to stop ends them at once.

        Args:
            at_once: give running tasks no time to stop by themselves.
        """
        portal = self._portal
        if not portal.is_usable:
            return
        try:
            portal.run("shutdown()", lambda: self._node.shutdown(at_once))
        except KeyboardInterrupt:
            portal.run("shutdown()", lambda: self._node.shutdown(at_once=True))
            raise
        finally:
            if portal.loop in [own.loop for own in _own]:
                close_own_loop()


# The input of `map`.


_END: Final = object()


class ThreadIterable(AsyncIterable[Any]):
    """An iterable as the loop reads it, whose `next` may block: in a thread of its own.

    The thread reads an item when one is wanted. It is a daemon and refers to none but
    the iterator, and ends with this object.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._wanted: SimpleQueue[asyncio.Future[Any] | None] = SimpleQueue()
        threading.Thread(
            target=_read, args=(iter(iterable), self._wanted), daemon=True
        ).start()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items()

    async def _items(self) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        while True:
            item: asyncio.Future[Any] = loop.create_future()
            self._wanted.put(item)
            if (found := await item) is _END:
                return
            yield found

    def __del__(self) -> None:
        self._wanted.put(None)


def _read(
    iterator: Iterator[Any], wanted: SimpleQueue[asyncio.Future[Any] | None]
) -> None:
    """Read items as they are wanted; the thread of a `ThreadIterable`."""

    def settle(item: asyncio.Future[Any], found: Any, error: Any) -> None:
        if item.done():
            return
        if error is None:
            item.set_result(unwrap(found))
        else:
            item.set_exception(error)

    while (item := wanted.get()) is not None:
        found, error = _END, None
        try:
            found = next(iterator, _END)
        except Exception as raised:  # noqa: BLE001 - it is that of the loop over map
            error = raised
        try:
            item.get_loop().call_soon_threadsafe(settle, item, found, error)
        except RuntimeError:
            return  # the loop is closed


def map_on(
    portal: Portal, remote: Any, iterable: Iterable[Any], options: dict[str, Any]
) -> ResultIterator[Any]:
    """Map a remote function or method over an iterable; see `aiogpu.sync`."""
    is_text = isinstance(iterable, str | bytes)

    def start() -> ResultIterator[Any]:
        given: Any = iterable
        if isinstance(iterable, Collection) and not is_text:
            given = [unwrap(one) for one in iterable]  # reading it blocks nothing
        elif hasattr(iterable, "__iter__") and not is_text:
            given = ThreadIterable(iterable)
        return ResultIterator(portal, remote.map(given, **options))

    return portal.call(start)


# An executor.


def apply(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call what is no plain function; the task of an `Executor`."""
    return function(*args, **named)


def apply_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function with several tuples of arguments; a chunk of `Executor.map`."""
    return [function(*args) for args in chunk]


KEPT: Final = 256
"""Functions of which the pickle is kept."""


class Executor(concurrent.futures.Executor):
    """Runs functions as tasks, for libraries that take an executor.

    Args:
        **options: those of a task, such as `num_gpus=0.25`.

    Raises:
        OptionError: an option is unknown or invalid.

    Example:
        `with aiogpu.sync.Executor(num_gpus=0.25) as pool: pool.map(score, images)`
    """

    def __init__(self, **options: Any) -> None:
        for name in ("max_buffered", "num_returns"):
            if name in options:
                raise OptionError(
                    f"aiogpu.sync.Executor() got {name}: its calls have one result."
                )
        decorate: Any = remote(**options) if options else remote
        self._call: RemoteFunction[..., Any] = decorate(apply)
        self._remote_of: Callable[[Any], RemoteFunction[..., Any]]
        self._remote_of = lru_cache(KEPT)(decorate)
        self._pending: WeakSet[Handle[Any]] = WeakSet()
        self._is_closed = False

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]:
        """Start a task that calls a function; gives its handle at once.

        Raises:
            RuntimeError: the executor is shut down.
            SerializationError: the function or an argument cannot be pickled.
        """
        if type(fn) is FunctionType and not kind_of(fn)[1]:
            return self._start(self._remote_of(fn), args, kwargs)
        return self._start(self._call, (fn, *args), kwargs)

    def _start(
        self, made: RemoteFunction[..., Any], args: Any, kwargs: Any
    ) -> Handle[Any]:
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        portal = portal_for("aiogpu.sync.Executor")
        if portal is None:
            raise MisuseError(
                "aiogpu.sync.Executor is for programs; a task starts others by "
                ".remote()."
            )
        handle: Handle[Any] = call_function(portal, made, args, kwargs)
        self._pending.add(handle)
        return handle

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Call a function with items of some iterables; gives results in their order.

        Args:
            fn: the function.
            *iterables: one for each of its arguments; read at once, to the shortest.
            timeout: seconds from this call, after which the next result raises
                `TimeoutError`.
            chunksize: calls in a task.
        """
        if chunksize <= 1:
            return super().map(fn, *iterables, timeout=timeout)
        calls = zip(*iterables, strict=False)
        chunks = iter(lambda: list(islice(calls, chunksize)), [])
        each = partial(apply_each, fn)
        return chain.from_iterable(super().map(each, chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; the node stays open.

        Args:
            wait: return when all calls have ended.
            cancel_futures: stop those that have not.
        """
        self._is_closed = True
        pending = [one for one in self._pending if not one.done()]
        if cancel_futures:
            for one in pending:
                one.cancel()
        if wait:
            concurrent.futures.wait(pending)
