"""The methods of an actor's class: what may be called, with what, and how it runs.

A generator's call gives a stream. `@method` sets options of a method. Light on purpose,
as `api.remote_function` is: user modules bring this file into every worker.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from copy import copy
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from aiogpu.api.options import (
    INTERLEAVED,
    MAX_BUFFERED,
    THREADS,
    MethodOptions,
    TaskOptions,
    check_options,
    not_buffered,
    not_counted,
)
from aiogpu.api.remote_function import (
    Mapper,
    Parameters,
    no_map,
    signature_of,
    without_self,
)
from aiogpu.api.usage_errors import CalledFirst, CalledFirstToIterate
from aiogpu.errors import MisuseError, OptionError
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import NO_ARGUMENTS, dump_arguments, load_result
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, SERIAL, THREADED
from aiogpu.worker.chunk import CHUNKED, IN_GROUP

if TYPE_CHECKING:
    from aiogpu.api.keywords import MethodCallKeywords, MethodKeywords
    from aiogpu.api.results.handle import Handle
    from aiogpu.api.results.stream import Stream
    from aiogpu.client.function_spec import FunctionSpec


P = ParamSpec("P")


R = TypeVar("R")


R_co = TypeVar("R_co", covariant=True)


MARK: Final = "__aiogpu_method__"


class Method:
    """One method of a class.

    Attributes:
        name: what its calls say: that of the class's attribute, and the group that
            they name if it is another than the method's.
        label: how handles and errors call it.
        group: its concurrency group.
        returns: how many results its calls have, 0 for the usual one.
        is_coroutine: whether it needs an event loop.
        window: if it is a generator, how many items it may be ahead; else 0.
    """

    def __init__(self, owner: str, name: str, found: Any) -> None:
        function = getattr(found, "__func__", found)
        options: MethodOptions = getattr(function, MARK, MethodOptions())
        self.name = name
        self.label = f"{owner}.{name}"
        self.group = options.concurrency_group or DEFAULT_GROUP
        self.returns = options.num_returns if options.num_returns > 1 else 0
        is_async_generator = inspect.isasyncgenfunction(function)
        self.is_coroutine = is_async_generator or inspect.iscoroutinefunction(function)
        is_generator = is_async_generator or inspect.isgeneratorfunction(function)
        self.window = (options.max_buffered or MAX_BUFFERED) if is_generator else 0
        self._found = found
        self._parameters: Parameters | None = None

    @property
    def attribute(self) -> str:
        """Its name in the class."""
        return self.name.partition(IN_GROUP)[0]

    def with_options(self, options: dict[str, Any], groups: tuple[str, ...]) -> Method:
        """Return this method with other options for some of its calls.

        Args:
            options: checked ones of `MethodOptions`.
            groups: the concurrency groups of the actor's class.

        Raises:
            OptionError: the class has no such group, or a generator no such option.
        """
        found = copy(self)
        if "max_buffered" in options:
            raise OptionError(
                f"max_buffered={options['max_buffered']!r} belongs to the method and "
                f"not to one call of {self.label}: write "
                f"`@aiogpu.method(max_buffered=...)` above it."
            )
        if "num_returns" in options:
            if self.window:
                raise not_counted(self.label, options["num_returns"])
            returns: int = options["num_returns"]
            found.returns = returns if returns > 1 else 0
        group = options.get("concurrency_group")
        if group is not None:
            if group not in groups:
                raise OptionError(
                    f"concurrency_group={group!r} of {self.label}: its class names "
                    f"{', '.join(groups) or 'none'}. Say "
                    f"@aiogpu.remote(concurrency_groups={{{group!r}: 2}})."
                )
            found.group = group
            found.name = f"{self.attribute}{IN_GROUP}{group}"
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Of the function a handle needs no more than what it takes.
        return {**self.__dict__, "_found": None, "_parameters": self._look()}

    def pack(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        is_chunk: bool = False,
    ) -> bytes:
        """Check and pickle the arguments of a call, or of a `Chunk` of calls.

        Raises:
            MisuseError: it takes others.
            SerializationError: one of them cannot be pickled.
        """
        parameters = self._parameters or self._look()
        count = 1 if is_chunk else len(args)
        if kwargs or not parameters.least <= count <= parameters.most:
            parameters.check(args[:count], kwargs)
        if not args and not kwargs and not self.returns:
            return NO_ARGUMENTS
        payload = dump_arguments(self.label, args, kwargs, self.returns)
        if type(payload) is PickledValue:
            from aiogpu.api.calls import packed_call

            return packed_call(self.label, args, kwargs, payload)
        return payload  # type: ignore[return-value]

    def _look(self) -> Parameters:
        if self._parameters is None:
            function = getattr(self._found, "__func__", self._found)
            signature = signature_of(function)
            if signature is not None and not isinstance(self._found, staticmethod):
                signature = without_self(signature)
            self._parameters = Parameters(self.label, signature)
        return self._parameters


def methods_of(cls: type) -> dict[str, Method]:
    """The public methods of a class and of its bases."""
    found: dict[str, Method] = {}
    for name in dir(cls):
        attribute: object = inspect.getattr_static(cls, name, None)
        if not name.startswith("_") and _is_method(attribute):
            found[name] = Method(cls.__name__, name, attribute)
    return found


def _is_method(attribute: object) -> bool:
    """Return whether it is called on an object of the class it is found in."""
    if isinstance(attribute, staticmethod | classmethod):
        return True
    is_bound = hasattr(type(attribute), "__get__")
    return is_bound and callable(attribute) and not isinstance(attribute, type)


class Link(Protocol):
    """A process's tie to an actor: `ActorLink`, in a worker `WorkerActorLink`.

    Attributes:
        name: how errors call the actor.
        interface: what handles are made of; None until the node has told it.
    """

    name: str
    interface: ActorInterface | None

    @property
    def own(self) -> ActorInterface | None:
        """The class of which an actor is made unless the name has one already."""

    def reference(self) -> tuple[int, str, str]:
        """The actor's id, name and node, for a handle to be pickled as."""

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Any:
        """Call a method; gives its handle, the handles of its results, or its stream.

        `returns` and `window` are as `Method` has them.
        """

    def ready(self) -> Any:
        """A handle that is settled when the actor was made."""

    def ended(self) -> Any:
        """A handle that is settled when its process has ended."""

    def room(self) -> Any:
        """A handle of an `engines.base.Room`: how many of its kind can live at once."""

    def kill(self, no_restart: bool) -> None:
        """End its process at once."""

    def terminate(self) -> None:
        """Have it end after what it was sent."""


