"""The decorators `@remote` and `@method`.

Light to import, as `api.remote_function` is: user modules load this file in every
worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from inspect import isfunction
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    get_origin,
    overload,
)

from aiogpu.api.options import (
    TaskOptions,
    not_buffered,
    not_counted,
    with_options,
)
from aiogpu.api.remote_function import (
    Definition,
    RemoteFunction,
    RemoteGenerator,
    kind_of,
    new_remote_function,
)
from aiogpu.errors import MisuseError, OptionError

if TYPE_CHECKING:
    from aiogpu.api.actors.actor import RemoteClass
    from aiogpu.api.keywords import (
        AnyKeywords,
        MethodCallKeywords,
        MethodKeywords,
    )

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class RemoteDecorator(Protocol):
    """The type of `@remote(...)` with options: a decorator that keeps types."""

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
    """Decorator: run a function in workers, or make actors of a class.

    A function or class of a module is sent by its name. Another one is pickled once, at
    its first `.remote()`, with the globals, defaults and outer variables that it uses:
    later changes of these do not reach its tasks. Pass what changes as an argument.

    Args:
        function: a plain function, an `async def`, a generator of either kind, or a
            class.
        **options: options of a task or an actor, such as `num_gpus=0.25`;
            docs/options.md lists them with their defaults.

    Raises:
        OptionError: an option is unknown or invalid.
        MisuseError: the argument is not callable, or remote already.
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
    """Refuse options that neither tasks nor actors have, before `function` is known."""
    try:
        TaskOptions.check(options, "task")
    except OptionError:
        if not options.keys() <= TaskOptions.taken_by("actor").keys():
            raise
        TaskOptions.check(options, "actor")


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
    checked = with_options(TaskOptions(), options, "task")
    if not callable(function):
        raise MisuseError(
            f"remote() was given {function!r}; give it a function, or options by name."
        )
    return new_remote_function(Definition(function), checked)


# Methods.

if TYPE_CHECKING:

    class TypedMethod(RemoteFunction[P, R]):
        """A method under `@aiogpu.method`, as type checkers see it.

        It can be called on an object, as the class's own code does. `typed(handle)`
        makes a handle look like an object, so that `.remote` has the method's
        parameters and result.
        """

        def __get__(self, instance: object, owner: Any) -> Self:
            """Return the method of an object."""

        def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            """Call the method in this process."""

        def options(  # type: ignore[override]
            self, **options: Unpack[MethodCallKeywords]
        ) -> TypedMethod[P, Any]:
            """Return the same method with other options; see `MethodCallKeywords`."""

    class TypedGenerator(RemoteGenerator[P, R]):
        """A generator method, as type checkers see it; see `TypedMethod`."""

        def __get__(self, instance: object, owner: Any) -> Self:
            """Return the method of an object."""

        def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            """Call the method in this process."""

        def options(  # type: ignore[override]
            self, **options: Unpack[MethodCallKeywords]
        ) -> Self:
            """Return the same method with other options; see `MethodCallKeywords`."""


class MethodDecorator(Protocol):
    """The type of `@method(...)` with options."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> TypedMethod[P, R]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        function: Callable[Concatenate[Any, P], Iterator[R] | AsyncIterator[R]],
        /,
    ) -> TypedGenerator[P, R]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R], /
    ) -> TypedMethod[P, R]: ...


@overload
def method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
) -> TypedMethod[P, R]: ...


@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Any, P], Iterator[R] | AsyncIterator[R]], /
) -> TypedGenerator[P, R]: ...


@overload
def method(function: Callable[Concatenate[Any, P], R], /) -> TypedMethod[P, R]: ...


@overload
def method(**options: Unpack[MethodKeywords]) -> MethodDecorator: ...


def method(function: Any = None, /, **options: Unpack[MethodKeywords]) -> Any:
    """Decorator: give a method options, and type checkers its parameters and result.

    The method itself does not change. All public methods of an actor's class can be
    called, with this decorator or without.

    Args:
        function: the method.
        **options: see `MethodKeywords`.

    Raises:
        OptionError: an option is unknown or invalid.
        MisuseError: the argument is not a function.
    """
    from aiogpu.worker.chunk import METHOD_MARK  # of actors, which few programs have

    checked = TaskOptions(**TaskOptions.check(options, "method"))

    def mark(function: Any) -> Any:
        if not isfunction(function):
            raise MisuseError(
                f"method() was given {function!r}; write it above a method of a class."
            )
        _, is_generator = kind_of(function)
        if checked.max_buffered is not None and not is_generator:
            raise not_buffered(function.__qualname__)
        if checked.num_returns != 1 and is_generator:
            raise not_counted(function.__qualname__, checked.num_returns)
        setattr(function, METHOD_MARK, checked)
        return function

    return mark if function is None else mark(function)
