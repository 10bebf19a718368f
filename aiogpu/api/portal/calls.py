"""Calls of a program's code without an event loop, over the portal to its node."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from functools import partial
from inspect import isawaitable
from queue import SimpleQueue
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

from aiogpu.api import calls
from aiogpu.api.actors import actor as actors
from aiogpu.api.portal.handle import (
    Handle,
    ResultIterator,
    checked_handles,
    completed,
    results_of,
)
from aiogpu.api.portal.loop_thread import (
    Portal,
    blocks_loop,
    portal_for,
    portal_to_program,
)
from aiogpu.api.portal.proxy import OnlyOnLoopError, Proxy, call_on, unwrap
from aiogpu.api.remote_function import Definition, RemoteFunction
from aiogpu.api.results import handle as handles
from aiogpu.api.results import wait as waiting
from aiogpu.api.results.stream import IteratedOnce
from aiogpu.client.current import is_in_task, is_loop_running, proxy_maker
from aiogpu.errors import NoLoopError, SerializationError
from aiogpu.serialization.captured import Captured, captured
from aiogpu.serialization.diagnostics import advise
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_arguments

P = ParamSpec("P")
T = TypeVar("T")


def call_function(
    portal: Portal, remote: RemoteFunction[..., Any], args: Any, kwargs: Any
) -> Any:
    """Start a task; return its handle, its iterator, or a tuple of handles.

    The first call on a node waits for the loop, because the node may refuse it. Most
    later calls do not wait; see `_post`.
    """
    func = remote._func
    is_known = func is not None and _called_on.get(remote) is portal
    if func is None or not is_known or func.window or remote._returns:
        handle = call_on(portal, remote.remote, args, kwargs)
        _called_on[remote] = portal
        return handle
    remote._definition.parameters.check(args, kwargs)
    send = partial(remote._submit, func)
    return _post(portal, func.spec.name, send, remote.remote, args, kwargs)


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


def call_method(
    portal: Portal, remote: actors.RemoteMethod, args: Any, kwargs: Any
) -> Any:
    """Call an actor's method; see `call_function`."""
    method, link = remote._method, remote._link
    if link.interface is None or method.window or method.returns:
        return call_on(portal, remote.remote, args, kwargs)
    method.parameters.check(args, kwargs)
    send = partial(link.call, method.label, method.name)
    return _post(portal, method.label, send, remote.remote, args, kwargs)


