"""`@batch` on an `async def` that takes a list: callers give one item, get one result.

What it gives is an `async def` again, so that an actor's method stays one. Light on
purpose: user modules bring this file into every worker, so asyncio is imported by the
first call alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import update_wrapper
from inspect import Parameter, Signature
from typing import Any, Final, Never, Protocol, TypeVar, overload

from aiogpu.api.batching import Batching
from aiogpu.api.options import LARGEST_COUNT, LONGEST_TIME
from aiogpu.api.usage_errors import options_of
from aiogpu.errors import MisuseError, OptionError

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

_POSITIONAL: Final = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
_ITEM: Final = Parameter("item", Parameter.POSITIONAL_ONLY)
_SELF: Final = Parameter("self", Parameter.POSITIONAL_ONLY)


class BatchDecorator(Protocol):
    """What `batch(...)` gives: a decorator that turns lists into single items.

    What callers await has no `Any` in its type: for mypy, a `gather` of two such that
    give different things would be `Any` itself.
    """

    @overload
    def __call__(
        self,
        function: Callable[
            [list[T]], Coroutine[Any, Any, Sequence[R | Exception | BaseException]]
        ],
        /,
    ) -> Callable[[T], Coroutine[object, None, R]]: ...

    @overload
    def __call__(
        self,
        function: Callable[
            [S, list[T]], Coroutine[Any, Any, Sequence[R | Exception | BaseException]]
        ],
        /,
    ) -> Callable[[S, T], Coroutine[object, None, R]]: ...


@options_of("batch()")
def batch(
    *misplaced: Never, max_size: int, max_wait: float = 0.0, max_concurrency: int = 1
) -> BatchDecorator:
    """Gather calls with one item each into calls with a list of items.

    For an `async def` method, or function, that takes a list and returns a list of as
    many results in the same order. It is then called with one item and gives one
    result; calls of the same instance on the same event loop that are made at about
    the same time reach the function together, in the order of the calls. It runs in
    an asyncio task of its own, in the context of the first of its callers.

    A batch starts when `max_size` items wait, or `max_wait` seconds after the first of
    them came; but not before one of `max_concurrency` batches has ended.

    An exception that it raises reaches all callers of the batch; one that it returns
    in the place of a result is raised at that caller alone. A caller that is
    cancelled takes its item out of a batch that has not started; when the last caller
    of a running batch is cancelled, so is the batch. `method.__wrapped__` is the
    function as it was written.

    Args:
        *misplaced: none; all options go by name.
        max_size: most items in a batch, 1 or more.
        max_wait: seconds that the first item waits for others, 0 or more. With 0 a
            batch has what was called in one turn of the event loop.
        max_concurrency: most batches of one instance at once, 1 or more; what comes
            meanwhile is gathered. Code that uses a GPU gains nothing by more.

    Raises:
        OptionError: an option is ill-valued.
        MisuseError: it is put on something that is no `async def`, or that does not
            take one list.
    """
    if misplaced:
        raise MisuseError("batch() takes options by name: @aiogpu.batch(max_size=32).")
    _check_count("max_size", max_size, "items")
    _check_count("max_concurrency", max_concurrency, "batches")
    _check_wait(max_wait)

    def decorate(function: Any) -> Any:
        _check_function(function)
        return _batched(Batching(function, max_size, max_wait, max_concurrency))

    return decorate


def _batched(batching: Batching) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call_method(self: object, item: object, /) -> Any:
        call = (batching.join or _load(batching))(batching, self, item)
        try:
            return await call
        except BaseException:
            call.leave()
            del call  # its error has this frame in its traceback
            raise

    async def call_function(item: object, /) -> Any:
        return await call_method(None, item)

    call: Any = call_method if batching.is_method else call_function
    update_wrapper(call, batching.function)
    call.__annotations__ = {}  # the function's speak of lists
    call.__signature__ = Signature([_SELF, _ITEM] if batching.is_method else [_ITEM])
    return call  # type: ignore[no-any-return]


def _load(batching: Batching) -> Callable[[Batching, object, object], Any]:
    """Import what the first call needs."""
    from aiogpu.api.batch_queue import join

    batching.join = join
    return join


def _check_function(function: Any) -> None:
    if isinstance(function, staticmethod | classmethod):
        raise MisuseError(
            f"{function.__name__} was given to batch() as a {type(function).__name__}; "
            f"write @{type(function).__name__} above @aiogpu.batch(...)."
        )
    if hasattr(function, "__aiogpu_function__"):
        raise MisuseError(
            f"{function!r} was given to batch(), and its calls run in processes that "
            f"share nothing. Batch an async method of an actor."
        )
    if not inspect.isfunction(function):
        raise MisuseError(
            f"batch() was given {function!r}; write @aiogpu.batch(max_size=...) above "
            f"an `async def` that takes a list."
        )
    if not inspect.iscoroutinefunction(function):
        raise MisuseError(
            f"{function.__qualname__} is no coroutine function; only where calls can "
            f"wait are they gathered. Write `async def`, without `yield`."
        )
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    place = function.__qualname__.rpartition(".")[0]
    is_in_class = bool(place) and not place.endswith("<locals>")
    # In a class, one alone is that of a static method.
    counts = {1, 2} if is_in_class else {1}
    if len(parameters) not in counts or {p.kind for p in parameters} - _POSITIONAL:
        raise MisuseError(
            f"{function.__qualname__}{signature} cannot be batched: it takes "
            f"one list of items{' after self' if is_in_class else ''} and no more. "
            f"What belongs to one item goes into the item."
        )


def _check_count(name: str, value: object, unit: str) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 1 <= value <= LARGEST_COUNT
    ):
        raise OptionError(
            f"{name}={value!r} must be a whole number of {unit}, 1 or more. The most "
            f"is {LARGEST_COUNT:_}."
        )


def _check_wait(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= LONGEST_TIME:
        raise OptionError(
            f"max_wait={value!r} must be a number of seconds, 0 or more. The most is "
            f"{LONGEST_TIME:_}."
        )
