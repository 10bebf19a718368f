"""Actors: objects that live in a process of their own, and their handles.

Light to import, as `api.remote_function` is: user modules load this file in every
worker.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Generator
from inspect import getattr_static
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    cast,
)

from aiogpu.api.actors.methods import ActorInterface, Method, no_method
from aiogpu.api.options import TaskOptions, check_options, merged
from aiogpu.api.remote_function import Decorated, Definition, FunctionName, Mapper
from aiogpu.api.usage_errors import (
    CalledFirst,
    CalledFirstToIterate,
    Displayed,
    EnteredOnLoop,
    SetInItsProcess,
    options_of,
)
from aiogpu.client.current import (
    ActorExit,
    current,
    for_consumer,
    is_loop_running,
    note_exit,
)
from aiogpu.core.model.units import CPU
from aiogpu.errors import MisuseError, OptionError
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_arguments, load_reference
from aiogpu.wire.messages import CHUNKED

if TYPE_CHECKING:
    from aiogpu.api.actors.link import Link
    from aiogpu.api.keywords import ActorKeywords, MethodCallKeywords
    from aiogpu.api.results.handle import Handle
    from aiogpu.client.function_spec import FunctionSpec


P = ParamSpec("P")


A = TypeVar("A")


class RemoteMethod(CalledFirst, Mapper):
    """A method of an actor; call it by `.remote(...)`."""

    __slots__ = ("_groups", "_link", "_method")

    def __init__(self, link: Link, method: Method, groups: tuple[str, ...]) -> None:
        self._link = link
        self._method = method
        self._groups = groups

    def options(self, **options: Unpack[MethodCallKeywords]) -> Self:
        """Return the same method with other options; this one does not change.

        Options that are not given keep their values of `@aiogpu.method(...)`.

        Raises:
            OptionError: an option is unknown or invalid.

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
        """The name for error messages."""
        return self._method.label

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"{self._method.label} is a method of one actor and cannot be passed on: "
            f"pass the actor's handle, and call "
            f"`actor.{self._method.attribute}.remote(...)` there."
        )

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method; return a handle at once, or a stream for a generator.

        Raises:
            MisuseError: the arguments do not match the method's parameters.
            SerializationError: an argument cannot be pickled.
            NodeError: the actor's node is closed.
        """
        method = self._method
        payload = method.pack(args, kwargs)
        return self._link.call(
            method.label, method.name, payload, method.returns, method.window
        )

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        method = self._method
        payload = method.pack(arguments, {}, is_chunk=True)
        return self._link.call(  # type: ignore[no-any-return]
            method.label, method.name + CHUNKED, payload
        )

    def _what_to_write(self) -> str:
        return (
            f"{self._method.label} runs in its actor's process: write `await "
            f"actor.{self._method.attribute}.remote(...)`."
        )


class GeneratorMethod(CalledFirstToIterate, RemoteMethod):
    """A generator method of an actor; `.remote(...)` returns a stream to iterate."""

    __slots__ = ()

    def _what_to_write(self) -> str:
        return (
            f"{self._method.label} is a generator and runs in its actor's process: "
            f"write `async for item in actor.{self._method.attribute}.remote(...)`."
        )


def method_of(link: Link, interface: ActorInterface, name: str) -> RemoteMethod:
    """Return the remote method of a handle by name.

    Raises:
        AttributeError: the class has no such method.
    """
    method = interface.methods.get(name)
    if method is None:
        raise no_method(interface, name)
    kind = GeneratorMethod if method.window else RemoteMethod
    return kind(link, method, interface.group_names)


class LateMethod(RemoteMethod):
    """A method of an actor whose class is not known yet."""

    __slots__ = ()

    def __init__(self, link: Link, name: str) -> None:
        super().__init__(link, Method(link.name, name, None), ())

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method; an unsuitable call fails once the class is known."""
        interface = self._link.interface
        if interface is None:
            return super().remote(*args, **kwargs)
        method = method_of(self._link, interface, self._method.name)
        return method.remote(*args, **kwargs)

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        interface = self._link.interface
        if interface is None:
            raise MisuseError(
                f"{self._method.label}.map() with chunk= needs the actor's class, and "
                f"the node has not answered yet. Await the handle first: `actor = "
                f"await aiogpu.get_actor(...)`."
            )
        method = method_of(self._link, interface, self._method.name)
        return method._remote_chunk(arguments)


