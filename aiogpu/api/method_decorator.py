"""`@method`: options of a method, and its parameters and result for type checkers.

Light on purpose, as `api.task` is: user modules bring this file into every worker.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from aiogpu.api.actor_options import MethodOptions, check_method_options
from aiogpu.api.method import MARK, MethodDescriptor
from aiogpu.api.options import not_buffered, not_counted
from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.api.generator_method import GeneratorDescriptor

P = ParamSpec("P")
R = TypeVar("R")


class MethodKeywords(TypedDict, total=False):
    """The options of a method, as `@aiogpu.method(...)` takes them.

    Attributes:
        num_returns: 1.
        max_buffered: for a generator, how many items it may be ahead of its consumer;
            64 unless given.
        concurrency_group: one of those that the class's `concurrency_groups` name.
    """

    num_returns: int | None
    max_buffered: int | None
    concurrency_group: str | None


class MethodDecorator(Protocol):
    """What `@method(...)` with options gives."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> MethodDescriptor[P, R]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        function: Callable[Concatenate[Any, P], Iterator[R] | AsyncIterator[R]],
        /,
    ) -> GeneratorDescriptor[P, R]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R], /
    ) -> MethodDescriptor[P, R]: ...


@overload
def method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
) -> MethodDescriptor[P, R]: ...


@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Any, P], Iterator[R] | AsyncIterator[R]], /
) -> GeneratorDescriptor[P, R]: ...


@overload
def method(function: Callable[Concatenate[Any, P], R], /) -> MethodDescriptor[P, R]: ...


@overload
def method(**options: Unpack[MethodKeywords]) -> MethodDecorator: ...


def method(function: Any = None, /, **options: Unpack[MethodKeywords]) -> Any:
    """Give a method options, and type checkers its parameters and result.

    The method itself stays as it is; all public methods of an actor's class can be
    called, with this or without.

    Args:
        function: the method.
        **options: see `MethodKeywords`.

    Raises:
        OptionError: names the option, the value and what is allowed.
        MisuseError: it is no function.
    """
    checked = MethodOptions(**check_method_options(dict(options)))

    def mark(function: Any) -> Any:
        if not inspect.isfunction(function):
            raise MisuseError(
                f"method() was given {function!r}; write it above a method of a class."
            )
        is_generator = inspect.isgeneratorfunction(function)
        if not is_generator and not inspect.isasyncgenfunction(function):
            if checked.max_buffered is not None:
                raise not_buffered(function.__qualname__)
        elif checked.num_returns != 1:
            raise not_counted(function.__qualname__, checked.num_returns)
        setattr(function, MARK, checked)
        return function

    return mark if function is None else mark(function)
