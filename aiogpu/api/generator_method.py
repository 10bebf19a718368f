"""The methods of an actor that are generators: what is called gives a stream.

Light on purpose, as `api.task` is: user modules bring this file into every worker.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
)

from aiogpu.api.mapper import no_map
from aiogpu.api.method import Link, Method, MethodCallKeywords, RemoteMethod
from aiogpu.api.misuse import CalledFirstToIterate
from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.api.stream import Stream

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class GeneratorMethod(CalledFirstToIterate, RemoteMethod[P, Any], Generic[P, T]):
    """A method of an actor that is a generator; iterate what `.remote(...)` gives."""

    __slots__ = ()

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:  # type: ignore[override]
        """Call it; gives the stream of its items at once.

        Raises:
            MisuseError: it takes other arguments.
            SerializationError: an argument cannot be pickled.
            NodeError: the actor's node is closed.
        """
        method = self._method
        payload = method.pack(args, kwargs)
        stream: Stream[T] = self._link.stream(
            method.label, method.window, method.name, payload
        )
        return stream

    if not TYPE_CHECKING:

        def map(self, *_args: object, **_options: object) -> NoReturn:
            """Always raises `MisuseError`: a generator gives many results a call."""
            raise no_map(self.__name__)

        def __call__(self, /, *args: object, **kwargs: object) -> NoReturn:
            """Always raises `MisuseError`: an actor's method is not called directly."""
            raise MisuseError(
                f"{self._method.label} is a generator and runs in its actor's process: "
                f"write `async for item in actor.{self._method.attribute}.remote(...)`."
            )


def remote_method(
    link: Link, method: Method, groups: tuple[str, ...]
) -> RemoteMethod[..., Any]:
    """What a handle has under the name of a method; `groups` are its class's."""
    kind = GeneratorMethod if method.window else RemoteMethod
    return kind(link, method, groups)


class TypedGenerator(Generic[P, T_co]):
    """What a type checker sees of a generator method; see `TypedMethod`."""

    __name__: str

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call it here."""
        raise NotImplementedError

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T_co]:
        """Call it in the actor's process."""
        raise NotImplementedError

    def options(self, **options: Unpack[MethodCallKeywords]) -> TypedGenerator[P, T_co]:
        """Return the same method with other options; see `MethodCallKeywords`."""
        raise NotImplementedError


class GeneratorDescriptor(Protocol[P, T_co]):
    """A `TypedGenerator`, found on an object."""

    def __get__(self, instance: object, owner: Any) -> TypedGenerator[P, T_co]:
        """What the attribute of an object is."""
        ...
