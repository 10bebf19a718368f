"""`@remote`: what it makes of a function, a generator or a class.

Light on purpose, as `api.remote_function` is: user modules bring this file into every
worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import (
    TYPE_CHECKING,
    Any,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    get_origin,
    overload,
)

from aiogpu.api.options import CHECKS, TaskOptions, check_options, merged
from aiogpu.api.remote_function import Definition, RemoteFunction, made
from aiogpu.errors import MisuseError, OptionError

if TYPE_CHECKING:
    from aiogpu.api.actors.actor import RemoteClass
    from aiogpu.api.keywords import AnyKeywords, Options
    from aiogpu.api.remote_function import RemoteGenerator

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class RemoteDecorator(Protocol):
    """What `@remote(...)` with options gives: a decorator that keeps types."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: type[A], /
    ) -> RemoteClass[..., A]: ...

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> RemoteFunction[P, R]: ...

    @overload
    def __call__(
        self, function: Callable[P, Iterator[R] | AsyncIterator[R]], /
    ) -> RemoteGenerator[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(  # type: ignore[overload-overlap]
    function: type[A], /
) -> RemoteClass[..., A]: ...


@overload
def remote(
    function: Callable[P, Coroutine[Any, Any, R]], /
) -> RemoteFunction[P, R]: ...


@overload
def remote(
    function: Callable[P, Iterator[R] | AsyncIterator[R]], /
) -> RemoteGenerator[P, R]: ...


@overload
def remote(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(**options: Unpack[AnyKeywords]) -> RemoteDecorator: ...


def remote(function: Any = None, /, **options: Any) -> Any:
    """Make a function or a class remote: `@remote`, or `@remote(num_gpus=0.25)`.

    Args:
        function: a plain function, an `async def`, a generator of either kind, or
            the class of an actor.
        **options: see `Options` for functions, `ActorKeywords` for classes.

    Raises:
        OptionError: names the option, the value and what is allowed.
        MisuseError: it is neither, or a function of a kind that cannot be a task.
    """
    _check_any(dict(options))
    if function is None:
        return lambda function: _decorate(function, dict(options))
    if options:
        raise MisuseError(
            "remote() takes a function or options, not both; write "
            "`@remote(num_gpus=1)` above the function."
        )
    return _decorate(function, {})


def _check_any(options: dict[str, Any]) -> None:
    """Refuse what neither a task nor an actor takes, before it is known which it is."""
    try:
        check_options(options)
    except OptionError:
        if not set(options) <= set(CHECKS["actor"]):
            raise
        check_options(options, "actor")


def _decorate(function: object, options: dict[str, Any]) -> object:
    origin = get_origin(function)
    if isinstance(origin, type):
        function = origin  # `Model[int]`: type checkers alone tell it from `Model`
    if isinstance(function, type):
        from aiogpu.api.actors.actor import decorate_class

        return decorate_class(function, options)
    if "__aiogpu_function__" in getattr(function, "__dict__", ()):
        name = getattr(function, "__name__", "")
        raise MisuseError(
            f"{name} is remote already; write {name}.options(...) to change its "
            f"options."
        )
    checked = merged(TaskOptions(), cast("Options", options))
    if not callable(function):
        raise MisuseError(
            f"remote() was given {function!r}; give it a function, or options by name."
        )
    return made(Definition(function), checked)
