"""Calls from threads without an event loop to the loop that has the node.

A `Portal` runs functions and coroutines on the loop of another thread and waits for
their results, so only the loop's thread touches the objects of a node. `portal_for`
finds the portal for the calling code, or starts a loop in a background thread. Then
come proxies of the loop's handles, iterators, actors and node, and an executor;
`aiogpu.sync` exports them. Imported late, because it imports asyncio.
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
from collections import deque
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
    Mapping,
)
from contextlib import AbstractAsyncContextManager, suppress
from copy import copy
from functools import partial
from inspect import isawaitable
from itertools import chain, islice
from math import inf
from operator import attrgetter
from queue import SimpleQueue
from types import FunctionType, TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)
from weakref import WeakKeyDictionary, WeakSet

from aiogpu.api import node as nodes
from aiogpu.api.actors import pool as pools
from aiogpu.api.actors import queue as queues
from aiogpu.api.actors.actor import ActorHandle, RemoteMethod
from aiogpu.api.actors.pool import PoolMethod
from aiogpu.api.calls import packed_call
from aiogpu.api.decorator import remote
from aiogpu.api.map import Results
from aiogpu.api.options import check_wait, whole
from aiogpu.api.remote_function import Definition, RemoteFunction, kind_of
from aiogpu.api.results import handle as handles
from aiogpu.api.results.blocking import cut_frames
from aiogpu.api.results.stream import IteratedOnce, Stream
from aiogpu.api.run import new_runner
from aiogpu.api.session import refuse_in_worker
from aiogpu.api.usage_errors import PUT_NAME, NotItsResult, SetInItsProcess
from aiogpu.client.current import is_in_task, is_loop_running, proxy_maker
from aiogpu.errors import (
    MisuseError,
    NodeError,
    NoLoopError,
    OptionError,
    OutOfMemoryError,
    QueueClosedError,
    SerializationError,
    TaskCancelledError,
    TaskTimeoutError,
    WorkerDiedError,
)
from aiogpu.serialization.captured import Captured, captured
from aiogpu.serialization.diagnostics import advise, line_of_caller, waiting_line
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_arguments, fix_item

if TYPE_CHECKING:
    from aiogpu.api.actors.gang import Gang
    from aiogpu.api.dashboard import NodeView
    from aiogpu.api.reservation import Lease, Placement
    from aiogpu.api.results.reports import Report
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


CHECK_EVERY: Final = 1.0
"""Seconds between a waiting thread's checks that the loop is still open."""


