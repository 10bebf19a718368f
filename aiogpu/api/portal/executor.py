"""An executor whose calls are tasks, for libraries that take an executor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from operator import attrgetter
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar, cast

from aiogpu.api.decorator import remote
from aiogpu.api.options import whole
from aiogpu.api.portal.calls import call_function
from aiogpu.api.portal.handle import Handle, completed
from aiogpu.api.portal.loop_thread import (
    Portal,
    blocks_loop,
    executors,
    portal_of_program,
)
from aiogpu.api.portal.proxy import OnlyOnLoopError
from aiogpu.api.remote_function import RemoteFunction, kind_of
from aiogpu.errors import NodeError, OptionError, SerializationError
from aiogpu.serialization.captured import Captured, captured
from aiogpu.serialization.serializer import fix_item

P = ParamSpec("P")
T = TypeVar("T")


def apply(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call any callable; the task of an `Executor` if `fn` is not a plain function."""
    return function(*args, **named)


def apply_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function with several tuples of arguments; a chunk of `Executor.map`."""
    return [function(*args) for args in chunk]


def _fixed(function: str, argument: Any) -> Any:
    """Return an argument in a form that later writes to it do not change [B47]."""
    try:
        return fix_item(function, argument)
    except SerializationError as error:
        if not isinstance(error.__cause__, OnlyOnLoopError):
            raise
        portal: Portal = error.__cause__.portal
        return portal.call(fix_item, function, argument)


KEPT: Final = 256
"""Functions whose pickle an `Executor` keeps."""


@dataclass
class _Pickled:
    """A function of an executor, as it was pickled last."""

    remote: RemoteFunction[..., Any]
    captured: Captured | None = None


class Executor(concurrent.futures.Executor):
    """Runs functions as tasks, for libraries that take an executor.

    A function runs as it is when it is submitted, with the outer variables, globals and
    defaults of that moment. A function of a module is sent by its name. Like the
    library's executors, it lets the program end only when its calls have ended; on
    Python 3.12.0 to 3.12.2, which start no thread at that time (CPython's gh-113964),
    end it by `with` or `shutdown()`.

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
        # Used by any thread.
        self._pickled = lru_cache(KEPT)(lambda function: _Pickled(decorate(function)))
        self._lock = threading.Lock()
        self._pending: set[Handle[Any]] = set()
        self._is_closed = False
        self._cancelling: asyncio.Task[None] | None = None
        executors.add(self)

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
        portal = portal_of_program(
            "aiogpu.sync.Executor", "In a task, start other tasks by .remote()."
        )
        handle: Handle[Any]
        if type(fn) is FunctionType and not kind_of(fn)[1]:
            remote = self._remote_of(portal, fn)
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

    def _remote_of(
        self, portal: Portal, function: FunctionType
    ) -> RemoteFunction[..., Any]:
        """Return the remote function of a function, pickled again if it has changed.

        Raises:
            SerializationError: the function cannot be pickled.
        """
        pickled, now = self._pickled(function), captured(function)
        if pickled.captured is not None and not now.is_same(pickled.captured):
            # On the loop, since the function may capture handles to actors.
            pickled.remote = portal.call(pickled.remote._renewed)
        pickled.captured = now
        return pickled.remote

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
                raise blocks_loop("shutdown() of an executor")
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
