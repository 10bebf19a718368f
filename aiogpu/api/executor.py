"""`concurrent.futures.Executor` over tasks; imported late, as `api.portal` is."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, islice
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakSet

from aiogpu.api.decorator import remote
from aiogpu.api.portal import Handle, call_function, portal_for
from aiogpu.api.remote_function import RemoteFunction, kind_of
from aiogpu.errors import MisuseError, OptionError

P = ParamSpec("P")
T = TypeVar("T")


def call(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call what is no plain function; the task of an `Executor`."""
    return function(*args, **named)


def call_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
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
        self._call: RemoteFunction[..., Any] = decorate(call)
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
        each = partial(call_each, fn)
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