class RemoteMethod(CalledFirst, Mapper, Generic[P, R_co]):
    """A method of an actor; call it by `.remote(...)`."""

    __slots__ = ("_groups", "_link", "_method")

    def __init__(self, link: Link, method: Method, groups: tuple[str, ...]) -> None:
        self._link = link
        self._method = method
        self._groups = groups

    def options(self, **options: Unpack[MethodCallKeywords]) -> RemoteMethod[P, Any]:
        """Return the same method with other options; this one stays as it is.

        What is not given stays as `@aiogpu.method(...)` says.

        Raises:
            OptionError: names the option, the value and what is allowed.

        Example:
            `first, second = actor.split.options(num_returns=2).remote(text)`
        """
        checked = check_options(options, "method")
        method = self._method.with_options(checked, self._groups)
        return type(self)(self._link, method, self._groups)

    def __repr__(self) -> str:
        return f"<RemoteMethod {self._method.label}>"

    @property
    def __name__(self) -> str:
        """How errors call it."""
        return self._method.label

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"{self._method.label} is a method of one actor: pass the actor's handle, "
            f"and call `actor.{self._method.attribute}.remote(...)` there."
        )

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Call it; gives the call's handle at once.

        Raises:
            MisuseError: it takes other arguments.
            SerializationError: an argument cannot be pickled.
            NodeError: the actor's node is closed.
        """
        method = self._method
        payload = method.pack(args, kwargs)
        return self._link.call(  # type: ignore[no-any-return]
            method.label, method.name, payload, method.returns, method.window
        )

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        method = self._method
        payload = method.pack(arguments, {}, is_chunk=True)
        return self._link.call(  # type: ignore[no-any-return]
            method.label, method.name + CHUNKED, payload
        )

    if not TYPE_CHECKING:
        # Visible, it would make type checkers accept every direct call.
        def __call__(self, /, *args: object, **kwargs: object) -> NoReturn:
            """Always raises `MisuseError`: an actor's method is not called directly."""
            label = self._method.label
            raise MisuseError(
                f"{label} runs in its actor's process: write `await "
                f"actor.{self._method.attribute}.remote(...)`."
            )