class ActorHandle(Displayed, EnteredOnLoop, SetInItsProcess, Generic[A]):
    """A handle to an actor. The actor ends when the last handle is dropped.

    `await handle` waits until the actor is ready, and returns the handle. `async with`
    ends the actor at the end of the block: after the calls made so far, or at once if
    the block raised. Call methods by `await handle.method.remote(...)`.

    Handles of one actor are equal; one that is compared or hashed before its node has
    answered equals only itself.
    """

    __slots__ = ("__dict__", "__weakref__", "_link")

    def __init__(self, link: Link) -> None:
        self._link = link

    def __repr__(self) -> str:
        return f"<ActorHandle {self._link.name}>"

    async def _html(self) -> str:
        return await self._link.html(repr(self))

    def __getattr__(self, name: str) -> RemoteMethod:
        link = self._link
        if link.interface is None:
            if link.own is not None:
                return method_of(link, link.own, name)
            if name.startswith("_"):
                raise AttributeError(f"{link.name} has no public method {name}.")
            return LateMethod(link, name)
        # The method refers to the link, not to this handle, so there is no cycle.
        method = method_of(link, link.interface, name)
        self.__dict__[name] = method
        return method

    def _identity(self) -> object:
        """Return what equals for handles of one actor, the same for ever."""
        return self.__dict__.setdefault("_key", self._link.identity or id(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorHandle):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __copy__(self) -> ActorHandle[A]:
        return ActorHandle(self._link)

    def __deepcopy__(self, _memo: object) -> ActorHandle[A]:
        return ActorHandle(self._link)

    def _as_called(self) -> str:
        interface = self._link.interface
        return f"{self._link.name if interface is None else interface.name}.remote(...)"

    def __await__(self) -> Generator[Any, None, ActorHandle[A]]:
        yield from self._link.ready().__await__()
        return self

    async def __aenter__(self) -> ActorHandle[A]:
        try:
            return await self
        except BaseException:
            # Python does not call `__aexit__`, and the traceback keeps this handle.
            self._link.kill(no_restart=True)
            raise

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._link.terminate()
        else:
            self._link.kill(no_restart=True)
        await self._link.ended()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return revive, (*self._link.reference(), self._link.interface)


def revive(
    actor: int, name: str, home: str, interface: ActorInterface
) -> ActorHandle[Any]:
    """Unpickle an actor's handle, in any process.

    Raises:
        NodeError: the process has no node.
        MisuseError: the process has another node.
    """
    return for_consumer(  # type: ignore[no-any-return]
        ActorHandle(_links().known(actor, name, home, interface))
    )


def _links() -> Any:
    """Return the class of links to actors for this process, worker or program."""
    from aiogpu.api.actors.link import ActorLink, WorkerActorLink

    return ActorLink if current.client is None else WorkerActorLink


class RemoteClass(Decorated, Generic[P, A]):
    """A class whose objects are actors: each lives in a process of its own."""

    def __init__(
        self, definition: Definition, options: TaskOptions, interface: ActorInterface
    ) -> None:
        super().__init__(definition, options)
        self._interface = interface.with_groups(options)
        self._interface.check_eviction(options)

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[A]:
        """Start an actor; return its handle at once.

        Raises:
            MisuseError: the arguments do not match the constructor's parameters.
            ActorNameError: another actor has the name. If the node is another process,
                calls and the await raise this error instead.
            NoLoopError: no event loop is running in this thread.
            InfeasibleError: the actor asks for more than the node has.
            OptionError: `get_if_exists=True` without a name.
            SerializationError: the class or an argument cannot be pickled.
        """
        self._interface.parameters.check(args, kwargs)
        func = self._func or self._prepare()
        payload = dump_arguments(self.__name__, args, kwargs)
        if isinstance(payload, PickledValue):
            from aiogpu.api.calls import packed

            payload = packed(payload)
        options = self._options
        key = None if options.name is None else (options.namespace or "", options.name)
        return ActorHandle(_links().create(func, payload, key, options.get_if_exists))

    def _prepare(self) -> FunctionSpec:
        """Do all work that is done once per class: checks, pickling, the request."""
        options = self._options
        if options.get_if_exists and options.name is None:
            raise OptionError(
                f"get_if_exists=True looks an actor up by name: write "
                f"`{self.__name__}.options(name='...').remote(...)`."
            )
        spec = options.actor_spec(self.__name__, self._definition.pickled().id)
        resources = spec.shape.request.as_numbers()
        if options.num_cpus is None:
            # The actor needs a CPU only to start, and holds none afterwards.
            resources.pop(CPU, None)
        return self._new_spec(spec, resources, actor=self._interface.terms(options))

    def options(self, **options: Unpack[ActorKeywords]) -> RemoteClass[P, A]:
        """Return the same class with other options; this one does not change.

        Raises:
            OptionError: an option is unknown or invalid.
        """
        checked = merged(self._options, options, "actor")
        return RemoteClass(self._definition, checked, self._interface)

    def __reduce__(self) -> tuple[object, ...]:
        reference = self._definition.reference()
        if reference is None:
            return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]
        return _rebuild, (reference, self._options)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type]:
        """Let subclasses inherit from the plain class."""
        return (cast("type", self.__wrapped__),)

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} is an actor's class: write "
            f"`{self.__name__}.remote(...)`. To make an object in this process, write "
            f"`{self.__name__}.__wrapped__(...)`."
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a class attribute, static or class method of the plain class."""
            called = self.__dict__.get("__name__", "this")
            message = f"{called} is an actor's class and has no {name}"
            if not name.startswith("_"):
                cls = self.__wrapped__
                attribute = getattr_static(cls, name, None)
                if isinstance(attribute, staticmethod | classmethod) or (
                    attribute is not None and not hasattr(type(attribute), "__get__")
                ):
                    return getattr(cls, name)
                message += (
                    f": call methods on an actor, made by `{called}.remote(...)`. The "
                    f"plain class is `{called}.__wrapped__`"
                )
            raise AttributeError(f"{message}.", name=name, obj=self)


def _rebuild(source: FunctionName, options: TaskOptions) -> RemoteClass[..., Any]:
    cls: Any = load_reference(*source)
    if isinstance(cls, RemoteClass):
        return RemoteClass(cls._definition, options, cls._interface)
    return RemoteClass(Definition(cls), options, ActorInterface(cls))


def decorate_class(cls: type, options: dict[str, Any]) -> RemoteClass[..., Any]:
    """Make a remote class; see `remote`."""
    interface = ActorInterface(cls)
    checked = merged(TaskOptions(), options, "actor")
    interface.groups(checked)
    return RemoteClass(Definition(cls), checked, interface)


def link_of(handle: object, what: str) -> Link:
    """Return the link of an actor's handle; raise `MisuseError` for other objects."""
    if not isinstance(handle, ActorHandle):
        raise MisuseError(
            f"{what} takes the handle of an actor, which .remote() of a class returns, "
            f"not {handle!r}."
        )
    link: Link = object.__getattribute__(handle, "_link")
    return link


