"""Calls of tasks and methods without an event loop, and the input of `map`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
)
from functools import partial
from queue import SimpleQueue
from types import FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

from aiogpu.api.actors.actor import RemoteMethod
from aiogpu.api.calls import packed_call
from aiogpu.api.portal.handle import Handle, ResultIterator
from aiogpu.api.portal.loop_thread import Portal
from aiogpu.api.portal.proxy import OnlyOnLoopError, Proxy, call_on, unwrap
from aiogpu.api.remote_function import Definition, RemoteFunction
from aiogpu.api.results import handle as handles
from aiogpu.client.current import proxy_maker
from aiogpu.errors import SerializationError
from aiogpu.serialization.captured import Captured, captured
from aiogpu.serialization.diagnostics import advise
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_arguments


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
    copies buffers to shared memory, and the caller may write to them afterwards [B47];
    and a warning of them names the caller's line.

    Returns:
        The handle; None if the arguments contain a handle, which only the loop's thread
        can pickle.
    """
    if any(isinstance(argument, Proxy) for argument in (*args, *kwargs.values())):
        return None
    try:
        payload = dump_arguments(name, args, kwargs)
    except OnlyOnLoopError:
        return None
    except SerializationError as error:
        if isinstance(error.__cause__, OnlyOnLoopError):
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