class TypedMethod(RemoteMethod[P, R_co]):
    """What a type checker sees of a method under `@aiogpu.method`.

    On an object it can be called, as the class's own code does; `typed(handle)` makes
    a handle look like one, so that `.remote` has its parameters and its result.
    """

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call it here."""
        raise NotImplementedError

    @overload
    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...

    @overload  # a handle as an argument: its type takes the place of the value's
    def remote(self, a: Handle[Any], /, *args: Any, **named: Any) -> Handle[R_co]: ...

    @overload
    def remote(
        self, a: Any, b: Handle[Any], /, *args: Any, **named: Any
    ) -> Handle[R_co]: ...

    @overload
    def remote(
        self, a: Any, b: Any, c: Handle[Any], /, *args: Any, **named: Any
    ) -> Handle[R_co]: ...

    def remote(self, /, *args: Any, **kwargs: Any) -> Handle[R_co]:
        """Call it in the actor's process."""
        raise NotImplementedError

    def options(self, **options: Unpack[MethodCallKeywords]) -> TypedMethod[P, Any]:
        """Return the same method with other options; see `MethodCallKeywords`."""
        raise NotImplementedError


class MethodDescriptor(Protocol[P, R_co]):
    """A `TypedMethod`, found on an object."""

    def __get__(self, instance: object, owner: Any) -> TypedMethod[P, R_co]:
        """Return what the attribute of an object is."""


T_co = TypeVar("T_co", covariant=True)


class GeneratorMethod(CalledFirstToIterate, RemoteMethod[P, Any], Generic[P, T_co]):
    """A method of an actor that is a generator; iterate what `.remote(...)` gives."""

    __slots__ = ()

    if TYPE_CHECKING:

        def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T_co]:  # type: ignore[override]
            """Call it; gives the stream of its items at once.

            Raises:
                MisuseError: it takes other arguments.
                SerializationError: an argument cannot be pickled.
                NodeError: the actor's node is closed.
            """

        def options(
            self, **options: Unpack[MethodCallKeywords]
        ) -> GeneratorMethod[P, T_co]:
            """Return the same method with other options; this one stays as it is."""

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


class TypedGenerator(GeneratorMethod[P, T_co]):
    """What a type checker sees of a generator method; see `TypedMethod`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call it here."""
        raise NotImplementedError


class GeneratorDescriptor(Protocol[P, T_co]):
    """A `TypedGenerator`, found on an object."""

    def __get__(self, instance: object, owner: Any) -> TypedGenerator[P, T_co]:
        """Return what the attribute of an object is."""


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
    checked = MethodOptions(**check_options(dict(options), "method"))

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


def stranger(name: str) -> MisuseError:
    """The error for a handle to an actor that is none of this node's."""
    return MisuseError(
        f"the handle of {name} belongs to another node, or to one that was closed. "
        f"Give tasks an actor of this node, as an argument: a function that uses a "
        f"handle of the program's keeps the one that it had at its first .remote()."
    )


