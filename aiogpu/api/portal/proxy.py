"""The base of proxies of the loop's objects, and the descriptor of their methods.

A class of proxies names the methods of its objects that are awaited on the loop, each
in one line: `close = awaited(pools.ActorPool.aclose)`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import (
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    overload,
)

from aiogpu.api.portal.loop_thread import Portal
from aiogpu.errors import MisuseError

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class OnlyOnLoopError(MisuseError):
    """A proxy was pickled in a thread other than the loop's.

    Attributes:
        portal: the portal to the loop.
    """

    def __init__(self, message: str, portal: Portal) -> None:
        super().__init__(message)
        self.portal = portal


class Proxy:
    """Base of proxies of the loop's objects. A proxy is pickled as its object.

    Attributes:
        _portal: the portal to the loop.
        _target: the object; a handle has one once the loop has made its call.
        _is_awaited: `aiogpu.sync.get` awaits the object.
    """

    _portal: Portal
    _target: Any
    _is_awaited: ClassVar = False

    def __init__(self, portal: Portal, target: Any) -> None:
        self._portal = portal
        self._target = target

    def __repr__(self) -> str:
        return repr(self._target)

    def __reduce__(self) -> Any:
        return self._on_loop().__reduce__()

    def _on_loop(self) -> Any:
        """Return the object behind this proxy.

        Raises:
            MisuseError: called in a thread other than the loop's.
        """
        if not self._portal.is_here:
            raise OnlyOnLoopError(
                f"{self!r} can only be pickled as an argument of a task or an actor; "
                f"wait for its value and pickle that.",
                self._portal,
            )
        return self._target


class EnteredProxy(Proxy):
    """Base of proxies of objects with an `async with` block: here it is `with`."""

    def __enter__(self) -> Self:
        self._portal.enter(repr(self), self._target)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._portal.leave(repr(self), self._target, error)


def unwrap(value: Any) -> Any:
    """Undo `Portal.wrap`, on the loop: only there a posted handle has its target."""
    return value._target if isinstance(value, Proxy) else value


class Method(Protocol[P, T_co]):
    """A method of a proxy, for type checkers."""

    @overload
    def __get__(self, proxy: None, owner: type, /) -> Self: ...

    @overload
    def __get__(
        self, proxy: object, owner: type | None = None, /
    ) -> Callable[P, T_co]: ...


def awaited(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
    *,
    name: str = "",
    gives_value: bool = False,
) -> Method[P, T]:
    """Make the method of a proxy that awaits a method of its object on the loop.

    It has the parameters, the result and the docstring of that method.

    Args:
        method: the method, of a class of the loop.
        name: name of the new method, if another.
        gives_value: the result is a value of the user, in which handles and actors
            become proxies.
    """
    what = f"{name or method.__name__}()"

    def wait(self: Any, /, *args: Any, **named: Any) -> T:
        def begin() -> Coroutine[Any, Any, T]:
            taken = {name: unwrap(value) for name, value in named.items()}
            call: Callable[..., Coroutine[Any, Any, T]] = method
            return call(self._target, *map(unwrap, args), **taken)

        portal: Portal = self._portal
        return (portal.fetch if gives_value else portal.run)(what, begin)

    update_wrapper(wait, method)
    wait.__name__ = name or method.__name__
    return cast("Method[P, T]", wait)


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