def _post(
    portal: Portal,
    name: str,
    send: Callable[[bytes], handles.Handle[Any]],
    call: Callable[..., handles.Handle[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Pickle the arguments in this thread and post the call to the loop.

    Waiting for the loop would take ten times as long as the call, because the
    interpreter runs one thread at a time. Only large arguments are waited for: the loop
    copies buffers to shared memory, and the caller may write to them afterwards [B47];
    and a warning of them names the caller's line.

    Args:
        portal: the portal to the loop.
        name: name of the function or method.
        send: sends pickled arguments, on the loop.
        call: makes the whole call on the loop, for arguments that contain a handle,
            which only the loop's thread can pickle.
        args: positional arguments.
        kwargs: arguments by name.
    """
    if any(isinstance(argument, Proxy) for argument in (*args, *kwargs.values())):
        return call_on(portal, call, args, kwargs)
    try:
        payload = dump_arguments(name, args, kwargs)
    except (OnlyOnLoopError, SerializationError) as error:
        if OnlyOnLoopError in (type(error), type(error.__cause__)):
            return call_on(portal, call, args, kwargs)
        raise
    handle: Handle[Any] = Handle(portal, name)

    def begin() -> handles.Handle[Any]:
        if isinstance(payload, PickledValue):
            return send(calls.packed_call(name, args, kwargs, payload))
        return send(payload)

    if portal.is_here or isinstance(payload, PickledValue):
        portal.call(handle.start, begin)
    else:
        portal.post(partial(handle.start, begin))
    return handle


# The input of `map`.


_END: Final = object()


async def _read_in_thread(
    iterator: Iterator[Any], portal: Portal
) -> AsyncGenerator[Any]:
    """Yield the items of a plain iterator that may block, read in a separate thread.

    The thread reads an item when the loop asks for one. It is a daemon, refers only to
    the iterator and the portal, and ends with this generator.
    """
    wanted: SimpleQueue[concurrent.futures.Future[_Read] | None] = SimpleQueue()
    threading.Thread(
        target=_read,
        args=(iterator, wanted, portal),
        name="aiogpu-map-input",
        daemon=True,
    ).start()
    try:
        while True:
            item: concurrent.futures.Future[_Read] = concurrent.futures.Future()
            wanted.put(item)
            value, error = await asyncio.wrap_future(item)
            if error is not None:
                raise error
            if value is _END:
                return
            yield unwrap(value)
    finally:
        wanted.put(None)


_Read = tuple[Any, Exception | None]
"""An item, or the error of the iterator."""


def _read(
    iterator: Iterator[Any],
    wanted: SimpleQueue[concurrent.futures.Future[_Read] | None],
    portal: Portal,
) -> None:
    """Read an item for each future in `wanted`; see `_read_in_thread`."""
    proxy_maker.set(portal)
    # The thread keeps no item while it waits: a cancelled future and an error refer to
    # the frames that saw them, and so to the generator, which would never end.
    while _read_next(iterator, wanted.get()):
        pass


def _read_next(
    iterator: Iterator[Any], item: concurrent.futures.Future[_Read] | None
) -> bool:
    """Read the next item for a future; return False if no more items are wanted."""
    if item is None:
        return False
    if item.set_running_or_notify_cancel():
        try:
            item.set_result((next(iterator, _END), None))
        except Exception as error:  # noqa: BLE001 - raised by the loop over map
            item.set_result((_END, error))
    return True


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
            items = _read_in_thread(iter(iterable), portal)
        return ResultIterator(portal, remote.map(items, **options))

    return portal.call(start)


# The functions of `aiogpu`.


class Program:
    """The functions of `aiogpu.sync` for a program, over the portal to its node.

    Those that `aiogpu` has too have its parameters: in a task they are used instead.

    Args:
        what: the call, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    @property
    def portal(self) -> Portal:
        """The portal to the program's node, which is started if there is none."""
        return portal_for(self._what)

    def call(self, remote: Any, args: Any, kwargs: Any) -> Any:
        """Start a task."""
        portal = self.portal
        warn_of_change(remote._definition)
        return call_function(portal, remote, args, kwargs)

    def make(self, remote: Any, args: Any, kwargs: Any) -> Any:
        """Start an actor."""
        return call_on(self.portal, remote.remote, args, kwargs)

    def map(
        self, remote: Any, iterable: Iterable[Any], options: dict[str, Any]
    ) -> ResultIterator[Any]:
        """Call a function with each item."""
        return map_on(self.portal, remote, iterable, options)

    def get(self, handle: Any, *, timeout: float | None) -> Any:
        """Wait for results; see `aiogpu.sync.get`."""
        return results_of(handle, timeout)

    def put(self, value: Any) -> Any:
        """Store a value; return its handle."""
        portal = self.portal
        return portal.call(lambda: portal.wrap(calls.put(unwrap(value))))

    def wait(
        self, given: Any, *, num_returns: int, timeout: float | None
    ) -> tuple[list[Handle[Any]], list[Handle[Any]]]:
        """Wait until some of the handles are done; see `aiogpu.sync.wait`."""
        portal = self.portal
        proxies = checked_handles("wait", given)

        async def wait_on_loop() -> tuple[list[Any], list[Any]]:
            targets = [unwrap(proxy) for proxy in proxies]
            proxy_of = dict(zip(targets, proxies, strict=True))
            ready, pending = await waiting.wait(
                targets, num_returns=num_returns, timeout=timeout
            )
            return [proxy_of[one] for one in ready], [proxy_of[one] for one in pending]

        return portal.run(self._what, wait_on_loop)

    def as_completed(self, given: Any) -> Iterator[Handle[Any]]:
        """Yield handles as they end."""
        return completed(checked_handles("as_completed", given))

    def get_actor(self, name: str, namespace: str | None) -> Any:
        """Return a handle to the actor with a name."""
        portal = self.portal
        found = portal.run(self._what, lambda: actors.get_actor(name, namespace))
        return portal.wrap(found)

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        """End an actor's process at once."""
        self.portal.call(lambda: actors.kill(unwrap(actor), no_restart=no_restart))


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
        raise blocks_loop(what)
    portal = portal_to_program(what)
    if portal is None:
        raise NoLoopError(
            f"{what} needs a node that an event loop of this program has opened by "
            f"aiogpu.init(). In a program without an event loop use `aiogpu.sync`."
        )
    returned = call_on(portal, call, args, named)
    if isinstance(returned, Proxy) or not isawaitable(returned):
        return returned
    result = portal.run(what, lambda: returned)
    return portal.call(portal.wrap, result)
