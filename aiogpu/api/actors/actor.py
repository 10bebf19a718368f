"""Actors: objects that live in a process each, and their handles.

Light on purpose, as `api.remote_function` is: user modules bring this file into every
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
    EnteredOnLoop,
    options_of,
)
from aiogpu.client.current import ActorExit, current, is_loop_running, note_exit
from aiogpu.core.model.units import CPU
from aiogpu.errors import MisuseError
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
        """The name in errors."""
        return self._method.label

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"{self._method.label} is a method of one actor: pass the actor's handle, "
            f"and call `actor.{self._method.attribute}.remote(...)` there."
        )

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it; gives the call's handle at once, a generator's stream of items.

        Raises:
            MisuseError: it takes other arguments.
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
    """A method of an actor that is a generator; iterate what `.remote(...)` gives."""

    __slots__ = ()

    def _what_to_write(self) -> str:
        return (
            f"{self._method.label} is a generator and runs in its actor's process: "
            f"write `async for item in actor.{self._method.attribute}.remote(...)`."
        )


def method_of(link: Link, interface: ActorInterface, name: str) -> RemoteMethod:
    """Return what a handle has under the name of a method.

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
        """Call it; a call that the class cannot serve fails when that is known."""
        interface = self._link.interface
        if interface is None:
            return super().remote(*args, **kwargs)
        known = method_of(self._link, interface, self._method.name)
        return known.remote(*args, **kwargs)

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        interface = self._link.interface
        if interface is None:
            raise MisuseError(
                f"{self._method.label}.map() with chunk= needs to know the method, and "
                f"the node has not answered yet. Await the handle first: `actor = "
                f"await aiogpu.get_actor(...)`."
            )
        known = method_of(self._link, interface, self._method.name)
        return known._remote_chunk(arguments)


class ActorHandle(EnteredOnLoop, Generic[A]):
    """A handle to an actor. The actor ends when the last one is gone.

    `await handle` waits until the actor was made and gives the handle; `async with`
    ends the actor at the end of the block, after what it was sent; after an error in
    the block at once. Methods are called by `await handle.method.remote(...)`.
    """

    __slots__ = ("__dict__", "__weakref__", "_link")

    def __init__(self, link: Link) -> None:
        self._link = link

    def __repr__(self) -> str:
        return f"<ActorHandle {self._link.name}>"

    def __getattr__(self, name: str) -> RemoteMethod:
        link = self._link
        if link.interface is None:
            if link.own is not None:
                return method_of(link, link.own, name)
            if name.startswith("_"):
                raise AttributeError(f"{link.name} has no public method {name}.")
            return LateMethod(link, name)
        # It ties the link, not this handle, so that the last handle goes at once.
        method = method_of(link, link.interface, name)
        self.__dict__[name] = method
        return method

    def _as_called(self) -> str:
        interface = self._link.interface
        return f"{self._link.name if interface is None else interface.name}.remote(...)"

    def __await__(self) -> Generator[Any, None, ActorHandle[A]]:
        yield from self._link.ready().__await__()
        return self

    async def __aenter__(self) -> ActorHandle[A]:
        return await self

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
    """The handle that was pickled as this, in whichever process it has come to.

    Raises:
        NodeError: the process has no node.
        MisuseError: its node is another.
    """
    return ActorHandle(_links().known(actor, name, home, interface))


def _links() -> Any:
    """The class of this process's ties to actors: of a worker, or of a program."""
    from aiogpu.api.actors.link import ActorLink, WorkerActorLink

    return ActorLink if current.client is None else WorkerActorLink