class Portal:
    """Runs calls on the event loop of another thread, in the order of arrival.

    Attributes:
        loop: the event loop.
        thread: the id of the thread that runs the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self.thread = thread
        self._pid = os.getpid()
        self._posted: deque[Callable[[], object]] = deque()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.loop!r}>"

    @property
    def is_here(self) -> bool:
        """True in the loop's own thread, as in a callback of a handle."""
        return get_ident() == self.thread

    @property
    def is_usable(self) -> bool:
        """True if the loop is open and belongs to this process."""
        return self._pid == os.getpid() and not self.loop.is_closed()

    def check(self) -> None:
        """Raise `NodeError` if the loop is closed, or this process is a fork."""
        if self._pid != os.getpid():
            raise NodeError(
                f"this node belongs to process {self._pid}, and process {os.getpid()} "
                f"is a fork of it. Open a node in this process by aiogpu.sync.init()."
            )
        if self.loop.is_closed():
            raise NodeError("this node is shut down; open one by aiogpu.sync.init().")

    def post(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon; the function must not raise.

        Raises:
            NodeError: the loop is closed, or this process is a fork.
        """
        self.check()
        self._posted.append(function)
        try:
            self.loop.call_soon_threadsafe(self._catch_up)
        except RuntimeError:  # the loop was closed meanwhile
            self.check()
            raise

    def _catch_up(self) -> None:
        """Call the functions that were posted so far, in order."""
        for _ in range(len(self._posted)):
            if self._posted:  # a function may have caught up
                self._posted.popleft()()

    def call(self, function: Callable[..., T], /, *args: Any, **named: Any) -> T:
        """Call a function on the loop; return its result or raise its error.

        Raises:
            NodeError: the loop is closed, or this process is a fork.
        """
        if self.is_here:
            self._catch_up()  # a callback may use the handle of a posted call
            return function(*args, **named)
        ended = allocate_lock()
        ended.acquire()
        results: list[T] = []
        errors: list[BaseException] = []
        line = line_of_caller()

        def run() -> None:
            before = waiting_line.set(line)
            try:
                results.append(function(*args, **named))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                errors.append(error)
            finally:
                waiting_line.reset(before)
                ended.release()

        self.post(run)
        while not ended.acquire(timeout=CHECK_EVERY):
            self.check()
        if not errors:
            return results[0]
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback refers to this frame

    def run(self, what: str, begin: Callable[[], Awaitable[T]]) -> T:
        """Await something on the loop; return its result or raise its error.

        Ctrl-C in the calling thread cancels the wait on the loop.

        Args:
            what: the call, for the message.
            begin: called on the loop; returns an awaitable.

        Raises:
            MisuseError: called in the loop's own thread, which would block itself.
            NodeError: the loop is closed, or this process is a fork.
        """
        if self.is_here:
            raise _blocks_loop(what)
        self.check()

        async def wait() -> T:
            return await begin()

        ended = asyncio.run_coroutine_threadsafe(wait(), self.loop)
        try:
            while not concurrent.futures.wait([ended], CHECK_EVERY).done:
                self.check()
            return ended.result()
        except BaseException:
            ended.cancel()
            raise
        finally:
            del ended  # the error's traceback refers to this frame

    def fetch(self, what: str, begin: Callable[[], Awaitable[T]]) -> T:
        """`run`, for a user's value: handles and actors in it arrive as proxies."""
        line = line_of_caller()

        async def get() -> T:
            # In the context of this asyncio task.
            proxy_maker.set(self)
            waiting_line.set(line)
            return await begin()

        return self.run(what, get)

    def wrap(self, target: Any) -> Any:
        """Return a proxy of a handle, iterator, actor or queue; else the object."""
        if isinstance(target, handles.Handle):
            return Handle[Any](self, target.task_name).follow(target)
        if isinstance(target, Stream | Results):
            return ResultIterator(self, target)
        if isinstance(target, ActorHandle):
            return SyncActorHandle(self, target)
        if isinstance(target, queues.Queue):
            target._actor = unwrap(target._actor)
            return Queue[Any]._over(self, target)
        if (
            isinstance(target, tuple)
            and target
            and isinstance(target[0], handles.Handle)
        ):
            return tuple(self.wrap(handle) for handle in target)
        return target

    def enter(self, what: str, manager: AbstractAsyncContextManager[object]) -> None:
        """Enter a context manager on the loop; leave it if that fails.

        Python does not call `__exit__` after a failure, such as a Ctrl-C that came when
        the loop had entered. Raises like `run`.
        """
        try:
            self.run(what, manager.__aenter__)
        except BaseException as error:
            self.leave(what, manager, error)
            raise

    def leave(
        self, what: str, manager: AbstractAsyncContextManager[object], error: Any
    ) -> None:
        """Leave a context manager on the loop, with the error of its block or None.

        If the loop is closed, its node holds nothing any more. Raises like `run`.
        """
        if self.is_usable:
            kind = None if error is None else type(error)
            self.run(what, lambda: manager.__aexit__(kind, error, None))


class LoopThread(Portal):
    """An event loop in a background thread, for a program without an event loop.

    The thread is a daemon, so that a program can end without closing the node; an exit
    handler closes it.

    Attributes:
        opener: the id of the thread that started the loop.
    """

    def __init__(self) -> None:
        self.opener = get_ident()
        started: concurrent.futures.Future[asyncio.AbstractEventLoop]
        started = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._serve, args=(started,), name="aiogpu-loop", daemon=True
        )
        self._thread.start()
        super().__init__(started.result(), self._thread.ident or 0)
        atexit.register(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Close the loop, and let Ctrl-C end the program as it does without a loop.

        After an unhandled KeyboardInterrupt Python ends by SIGINT, so that a shell
        script stops too. Python clears its flag for that whenever it evaluates code at
        exit, as imports do (CPython's `run_eval_code_obj`), and sets the flag if that
        code raises KeyboardInterrupt. So raise it once more.
        """
        try:
            _end_executors()
        finally:  # Ctrl-C ends the wait, and the calls
            self.end()
        if _is_interrupted():
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _serve(
        self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]
    ) -> None:
        async def run_until_closed() -> None:
            self._is_ending = asyncio.Event()
            started.set_result(asyncio.get_running_loop())
            await self._is_ending.wait()

        try:
            with new_runner() as runner:
                runner.run(run_until_closed())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    def end(self) -> None:
        """Close the loop and its node, if any; idempotent."""
        atexit.unregister(self._end_at_exit)
        if self._pid == os.getpid():
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._is_ending.set)
            self._thread.join()


def _is_interrupted() -> bool:
    """Return whether an unhandled Ctrl-C ends this program."""
    return getattr(sys, "last_type", None) is KeyboardInterrupt


_own: Final[list[LoopThread]] = []
"""The loop in a background thread, if one was started."""


_starting: Final = threading.Lock()

_portals: Final[dict[asyncio.AbstractEventLoop, Portal]] = {}
"""The portals to the program's own loops: one each, so that calls keep their order."""


def portal_for(what: str, *, opens: bool = False) -> Portal | None:
    """Return the portal to the program's node; None inside a task, which needs none.

    The loop that has the node may run in any thread. For a program without a node,
    start a loop in a background thread.

    Args:
        what: the call, for the message.
        opens: True if a fork of a program with a node may open a node of its own.

    Raises:
        MisuseError: an event loop runs in this thread, and would be blocked.
        NoLoopError: several event loops of the program have a node.
        NodeError: this process was forked by a task, or by a program with a node.
    """
    if is_in_task():
        return None
    own = _own_loop()
    if own is None or get_ident() != own.opener:
        # The opener is no task's, even while an inline node runs a task.
        refuse_in_worker(what)
    if (portal := proxy_maker.get()) is not None:
        # After the map's node was shut down, its input must not open another node.
        return portal  # type: ignore[no-any-return]
    if own is not None and own.is_here:
        return own
    if is_loop_running():
        raise _blocks_loop(what)
    portal = own or portal_to_program(what)
    if portal is not None:
        return portal
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
    """Return the loop in a background thread, if one was started and is still open."""
    return next((own for own in _own if own.is_usable), None)


def close_own_loop() -> None:
    """Close the loop in a background thread, and its node."""
    with _starting:
        own = _own_loop()
        _own.clear()
    if own is not None:
        own.end()


def portal_to_program(what: str) -> Portal | None:
    """Return the portal to the loop that has the program's node; None without one.

    Raises:
        NoLoopError: several loops have a node.
    """
    sessions = [one for one in handles.sessions.values() if not one.is_forked]
    if len(sessions) > 1:
        raise NoLoopError(
            f"{what} cannot choose a node: {len(sessions)} event loops of this program "
            f"have one. Write `asyncio.run_coroutine_threadsafe(call(), loop)"
            f".result()`, where `async def call()` makes the call on the loop you want."
        )
    if not sessions:
        return None
    loop, thread = sessions[0].loop, sessions[0].thread
    with _starting:
        portal = _portals.get(loop)
        if portal is None or portal.thread != thread or not portal.is_usable:
            for closed in [each for each in _portals if each.is_closed()]:
                del _portals[closed]
            portal = _portals[loop] = Portal(loop, thread)
        return portal


def _blocks_loop(what: str) -> MisuseError:
    return MisuseError(
        f"{what} would block the event loop that is running in this thread: use the "
        f"functions of `aiogpu` instead of `aiogpu.sync`, and `await` them."
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

    For code in threads that may block: a plain `def` endpoint of FastAPI, a function
    under `asyncio.to_thread`, a thread pool.

    Args:
        call: the function to call on the loop: `f.remote`, `actor.method.remote`,
            `f.map`, `aiogpu.status`.
        *args: its positional arguments.
        **named: its keyword arguments.

    Returns:
        An `aiogpu.sync.Handle`, whose `result(timeout)` waits, instead of a `Handle`; a
        plain iterator instead of a stream or the results of `map`; the result of any
        other awaitable, which is awaited; any other object unchanged.

    Raises:
        MisuseError: an event loop is running in this thread.
        NoLoopError: no event loop of the program has a node, or several have one.
        Exception: an error of the call.

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
            f"{what} needs a node that an event loop of this program has opened by "
            f"aiogpu.init(). In a program without an event loop use `aiogpu.sync`."
        )
    returned = call_on(portal, call, args, named)
    if isinstance(returned, _Proxy) or not isawaitable(returned):
        return returned
    result = portal.run(what, lambda: returned)
    return portal.call(portal.wrap, result)


# Proxies of the loop's objects.


def unwrap(value: Any) -> Any:
    """Undo `Portal.wrap`, on the loop: only there a posted handle has its target."""
    return value._target if isinstance(value, _Proxy) else value


def call_on(
    portal: Portal,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Call a function on the loop; return its result or a proxy of the result."""

    def make() -> Any:
        unwrapped = {name: unwrap(value) for name, value in named.items()}
        return portal.wrap(function(*(unwrap(arg) for arg in args), **unwrapped))

    return portal.call(make)


class _OnlyOnLoopError(MisuseError):
    """A proxy was pickled in a thread other than the loop's.

    Attributes:
        portal: the portal to the loop.
    """

    def __init__(self, message: str, portal: Portal) -> None:
        super().__init__(message)
        self.portal = portal


def call_function(
    portal: Portal, remote: RemoteFunction[..., Any], args: Any, kwargs: Any
) -> Any:
    """Start a task; return its handle, its iterator, or a tuple of handles.

    The first call on a node waits for the loop, because the node may refuse it. Most
    later calls do not wait; see `_post`.
    """
    func = remote._func
    if func is None or _called_on.get(remote) is not portal:
        handle = call_on(portal, remote.remote, args, kwargs)
        _called_on[remote] = portal
        return handle
    if func.window or remote._returns:
        return call_on(portal, remote.remote, args, kwargs)
    remote._definition.parameters.check(args, kwargs)
    handle = _post(portal, func.spec.name, partial(remote._submit, func), args, kwargs)
    if handle is None:
        return call_on(portal, remote.remote, args, kwargs)
    return handle


_called_on: Final[WeakKeyDictionary[RemoteFunction[..., Any], Portal]] = (
    WeakKeyDictionary()
)
"""The node on which a function was called last."""


_at_first: Final[WeakKeyDictionary[Definition, Captured | None]] = WeakKeyDictionary()
"""What functions captured at their first call here; None if nothing is to be warned of:
workers import the function by its name, or the warning was given."""


def warn_of_change(definition: Definition) -> None:
    """Warn once if a function, which is pickled once, would be pickled differently now.

    Only objects are compared: a change inside a list is not seen.
    """
    function = definition.function
    if type(function) is not FunctionType:
        return
    if definition not in _at_first:
        first = None if definition.reference() else captured(function)
        _at_first[definition] = first
        return
    first = _at_first[definition]
    if first is None or (change := first.find_change(captured(function))) is None:
        return
    _at_first[definition] = None
    advise(
        f"{change} has changed since the first .remote() of {definition.name}, which "
        f"pickled the function, and tasks use the old object. Pass what changes as an "
        f"argument, or decorate the function again: "
        f"`aiogpu.sync.remote({definition.name}.__wrapped__).remote(...)`."
    )


def call_method(portal: Portal, remote: RemoteMethod, args: Any, kwargs: Any) -> Any:
    """Call an actor's method; see `call_function`."""
    method, handle = remote._method, None
    if remote._link.interface is not None and not (method.window or method.returns):
        method.parameters.check(args, kwargs)
        send = partial(remote._link.call, method.label, method.name)
        handle = _post(portal, method.label, send, args, kwargs)
    if handle is None:
        return call_on(portal, remote.remote, args, kwargs)
    return handle


def _post(
    portal: Portal,
    name: str,
    send: Callable[[bytes], handles.Handle[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Handle[Any] | None:
    """Pickle the arguments in this thread and post the call to the loop.

    Waiting for the loop would take ten times as long as the call, because the
    interpreter runs one thread at a time. Only large arguments are waited for: the loop
    copies buffers to shared memory, and the caller may write to them afterwards;
    and a warning of them names the caller's line.

    Returns:
        The handle; None if the arguments contain a handle, which only the loop's thread
        can pickle.
    """
    if any(isinstance(argument, _Proxy) for argument in (*args, *kwargs.values())):
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

    if portal.is_here or isinstance(payload, PickledValue):
        portal.call(handle.start, begin)
    else:
        portal.post(partial(handle.start, begin))
    return handle


class _Proxy:
    """Base of proxies of the loop's objects. A proxy is pickled as its object.

    Attributes:
        _portal: the portal to the loop.
        _target: the object; a handle has one once the loop has made its call.
    """

    _portal: Portal
    _target: Any

    def __reduce__(self) -> Any:
        return self._on_loop().__reduce__()

    def _on_loop(self) -> Any:
        """Return the object behind this proxy.

        Raises:
            MisuseError: called in a thread other than the loop's.
        """
        if not self._portal.is_here:
            raise _OnlyOnLoopError(
                f"{self!r} can only be pickled as an argument of a task or an actor; "
                f"wait for its value and pickle that.",
                self._portal,
            )
        return self._target


class CallCancelledError(TaskCancelledError, concurrent.futures.CancelledError):
    """The handle of a call was cancelled; raised by its `result()`."""


NOT_BEGUN: Final = frozenset({"opening", "waiting", "expecting", "starting", "queued"})
"""States of a task whose code has not begun; see `Why.state`."""


class CallDiedError(WorkerDiedError, concurrent.futures.BrokenExecutor):
    """The worker of a call died; raised by its `result()`."""


class CallOutOfMemoryError(OutOfMemoryError, concurrent.futures.BrokenExecutor):
    """The worker of a call was killed for memory; raised by its `result()`."""


_BROKEN: Final[dict[type, type]] = {
    WorkerDiedError: CallDiedError,
    OutOfMemoryError: CallOutOfMemoryError,
}
"""The classes of errors that are a `BrokenExecutor` as well. `aiogpu.errors` does not
import `concurrent.futures`, which would delay each worker's start."""


class Handle(_Proxy, NotItsResult, concurrent.futures.Future[T]):
    """The future result of a task, in a thread without an event loop.

    `result(timeout)` waits. `concurrent.futures.wait` and `as_completed` accept the
    handle, and `asyncio.wrap_future` makes it awaitable. `cancel()` stops the work.

    Attributes:
        task_name: name of the task.
    """

    def __init__(self, portal: Portal, task_name: str) -> None:
        super().__init__()
        self._portal = portal
        self.task_name = task_name
        self._trace: TracebackType | None = None

    @property
    def __aiogpu_handle__(self) -> handles.Handle[T]:
        """The loop's handle; see `serialization.references.HANDLE_MARK`."""
        return self._on_loop()  # type: ignore[no-any-return]

    def follow(self, target: handles.Handle[T]) -> Self:
        """Follow the loop's handle to its end; call this on the loop."""
        self._target = target
        target.add_done_callback(self._settle)
        return self

    def start(self, begin: Callable[[], handles.Handle[T]]) -> None:
        """Make the call, on the loop; an error of the call becomes the task's error."""
        try:
            target = begin()
        except Exception as error:  # noqa: BLE001 - `result` raises it
            target = handles.Handle(
                self.task_name, cast("Any", None), self._portal.loop
            )
            target.settle(error)
        self.follow(target)

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
        """Number of the task; 0 before the task is submitted."""
        target: handles.Handle[T] | None = getattr(self, "_target", None)
        return 0 if target is None else target.task_id

    def __bool__(self) -> bool:  # type: ignore[override]
        return True  # as of any future, unlike handles on a loop

    def _settle(self, target: handles.Handle[T]) -> None:
        """Take the outcome of the loop's handle, on the loop; callbacks are called."""
        if self.done():
            return  # `cancel` has settled it
        before = proxy_maker.set(self._portal)
        try:
            if target.cancelled():
                self._end_cancelled()
            elif (error := target.exception()) is not None:
                if type(error) in _BROKEN:
                    error.__class__ = _BROKEN[type(error)]
                self._trace = error.__traceback__
                super().set_exception(error)
            else:
                super().set_result(target.result())
        finally:
            proxy_maker.reset(before)

    def _end_cancelled(self) -> None:
        super().cancel()
        super().set_running_or_notify_cancel()

    if not TYPE_CHECKING:

        def set_result(self, _result: object) -> NoReturn:
            """Raise `MisuseError`: only the task ends its handle."""
            raise MisuseError(
                f"the handle of {self.task_name} is ended by its task alone; for a "
                f"future of your own, make a `concurrent.futures.Future()`."
            )

        set_exception = set_result

        def set_running_or_notify_cancel(self) -> NoReturn:
            """Raise `MisuseError`: only the task ends its handle."""
            self.set_result(None)

    def cancel(self) -> bool:
        """Cancel the handle and stop the work, also if it runs.

        Returns:
            False if the task has ended before, with a result or an error.
        """
        if not self.done():
            if self._portal.is_usable:
                self._portal.call(self._cancel)
            else:
                self._end_cancelled()  # the work has ended with its loop
        return self.cancelled()

    def _cancel(self) -> None:
        if self._target.cancel():
            self._settle(self._target)

    async def _cancel_unless_begun(self) -> None:
        """Cancel the handle if its task waits; call this on the loop."""
        if (await self._target.why()).state in NOT_BEGUN:
            self._cancel()

    def running(self) -> bool:
        """Return whether the task runs now; asks the node.

        In a callback, which must not wait for the node, it is False.
        """
        if self.done() or self._portal.is_here or not self._portal.is_usable:
            return False
        return self.why().state == "running"

    def result(self, timeout: float | None = None) -> T:
        """Wait for the task's result.

        Args:
            timeout: seconds, 0 or less to return at once; None waits without limit.

        Raises:
            Exception: the error of the task, or the reason why it could not start.
            TaskTimeoutError: the time is up; the task goes on.
            TaskCancelledError: the task was cancelled; the error is a
                `concurrent.futures.CancelledError` as well.
            MisuseError: called in the loop's own thread, which would block itself.
        """
        error = None
        try:
            self._wait(timeout)
            error = super().exception()
            if error is not None:  # before 3.13 Python tests its truth
                # Otherwise each raise would append its frames to the previous ones.
                raise error.with_traceback(self._trace)
            return super().result()
        except BaseException as raised:
            cut_frames(raised)
            raise
        finally:
            del self, error  # the error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the task ends; return its error or None. Raises like `result`."""
        self._wait(timeout)
        return super().exception()

    def _wait(self, timeout: float | None) -> None:
        deadline = inf if timeout is None else time.monotonic() + timeout
        while not self.done():
            remaining = deadline - time.monotonic()
            if not remaining > 0:
                raise TaskTimeoutError(
                    f"{self.task_name} did not end within {timeout:g} s; it goes on. "
                    f"Call handle.cancel() to stop it."
                )
            if self._portal.is_here:
                raise _blocks_loop(f"waiting for {self.task_name}")
            self._portal.check()
            with suppress(TimeoutError, concurrent.futures.CancelledError):
                super().exception(min(remaining, CHECK_EVERY))
        if self.cancelled():
            raise CallCancelledError(f"{self.task_name} was cancelled.")

    def __await__(self) -> NoReturn:
        raise MisuseError(
            f"the handle of {self.task_name} comes from `aiogpu.sync` and cannot be "
            f"awaited: call handle.result(), or write `await "
            f"asyncio.wrap_future(handle)`."
        )

    def reports(self) -> ResultIterator[Report]:
        """Return an iterator over the task's reports, until the task ends.

        See `aiogpu.report` and `aiogpu.Handle.reports`.
        """

        def read() -> Any:
            # The loop has made the posted call, and set `_target`, before it runs this.
            return self._target.reports()

        return ResultIterator(self._portal, self._portal.call(read))

    def why(self) -> Why:
        """Return why the task waits, or its state; see `aiogpu.Handle.why`."""

        async def ask() -> Why:
            return await self._target.why()  # type: ignore[no-any-return]

        return self._portal.run("handle.why()", ask)


def checked_handles(name: str, argument: Any) -> list[Handle[Any]]:
    """Return the handles that were passed to a function of `aiogpu.sync`, as a list.

    Raises:
        MisuseError: the argument is not a collection of handles.
    """
    what = f"aiogpu.sync.{name}()"
    if isinstance(argument, _Proxy | str | bytes) or not hasattr(argument, "__iter__"):
        or_one = "a handle or " if name == "get" else ""
        raise MisuseError(f"{what} takes {or_one}a list of handles, not {argument!r}.")
    checked = list(argument)
    for handle in checked:
        if not isinstance(handle, Handle):
            raise MisuseError(
                f"{what} was given {handle!r}, which is not a handle; pass handles "
                f"that .remote() of an `aiogpu.sync.remote` function returned."
            )
    return checked


def completed(
    waited: list[Handle[Any]], timeout: float | None = None
) -> Iterator[Handle[Any]]:
    """Yield handles as they end, until all have ended or the time is up.

    Raises:
        OptionError: the timeout is invalid.
        MisuseError: called in the loop's own thread, which would block itself.
        NodeError: the loop was closed, so no handle will end.
    """
    if timeout is not None:
        check_wait("timeout", timeout)
    deadline = inf if timeout is None else time.monotonic() + timeout
    ended = [handle for handle in dict.fromkeys(waited) if handle.done()]
    pending = set(waited).difference(ended)
    yield from ended
    while pending:
        portal = waited[0]._portal
        remaining = deadline - time.monotonic()
        if portal.is_here and remaining > 0:
            raise _blocks_loop(f"waiting for {waited[0].task_name}")
        portal.check()
        step = max(0.0, min(CHECK_EVERY, remaining))
        try:
            for future in concurrent.futures.as_completed(pending, timeout=step):
                handle = cast("Handle[Any]", future)
                pending.discard(handle)
                yield handle
        except TimeoutError:
            if time.monotonic() >= deadline:
                return


def results_of(given: Any, timeout: float | None) -> Any:
    """Wait for results, an actor or a reservation; see `aiogpu.sync.get`."""
    if isinstance(given, SyncActorHandle | _Reservation):
        given._portal.run("aiogpu.sync.get()", lambda: given._target)
        return given
    if isinstance(given, Handle):
        return given.result(timeout)
    waited = checked_handles("get", given)
    for handle in completed(waited, timeout):
        if handle.cancelled() or super(Handle, handle).exception() is not None:
            return handle.result()
    late = sum(not handle.done() for handle in waited)
    if late:
        raise TaskTimeoutError(
            f"{late} of {len(waited)} tasks did not end within {timeout:g} s; they go "
            f"on."
        )
    return [handle.result() for handle in waited]


class ResultIterator(_Proxy, Iterator[T]):
    """Iterator over the results of a generator or of `map`, without an event loop.

    `with` stops the work at the end of its block. Otherwise the work stops when the
    last reference is dropped: in `for item in f.remote()` at the end of the loop.
    """

    def __init__(
        self, portal: Portal, target: IteratedOnce[T] | AsyncGenerator[T]
    ) -> None:
        self._portal = portal
        self._target: IteratedOnce[T] | AsyncGenerator[T] = target

    def __repr__(self) -> str:
        return repr(self._target)

    def __next__(self) -> T:
        target = self._target
        try:
            return self._portal.fetch("the next item", target.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        except concurrent.futures.CancelledError:
            raise TaskCancelledError(f"{target!r} was cancelled.") from None
        finally:
            del target

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the work and drop the remaining results; idempotent."""
        self._portal.run("close()", self._target.aclose)


class SyncActorHandle(_Proxy, SetInItsProcess, Generic[A]):
    """A handle to an actor, in a thread without an event loop.

    Call methods by `handle.method.remote(...)`. `aiogpu.sync.get(handle)` waits until
    the actor is ready. The actor ends when the last handle is dropped; `with` ends it
    at the end of the block, after the calls made so far.
    """

    def __init__(self, portal: Portal, target: ActorHandle[A]) -> None:
        self._portal = portal
        self._target = target

    def __repr__(self) -> str:
        return repr(self._target)

    def __getattr__(self, name: str) -> SyncMethod:
        method = self._portal.call(getattr, self._target, name)
        return SyncMethod(self._portal, method)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SyncActorHandle):
            return NotImplemented
        return bool(self._target == other._target)

    def __hash__(self) -> int:
        return hash(self._target)

    def __copy__(self) -> Self:
        return type(self)(self._portal, copy(self._target))

    def __deepcopy__(self, _memo: object) -> Self:
        return copy(self)

    def __enter__(self) -> Self:
        self._portal.enter("`with` of an actor", self._target)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._portal.leave("`with` of an actor", self._target, error)


class SyncMethod:
    """A method of an actor or a pool; call it by `.remote(...)`."""

    def __init__(self, portal: Portal, method: RemoteMethod | PoolMethod) -> None:
        self._portal = portal
        self._method: Any = method

    def __repr__(self) -> str:
        return repr(self._method)

    def __reduce__(self) -> Any:
        return self._method.__reduce__()  # raises

    def options(self, **options: Any) -> SyncMethod:
        """Return an actor's method with other options; see `aiogpu.method`."""
        return SyncMethod(self._portal, self._method.options(**options))

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method; return a handle at once, or an iterator for a generator."""
        if isinstance(self._method, RemoteMethod):
            return call_method(self._portal, self._method, args, kwargs)
        return call_on(self._portal, self._method.remote, args, kwargs)

    def map(self, iterable: Iterable[Any], /, **options: Any) -> ResultIterator[Any]:
        """Call the method with each item; see `aiogpu.sync.RemoteFunction.map`."""
        return map_on(self._portal, self._method, iterable, options)

    def __call__(self, /, *_args: object, **_kwargs: object) -> Any:
        """Refuse a direct call.

        Raises:
            MisuseError: always, with the call to write instead.
        """
        name = self._method.__name__.rpartition(".")[2]
        raise MisuseError(
            f"{self._method.__name__} runs in its actor's process: write "
            f"`actor.{name}.remote(...)`."
        )


class ActorPool(_Proxy, SetInItsProcess, Generic[A]):
    """Several actors that are called as one, in a thread without an event loop.

    As `aiogpu.ActorPool`, with blocking calls. `with` waits until the actors are ready,
    and at the end of its block ends the actors that the pool started. The pool has one
    name of its own, `close`; all others are methods of the actors. `for actor in pool`
    iterates over the actors. `aiogpu.util.ActorPool` has the methods of Ray's pool.

    Args:
        actor: a class under `@aiogpu.sync.remote`, a function that starts an actor, or
            a list of actors.
        size: number of actors at first.
        **options: `min_size`, `max_size`, `target`, `idle_after`.

    Raises:
        OptionError: an option is invalid.
        MisuseError: `actor` has another type, or the call was made in a task.

    Example:
        `with ActorPool(Model, 2) as pool: labels = list(pool.classify.map(images))`
    """

    def __init__(self, actor: Any, size: int | None = None, **options: Any) -> None:
        what = "aiogpu.sync.ActorPool()"
        portal = portal_for(what)
        if portal is None:
            raise MisuseError(
                f"{what} is for programs. In a task, write the task as `async def` and "
                f"use aiogpu.ActorPool, or call the actors one by one."
            )
        source = getattr(actor, "_wrapped", actor)
        if isinstance(source, list | tuple):
            source = [unwrap(handle) for handle in source]
        elif isinstance(source, FunctionType):
            source = partial(_unwrapped, actor)
        self._portal = portal
        self._target: pools.ActorPool[A]
        self._target = portal.call(pools.ActorPool, source, size, **options)

    def __repr__(self) -> str:
        return repr(self._target)

    def __len__(self) -> int:
        """Return the number of actors, ready or not."""
        return self._portal.call(len, self._target)

    def __iter__(self) -> Iterator[SyncActorHandle[A]]:
        """Iterate over the handles of the actors there are now, ready or not."""
        actors: list[ActorHandle[A]] = self._portal.call(list, self._target)
        return iter([SyncActorHandle(self._portal, actor) for actor in actors])

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> SyncMethod:
        return SyncMethod(self._portal, self._portal.call(getattr, self._target, name))

    def __enter__(self) -> Self:
        self._portal.enter("`with` of a pool", self._target)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._portal.leave("`with` of a pool", self._target, error)

    def close(self) -> None:
        """End the actors that the pool started, after their calls; idempotent."""
        self._portal.run("close()", self._target.aclose)


class Queue(_Proxy, Generic[T]):
    """A queue in an actor, in a thread without an event loop; see `aiogpu.Queue`.

    Methods that are awaited there block here. A queue can be an argument of
    `.remote()`.

    Args:
        maxsize: most items; `put` waits while the queue is full; 0 for no limit.
        **options: options of the queue's actor.

    Raises:
        OptionError: an option is invalid.
        MisuseError: the call was made in a task.
    """

    def __init__(self, maxsize: int = 0, **options: Any) -> None:
        what = "aiogpu.sync.Queue()"
        portal = portal_for(what)
        if portal is None:
            raise MisuseError(
                f"{what} is for programs. In a task write aiogpu.Queue(), or pass the "
                f"queue to the task as an argument."
            )
        self._portal = portal
        self._target: queues.Queue[T] = portal.call(queues.Queue, maxsize, **options)
        portal.run(what, lambda: self._target)

    @classmethod
    def _over(cls, portal: Portal, target: queues.Queue[T]) -> Self:
        """Return a proxy of an existing queue."""
        queue = cls.__new__(cls)
        queue._portal, queue._target = portal, target
        return queue

    @property
    def actor(self) -> SyncActorHandle[Any]:
        """The handle of the queue's actor, for `aiogpu.sync.kill`."""
        return SyncActorHandle(self._portal, self._target.actor)

    def __iter__(self) -> Iterator[T]:
        """Take items until the queue is shut down and empty."""
        with suppress(QueueClosedError):
            while True:
                yield self.get()

    def __repr__(self) -> str:
        return repr(self._target)

    def put(self, item: T, timeout: float | None = None) -> None:
        """Put an item in; wait until there is room, or raise `QueueFullError`."""
        self._run("put()", lambda: self._target.put(unwrap(item), timeout))

    def put_nowait(self, item: T) -> None:
        """Put an item in, or raise `QueueFullError` if there is no room."""
        self.put(item, 0)

    def put_batch(self, items: Iterable[T], timeout: float | None = None) -> None:
        """Put several items in by one call, each as soon as there is room."""
        batch = list(items)
        self._run(
            "put_batch()",
            lambda: self._target.put_batch([unwrap(item) for item in batch], timeout),
        )

    def get(self, timeout: float | None = None) -> T:
        """Take the next item; wait until there is one, or raise `QueueEmptyError`."""
        return self._run("get()", lambda: self._target.get(timeout))

    def get_nowait(self) -> T:
        """Take the next item, or raise `QueueEmptyError` if there is none."""
        return self.get(0)

    def get_batch(self, most: int, timeout: float | None = None) -> list[T]:
        """Take up to `most` items by one call; wait until there is at least one."""
        return self._run("get_batch()", lambda: self._target.get_batch(most, timeout))

    def qsize(self) -> int:
        """Return the number of items in the queue."""
        return self._run("qsize()", self._target.qsize)

    def empty(self) -> bool:
        """Return whether the queue has no item."""
        return self._run("empty()", self._target.empty)

    def full(self) -> bool:
        """Return whether the queue has no room."""
        return self._run("full()", self._target.full)

    def shutdown(self, immediate: bool = False) -> None:
        """Accept no more items: `put` raises, and `get` raises when no item is left."""
        self._run("shutdown()", lambda: self._target.shutdown(immediate))

    def _run(self, what: str, begin: Callable[[], Awaitable[A]]) -> A:
        return self._portal.fetch(f"{what} of a queue", begin)


class _Reservation(_Proxy):
    """A lease or a placement without an event loop; `with` ends it with its block."""

    def __init__(self, portal: Portal, target: Lease | Placement) -> None:
        self._portal = portal
        self._target = target

    def __repr__(self) -> str:
        return repr(self._target)

    def __reduce__(self) -> Any:
        return self._target.__reduce__()

    def __enter__(self) -> Self:
        self._portal.enter(repr(self), self._target)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._portal.leave(repr(self), self._target, error)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a fact about the reservation, which any thread may read."""
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._target, name)

    def why(self) -> Why:
        """Return why the reservation waits, or its state."""
        target: Lease | Placement = self._target
        return self._portal.run("why()", target.why)


class SyncLease(_Reservation):
    """A lease, in a thread without an event loop; see `aiogpu.types.Lease`.

    `aiogpu.sync.get(lease)` waits until it is granted, as `with` does.
    """

    _target: Lease
    ids: list[int | str]
    accelerators: dict[str, list[int | str]]
    environ: dict[str, str]
    gpu_memory: int
    is_held: bool

    def release(self) -> None:
        """Release the lease; idempotent."""
        self._portal.run("release()", self._target.release)

    def lost(self) -> Exception:
        """Wait until the lease is lost without a release; return the reason."""
        return self._portal.run("lost()", self._target.lost)


class SyncPlacement(_Reservation):
    """A placement group, in a thread without an event loop; see `aiogpu.placement`."""

    _target: Placement
    id: str
    name: str
    strategy: str
    bundles: tuple[Mapping[str, float], ...]
    is_ready: bool

    def __len__(self) -> int:
        """Return the number of bundles."""
        return len(self._target)

    def placement_group_of(self) -> PlacementGroupSpec:
        """Return the specification, for `options(placement=...)`."""
        return self._target.placement_group_of()

    def ready(self) -> Self:
        """Wait until the group holds all its bundles; return the group."""
        self._portal.run("ready()", self._target.ready)
        return self

    def remove(self) -> None:
        """Release the bundles, and end the group's tasks and actors; idempotent."""
        self._portal.run("remove()", self._target.remove)


class SyncGang:
    """The ranks of a class, in a thread without an event loop; see `aiogpu.gang`."""

    def __init__(self, portal: Portal, gang: Gang) -> None:
        self._portal = portal
        self._gang = gang

    def __repr__(self) -> str:
        return repr(self._gang)

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._gang)

    def __enter__(self) -> Self:
        self._portal.run("gang()", self._gang.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method in all ranks; return the results in rank order."""
        return self._portal.run(
            "call()", lambda: self._gang.call(method, *args, **kwargs)
        )

    def close(self) -> None:
        """End all ranks in order, and free what they hold; idempotent."""
        self._portal.run("close()", self._gang.close)


def _unwrapped(make: Callable[[], Any]) -> Any:
    """Call a function that starts an actor; return the loop's handle."""
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
        """Return which tasks hold or wait for what; see `aiogpu.status`."""
        return self._portal.run("status()", self._node.status)

    def dashboard(self) -> NodeView:
        """Return the overview of the dashboard, which a notebook shows below the cell.

        It shows the node at this moment.
        """
        return self._portal.run("dashboard()", self._node.dashboard)

    @property
    def dashboard_url(self) -> str:
        """The URL of the dashboard, with its token; "" without `dashboard=True`."""
        return self._node.dashboard_url

    def why(self, task_id: int) -> Why:
        """Return why a task waits; see `aiogpu.why`."""
        return self._portal.run("why()", lambda: self._node.why(task_id))

    def stack(self, task: int | Handle[Any]) -> str:
        """Return where the code of a running task is; see `aiogpu.types.Node.stack`."""
        number = task.why().task if isinstance(task, Handle) else task
        return self._portal.run("stack()", lambda: self._node.stack(number))

    def cluster_resources(self) -> dict[str, float]:
        """Return all resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`."""
        return self._portal.run("cluster_resources()", self._node.cluster_resources)

    def available_resources(self) -> dict[str, float]:
        """Return the free amount of each resource, 0.0 included."""
        return self._portal.run("available_resources()", self._node.available_resources)

    def shutdown(self, at_once: bool = False) -> None:
        """Close the node: stop its tasks; leave no process or file. Idempotent.

        Ctrl-C during the shutdown ends the tasks at once.

        Args:
            at_once: True to give running tasks no time to stop by themselves.
        """
        portal = self._portal
        if not portal.is_usable:
            return
        if portal.is_here:
            raise _blocks_loop("shutdown() in a callback")
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
    """Async iterable over a plain iterable that may block, read in a separate thread.

    The thread reads an item when the loop asks for one. It is a daemon, refers only to
    the iterator and the portal, and ends with this object.
    """

    def __init__(self, iterable: Iterable[Any], portal: Portal) -> None:
        self._wanted: SimpleQueue[asyncio.Future[Any] | None] = SimpleQueue()
        threading.Thread(
            target=_read,
            args=(iter(iterable), self._wanted, portal),
            name="aiogpu-map-input",
            daemon=True,
        ).start()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items()

    async def _items(self) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        try:
            while True:
                item: asyncio.Future[Any] = loop.create_future()
                self._wanted.put(item)
                if (value := await item) is _END:
                    return
                yield value
        finally:
            self._end()

    def _end(self) -> None:
        self._wanted.put(None)

    __del__ = _end


def _read(
    iterator: Iterator[Any],
    wanted: SimpleQueue[asyncio.Future[Any] | None],
    portal: Portal,
) -> None:
    """Read an item for each future in `wanted`; the thread of a `ThreadIterable`."""
    proxy_maker.set(portal)
    # The thread keeps no item while it waits: a cancelled future and an error refer to
    # the frames that saw them, and so to the `ThreadIterable`, which would never end.
    while _read_next(iterator, wanted.get()):
        pass


def _read_next(iterator: Iterator[Any], item: asyncio.Future[Any] | None) -> bool:
    """Read the next item for a future; return False if no more items are wanted."""
    if item is None:
        return False
    value, error = _END, None
    try:
        value = next(iterator, _END)
    except Exception as raised:  # noqa: BLE001 - raised by the loop over map
        error = raised
    try:
        item.get_loop().call_soon_threadsafe(_settle_item, item, value, error)
    except RuntimeError:
        return False  # the loop is closed
    finally:
        del error, item
    return True


def _settle_item(item: asyncio.Future[Any], value: Any, error: Any) -> None:
    if item.done():
        return
    if error is None:
        item.set_result(unwrap(value))
    else:
        item.set_exception(error)


def map_on(
    portal: Portal, remote: Any, iterable: Iterable[Any], options: dict[str, Any]
) -> ResultIterator[Any]:
    """Map a remote function or method over an iterable; see `aiogpu.sync`."""
    is_text = isinstance(iterable, str | bytes)

    def start() -> ResultIterator[Any]:
        items: Any = iterable
        if isinstance(iterable, Collection) and not is_text:
            items = [unwrap(item) for item in iterable]  # does not block
        elif hasattr(iterable, "__iter__") and not is_text:
            items = ThreadIterable(iterable, portal)
        return ResultIterator(portal, remote.map(items, **options))

    return portal.call(start)


# An executor.


def apply(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call any callable; the task of an `Executor` if `fn` is not a plain function."""
    return function(*args, **named)


def apply_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function with several tuples of arguments; a chunk of `Executor.map`."""
    return [function(*args) for args in chunk]


def _fixed(function: str, argument: Any) -> Any:
    """Return an argument in a form that later writes to it do not change."""
    try:
        return fix_item(function, argument)
    except SerializationError as error:
        if not isinstance(error.__cause__, _OnlyOnLoopError):
            raise
        portal: Portal = error.__cause__.portal
        return portal.call(fix_item, function, argument)


KEPT: Final = 256
"""Functions whose pickle an `Executor` keeps."""


class _Pickled(NamedTuple):
    """A function of an executor, as it was pickled."""

    remote: RemoteFunction[..., Any]
    captured: Captured


class _Functions:
    """The functions of an executor; each is pickled again if it may have changed.

    Used by any thread.
    """

    def __init__(self, decorate: Callable[[Any], RemoteFunction[..., Any]]) -> None:
        self._decorate = decorate
        self._lock = threading.Lock()
        self._pickled: dict[FunctionType, _Pickled] = {}

    def remote(
        self, portal: Portal, function: FunctionType
    ) -> RemoteFunction[..., Any]:
        """Return the remote function of a function, as the function is now.

        Raises:
            SerializationError: the function cannot be pickled.
        """
        now = captured(function)
        known = self._pickled.get(function)
        if known is None:
            known = _Pickled(self._decorate(function), now)
        elif not now.is_same(known.captured):
            # On the loop, since the function may capture handles to actors.
            known = _Pickled(portal.call(known.remote._renewed), now)
        with self._lock:
            # Reinserted at the end, so the first entry is the oldest.
            self._pickled.pop(function, None)
            self._pickled[function] = known
            if len(self._pickled) > KEPT:
                del self._pickled[next(iter(self._pickled))]
        return known.remote


class Executor(concurrent.futures.Executor):
    """Runs functions as tasks, for libraries that take an executor.

    A function runs as it is when it is submitted, with the outer variables, globals and
    defaults of that moment. A function of a module is sent by its name. Like the
    library's executors, it lets the program end only when its calls have ended.

    Args:
        **options: options of a task, such as `num_gpus=0.25`.

    Raises:
        OptionError: an option is unknown or invalid.

    Example:
        `with aiogpu.sync.Executor(num_gpus=0.25) as pool: pool.map(score, images)`
    """

    def __init__(self, **options: Any) -> None:
        for name in ("max_buffered", "num_returns"):
            if name in options:
                raise OptionError(
                    f"aiogpu.sync.Executor() has no option {name}: each call has one "
                    f"result."
                )
        decorate: Any = remote(**options) if options else remote
        self._call: RemoteFunction[..., Any] = decorate(apply)
        self._functions = _Functions(decorate)
        self._lock = threading.Lock()
        self._pending: set[Handle[Any]] = set()
        self._is_closed = False
        self._cancelling: asyncio.Task[None] | None = None
        _executors.add(self)

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]:
        """Start a task that calls a function; return its handle at once.

        Raises:
            RuntimeError: the executor is shut down.
            InfeasibleError: a call asks for more than the node has.
            SerializationError: the function or an argument cannot be pickled.
        """
        self._check_open()
        portal = portal_for("aiogpu.sync.Executor")
        if portal is None:
            raise MisuseError(
                "aiogpu.sync.Executor is for programs. In a task, start other tasks by "
                ".remote()."
            )
        handle: Handle[Any]
        if type(fn) is FunctionType and not kind_of(fn)[1]:
            remote = self._functions.remote(portal, fn)
            handle = call_function(portal, remote, args, kwargs)
        else:
            handle = call_function(portal, self._call, (fn, *args), kwargs)
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._pending.add(handle)
        if is_late:
            handle.cancel()  # a `shutdown` in another thread did not wait for it
            self._check_open()
        handle.add_done_callback(self._forget)
        return handle

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _forget(self, handle: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._pending.discard(cast("Handle[Any]", handle))

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Call a function with items of the iterables; return results in their order.

        Args:
            fn: the function.
            *iterables: one for each argument of the function; read at once, to the end
                of the shortest.
            timeout: seconds from this call, after which the next result raises
                `TimeoutError`; None for no limit.
            chunksize: calls in a task, 1 or more; default 1.

        Raises:
            OptionError: `chunksize` is invalid.
        """
        _check_chunksize("chunksize", chunksize)
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        name = getattr(fn, "__name__", type(fn).__name__)
        calls = (
            tuple(_fixed(name, argument) for argument in arguments)
            for arguments in zip(*iterables, strict=False)
        )
        chunks = iter(lambda: list(islice(calls, chunksize)), [])
        each = partial(apply_each, fn)
        return chain.from_iterable(super().map(each, chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; the node stays open.

        Args:
            wait: True to return when all calls have ended.
            cancel_futures: True to cancel the calls that have not begun.

        Raises:
            MisuseError: called in a callback of a handle, which cannot wait for others.
        """
        with self._lock:
            pending = [handle for handle in self._pending if not handle.done()]
            if wait and any(handle._portal.is_here for handle in pending):
                raise _blocks_loop("shutdown() of an executor")
            self._is_closed = True
        with suppress(NodeError):  # the loop was closed: no call goes on
            if cancel_futures and pending:
                self._cancel_waiting(pending)
            if wait:
                deque(completed(pending), maxlen=0)

    def _cancel_waiting(self, pending: list[Handle[Any]]) -> None:
        """Cancel the calls that have not begun, the newest first."""

        async def cancel() -> None:
            for handle in sorted(pending, key=attrgetter("task_id"), reverse=True):
                await handle._cancel_unless_begun()
                await asyncio.sleep(0)  # thousands would hold the loop

        portal = pending[0]._portal
        if portal.is_here:  # in a callback, which cannot wait
            self._cancelling = portal.loop.create_task(cancel())
        else:
            portal.run("shutdown() of an executor", cancel)


_check_chunksize: Final = whole(1, "a whole number of calls, 1 or more")


_executors: Final[WeakSet[Executor]] = WeakSet()
"""Executors; calls that have not ended keep theirs alive."""


def _end_executors() -> None:
    """Wait at the end of the program for the calls of executors; accept no more.

    After an unhandled Ctrl-C they are stopped with the node. Nothing is left to wait
    for if the program had the node on its own event loop, which has ended.
    """
    is_waiting = _own_loop() is not None and not _is_interrupted()
    for executor in list(_executors):
        executor.shutdown(wait=is_waiting)


atexit.register(_end_executors)