class ActorInterface:
    """What is known of a class without a process: its methods and their options.

    Attributes:
        name: of the class.
        methods: those that may be called, by name.
        parameters: of the constructor.
        group_names: the concurrency groups that the class's options name.
    """

    def __init__(self, cls: type) -> None:
        self.name = cls.__name__
        self.group_names: tuple[str, ...] = ()
        self.methods = methods_of(cls)
        self.parameters = Parameters(self.name, signature_of(cls))

    def with_groups(self, options: TaskOptions) -> ActorInterface:
        """Return this description for a class with these concurrency groups."""
        names = tuple(options.concurrency_groups)
        if names == self.group_names:
            return self
        found = copy(self)
        found.group_names = names
        return found

    def limits(self, options: TaskOptions) -> tuple[str, dict[str, int]]:
        """How calls are run, and how many of each group at once."""
        groups = options.concurrency_groups
        if any(method.is_coroutine for method in self.methods.values()):
            mode, usual = ASYNC, INTERLEAVED
        else:
            is_threaded = groups or (options.max_concurrency or 1) > 1
            mode, usual = THREADED if is_threaded else SERIAL, THREADS
        return mode, {DEFAULT_GROUP: options.max_concurrency or usual, **groups}

    def windows(self) -> dict[str, int]:
        """Of each method that is a generator, how many items it may be ahead."""
        found = {
            name: method.window
            for name, method in self.methods.items()
            if method.window
        }
        # A call may name another group than its method's.
        return found | {
            f"{name}{IN_GROUP}{group}": window
            for name, window in found.items()
            for group in self.group_names
        }

    def groups(self, options: TaskOptions) -> dict[str, str]:
        """The group of each method that has one, by the name that a call says.

        Raises:
            OptionError: the class has no such group.
        """
        named = {
            name: method.group
            for name, method in self.methods.items()
            if method.group != DEFAULT_GROUP
        }
        for name, group in named.items():
            if group not in options.concurrency_groups:
                there = ", ".join(options.concurrency_groups) or "none"
                raise OptionError(
                    f"{self.name}.{name} is in the concurrency group {group!r}; its "
                    f"class names {there}. Say "
                    f"@aiogpu.remote(concurrency_groups={{{group!r}: 2}})."
                )
        # One call may name another group than its method's.
        named |= {
            f"{name}{IN_GROUP}{group}": group
            for name in self.methods
            for group in options.concurrency_groups
        }
        # A chunk of a map is a call of its own name.
        return named | {name + CHUNKED: group for name, group in named.items()}


def no_method(interface: ActorInterface, name: str) -> AttributeError:
    """The error for a method that a class has not, or that is private."""
    from difflib import get_close_matches

    if name.startswith("_"):
        return AttributeError(
            f"{name} of {interface.name} is private: actors are called by public "
            f"methods."
        )
    near = get_close_matches(name, interface.methods, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return AttributeError(
        f"{interface.name} has no method {name}.{hint} There are: "
        f"{', '.join(interface.methods) or 'none'}."
    )


def method_of(
    link: Link, interface: ActorInterface, name: str
) -> RemoteMethod[..., Any]:
    """Return what a handle has under the name of a method.

    Raises:
        AttributeError: the class has no such method.
    """
    method = interface.methods.get(name)
    if method is None:
        raise no_method(interface, name)
    kind = GeneratorMethod if method.window else RemoteMethod
    return kind(link, method, interface.group_names)


def interface_in(func: FunctionSpec) -> ActorInterface:
    """Return what handles are made of; it comes pickled from another process's class.

    Raises:
        DeserializationError: what it refers to cannot be imported here.
    """
    assert func.actor is not None, func
    interface = func.actor.interface
    return cast(
        "ActorInterface",
        load_result(interface) if type(interface) is bytes else interface,
    )


def late_call_problem(interface: ActorInterface, name: str) -> Exception | None:
    """Return why a call that was made before the class was known cannot be made."""
    method = interface.methods.get(name)
    if method is None:
        return no_method(interface, name)
    if method.window or method.returns:
        what = "is a generator" if method.window else "has several results"
        return MisuseError(
            f"{method.label} {what}, which was not known yet when it was called: the "
            f"node had not answered. Await the handle first: `actor = await "
            f"aiogpu.get_actor(...)`."
        )
    return None


class LateMethod(RemoteMethod[..., Any]):
    """A method that the class may have, or may not: the node has yet to tell it."""

    __slots__ = ()

    def __init__(self, link: Link, name: str) -> None:
        super().__init__(link, Method(link.name, name, None), ())

    def _true(self) -> RemoteMethod[..., Any] | None:
        """The method itself, once the class is known."""
        interface = self._link.interface
        if interface is None:
            return None
        return method_of(self._link, interface, self._method.name)

    def remote(self, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call it; a call that the class cannot serve fails when that is known."""
        true = self._true()
        if true is not None:
            return true.remote(*args, **kwargs)
        return super().remote(*args, **kwargs)

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        true = self._true()
        if true is None:
            raise MisuseError(
                f"{self._method.label}.map() with chunk= needs to know the method, and "
                f"the node has not answered yet. Await the handle first: `actor = "
                f"await aiogpu.get_actor(...)`."
            )
        return true._remote_chunk(arguments)