class RemoteClass(Decorated, Generic[P, A]):
    """A class whose objects live in processes of their own."""

    def __init__(
        self, definition: Definition, options: TaskOptions, interface: ActorInterface
    ) -> None:
        super().__init__(definition, options)
        self._interface = interface.with_groups(options)

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[A]:
        """Make an actor; gives its handle at once.

        Raises:
            MisuseError: the constructor takes other arguments.
            ActorNameError: another actor has that name; where the node is another
                process, from the calls and at the await.
            NoLoopError: no event loop is running here.
            InfeasibleError: the node can never give what the actor asks for.
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
        """All that is done once per class: checks, pickling, the request."""
        options = self._options
        spec = options.actor_spec(self.__name__, self._definition.pickled().id)
        resources = spec.shape.request.as_numbers()
        if options.num_cpus is None:
            # The CPU by which it is placed is given back; it holds none.
            resources.pop(CPU, None)
        return self._new_spec(spec, resources, actor=self._interface.terms(options))

    def options(self, **options: Unpack[ActorKeywords]) -> RemoteClass[P, A]:
        """Return the same class with other options; this one does not change.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        found = merged(self._options, options, "actor")
        return RemoteClass(self._definition, found, self._interface)

    def __reduce__(self) -> tuple[object, ...]:
        reference = self._import_name()
        if reference is None:
            return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]
        return _found_again, (reference, self._options)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type]:
        """Have a class that names this one as a base inherit from the plain class."""
        return (cast("type", self.__wrapped__),)

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} is an actor's class: write "
            f"`{self.__name__}.remote(...)`. To make an object here, in this process, "
            f"write `{self.__name__}.__wrapped__(...)`."
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A class attribute, static or class method of the plain class."""
            called = self.__dict__.get("__name__", "this")
            told = f"{called} is an actor's class and has no {name}"
            if not name.startswith("_"):
                cls = self.__wrapped__
                found = getattr_static(cls, name, None)
                if isinstance(found, staticmethod | classmethod) or (
                    found is not None and not hasattr(type(found), "__get__")
                ):
                    return getattr(cls, name)
                told += (
                    f": methods are called on an actor, which "
                    f"`{called}.remote(...)` gives. The plain class is "
                    f"`{called}.__wrapped__`"
                )
            raise AttributeError(f"{told}.", name=name, obj=self)


def _found_again(source: FunctionName, options: TaskOptions) -> RemoteClass[..., Any]:
    found: Any = load_reference(*source)
    if isinstance(found, RemoteClass):
        return RemoteClass(found._definition, options, found._interface)
    return RemoteClass(Definition(found), options, ActorInterface(found))


def decorate_class(cls: type, options: dict[str, Any]) -> RemoteClass[..., Any]:
    """Return what `@remote` makes of a class; see there."""
    interface = ActorInterface(cls)
    checked = merged(TaskOptions(), options, "actor")
    interface.groups(checked)
    return RemoteClass(Definition(cls), checked, interface)


def link_of(handle: object, asker: str) -> Link:
    """Return what an actor's handle holds; raises `MisuseError` if it is none."""
    if not isinstance(handle, ActorHandle):
        raise MisuseError(
            f"{asker} was given {handle!r}; give it what `.remote()` of an actor's "
            f"class has given."
        )
    link: Link = object.__getattribute__(handle, "_link")
    return link


@options_of("kill()")
def kill(actor: ActorHandle[Any], *, no_restart: bool = True) -> None:
    """End an actor's process at once; what it was to do fails with `ActorDiedError`.

    Args:
        actor: a handle to it.
        no_restart: if False, it is made anew should it have restarts left.

    Raises:
        MisuseError: it is no handle of an actor.
    """
    link_of(actor, "kill()").kill(no_restart)


def exit_actor() -> NoReturn:
    """End the actor whose method calls this; its callers get `ActorDiedError`.

    The call does not return: it raises an exception that is not an `Exception`. The
    actor ends also if the method catches that exception and returns. Call it in the
    method's own thread or coroutine, not in a thread or task that the method started.

    Raises:
        MisuseError: this is no actor's process.
    """
    if current.actor is None:
        raise MisuseError("exit_actor() was called outside of an actor's methods.")
    note_exit()
    raise ActorExit


def get_actor(name: str, namespace: str | None = None) -> ActorHandle[Any]:
    """A handle to the living actor of that name, on the running loop's node.

    Write `await aiogpu.get_actor(name)`: a node of another process is asked, and
    answers at the await. Methods with one result can be called before that as well.

    Raises:
        ActorNameError: no actor has that name; where a node of another process is
            asked, at the await and from the calls made until then.
        NoLoopError: no event loop is running here, and this is no task.
        NodeError: the node is not open.
    """
    if current.client is not None and is_loop_running():
        return cast("ActorHandle[Any]", NamedActor(name, namespace or ""))
    return ActorHandle(_links().find(name, namespace or ""))


class NamedActor:
    """The result of `get_actor` in a coroutine of a task: await it for the handle."""

    __slots__ = ("_name", "_namespace")

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._namespace = namespace

    def __repr__(self) -> str:
        return f"<NamedActor {self._name!r}>"

    def __await__(self) -> Generator[Any, None, ActorHandle[Any]]:
        finding = _links().find_on_loop(self._name, self._namespace)
        return ActorHandle((yield from finding.__await__()))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise MisuseError(
                f"get_actor({self._name!r}) in a coroutine of a task is awaited before "
                f"its methods are called: `actor = await aiogpu.get_actor(...)`."
            )