@options_of("kill()")
def kill(actor: ActorHandle[Any], *, no_restart: bool = True) -> None:
    """End an actor's process at once; its calls fail with `ActorDiedError`.

    Args:
        actor: a handle to the actor.
        no_restart: False to restart the actor if it has restarts left; default True.
            A restart is used up even if the actor has no process yet.

    Raises:
        MisuseError: `actor` is not a handle of an actor.
    """
    link_of(actor, "kill()").kill(no_restart)


def exit_actor() -> NoReturn:
    """End the actor whose method calls this; its callers get `ActorDiedError`.

    Does not return: raises an exception that is not a subclass of `Exception`. The
    actor ends even if the method catches the exception and returns. Call this in the
    method's own thread or coroutine, not in a thread or task that the method started.

    Raises:
        MisuseError: called outside of an actor.
    """
    if current.actor is None:
        raise MisuseError(
            "exit_actor() was called outside of an actor; to end one from outside, "
            "write aiogpu.kill(actor)."
        )
    note_exit()
    raise ActorExit


def get_actor(name: str, namespace: str | None = None) -> ActorHandle[Any]:
    """Return a handle to the living actor with this name, on the running loop's node.

    Write `await aiogpu.get_actor(name)`: a node in another process answers at the
    await. A program may call methods with one result before that; a coroutine of a task
    must await first.

    Args:
        name: the actor's name.
        namespace: the namespace of the name; default the program's own.

    Raises:
        ActorNameError: no living actor has the name. If the node is another process,
            the await, and calls made before it, raise this error instead.
        NoLoopError: called neither on an event loop nor in a task.
        NodeError: the node is not open.
    """
    if current.client is not None and is_loop_running():
        return cast("ActorHandle[Any]", NamedActor(name, namespace or ""))
    return ActorHandle(_links().find(name, namespace or ""))


class NamedActor:
    """The result of `get_actor` in a coroutine of a task; await it for the handle."""

    __slots__ = ("_name", "_namespace")

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._namespace = namespace

    def __repr__(self) -> str:
        return f"<NamedActor {self._name!r}>"

    def __await__(self) -> Generator[Any, None, ActorHandle[Any]]:
        link = yield from _links().find_on_loop(self._name, self._namespace).__await__()
        return ActorHandle(link)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise MisuseError(
                f"get_actor({self._name!r}) must be awaited in a coroutine of a task: "
                f"write `actor = await aiogpu.get_actor(...)`."
            )
