"""aiogpu for code without an event loop: scripts, threads, ported Ray programs.

    import aiogpu.sync as aiogpu

    @aiogpu.remote(num_gpus=0.25)
    def embed(text: str) -> list[float]: ...

    with aiogpu.init():
        handles = [embed.remote(text) for text in texts]
        vectors = aiogpu.get(handles)

Nothing here is a second runtime: each function forwards to its namesake in `aiogpu`,
on an event loop in a thread of its own, or, in a program whose event loop has a node,
on that loop. What `.remote()` gives is a `concurrent.futures.Future`; a generator and
`map` give plain iterators. In a task these functions are those of `aiogpu` itself.

The module that defines functions by `aiogpu.sync.remote` is imported by workers, so
this one is light: what needs an event loop is loaded by the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from aiogpu.api.decorator import method
from aiogpu.api.decorator import remote as _remote
from aiogpu.api.runtime_context import get_gpu_ids, get_runtime_context
from aiogpu.client.current import is_in_task
from aiogpu.errors import MisuseError, NodeRunningError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from aiogpu.api.keywords import ActorKeywords, AnyKeywords, Options
    from aiogpu.api.portal import (
        ActorPool,
        Executor,
        Handle,
        Queue,
        ResultIterator,
        SyncActorHandle,
        SyncNode,
    )
    from aiogpu.api.reservation import Lease, Placement
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


def _portal(what: str) -> Any:
    """The way to the program's node; None in a task's code, which needs none."""
    if is_in_task():
        return None
    from aiogpu.api.portal import portal_for

    return portal_for(what)


# Remote functions and actors.


class _Decorated:
    """Base of remote functions and classes for code without an event loop."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.__aiogpu_function__ = made.__wrapped__
        update_wrapper(self, made.__wrapped__, updated=())

    def __repr__(self) -> str:
        return repr(self._made)

    def __reduce__(self) -> Any:
        return _decorated, (self._made,)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """Refuse a direct call; see `remote`.

        Raises:
            MisuseError: always; it says what to write.
        """
        name = self._made.__name__
        raise MisuseError(
            f"{name} runs in a worker: write `{name}.remote(...)`. To call it here, in "
            f"this process, write `{name}.__wrapped__(...)`."
        )


class RemoteFunction(_Decorated, Generic[P, R]):
    """A function that runs in a worker; call it by `.remote(...)`."""

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Start the task; gives its handle at once, whose `result()` waits.

        Raises:
            MisuseError: the function takes other arguments, or an event loop runs here.
            InfeasibleError: the node can never give what the task asks for.
            SerializationError: the function or an argument cannot be pickled.
        """
        portal = _portal(f"{self._made.__name__}.remote()")
        if portal is None:
            return self._made.remote(*args, **kwargs)  # type: ignore[no-any-return]
        from aiogpu.api.portal import call_function

        return call_function(portal, self._made, args, kwargs)  # type: ignore[no-any-return]

    def options(self, **options: Unpack[Options]) -> Self:
        """Return the same function with other options; this one does not change.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        return type(self)(self._made.options(**options))

    @overload
    def map(
        self,
        iterable: Iterable[Any],
        /,
        *,
        limit: int | None = None,
        ordered: bool = True,
        chunk: int | Literal["auto"] | None = None,
        return_exceptions: Literal[False] = False,
    ) -> ResultIterator[R]: ...

    @overload
    def map(
        self,
        iterable: Iterable[Any],
        /,
        *,
        limit: int | None = None,
        ordered: bool = True,
        chunk: int | Literal["auto"] | None = None,
        return_exceptions: Literal[True],
    ) -> ResultIterator[R | Exception]: ...

    def map(
        self,
        iterable: Iterable[Any],
        /,
        *,
        limit: int | None = None,
        ordered: bool = True,
        chunk: int | Literal["auto"] | None = None,
        return_exceptions: bool = False,
    ) -> ResultIterator[Any]:
        """Call it with each item; gives an iterator over the results.

        The options are those of `aiogpu.RemoteFunction.map`. An iterable that is no
        collection is read in a thread of its own, as far as `limit` items ahead.

        Raises:
            OptionError: an option is ill-valued.
            MisuseError: it is no iterable, or this is a task: `map` needs a program.
        """
        portal = _portal(f"{self._made.__name__}.map()")
        options: dict[str, Any] = {
            "limit": limit,
            "ordered": ordered,
            "chunk": chunk,
            "return_exceptions": return_exceptions,
        }
        if portal is None:
            return self._made.map(iterable, **options)  # type: ignore[no-any-return]
        from aiogpu.api.portal import map_on

        return map_on(portal, self._made, iterable, options)


class RemoteGenerator(RemoteFunction[P, R]):
    """A generator that runs in a worker; iterate what `.remote(...)` gives."""

    if TYPE_CHECKING:

        def remote(  # type: ignore[override]
            self, /, *args: P.args, **kwargs: P.kwargs
        ) -> ResultIterator[R]:
            """Start the task; gives a plain iterator over its items at once."""


class RemoteClass(_Decorated, Generic[P, A]):
    """A class whose objects live in processes of their own."""

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> SyncActorHandle[A]:
        """Make an actor; gives its handle at once; see `aiogpu.types.RemoteClass`.

        Raises:
            MisuseError: the constructor takes other arguments.
            InfeasibleError: the node can never give what the actor asks for.
            SerializationError: the class or an argument cannot be pickled.
        """
        portal = _portal(f"{self._made.__name__}.remote()")
        if portal is None:
            return self._made.remote(*args, **kwargs)  # type: ignore[no-any-return]
        from aiogpu.api.portal import call_on

        return call_on(portal, self._made.remote, args, kwargs)  # type: ignore[no-any-return]

    def options(self, **options: Unpack[ActorKeywords]) -> Self:
        """Return the same class with other options; this one does not change.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        return type(self)(self._made.options(**options))

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type]:
        """Have a class that names this one as a base inherit from the plain class."""
        return (cast("type", self.__aiogpu_function__),)


def _decorated(made: Any) -> Any:
    """What stands here for a function or class that `aiogpu.remote` has made."""
    from aiogpu.api.actors.actor import RemoteClass as MadeClass
    from aiogpu.api.remote_function import RemoteGenerator as MadeGenerator

    if isinstance(made, MadeClass):
        return RemoteClass(made)
    return (RemoteGenerator if isinstance(made, MadeGenerator) else RemoteFunction)(
        made
    )


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
    """Make a function or a class remote, for code without an event loop.

    `@remote`, or `@remote(num_gpus=0.25)`, with the options of `aiogpu.remote`. What
    that one has made is taken too: `embed = aiogpu.sync.remote(library.embed)`.

    Raises:
        OptionError: an option is unknown or invalid.
        MisuseError: the argument is neither, or a function that cannot be a task.
    """
    from aiogpu.api.remote_function import Decorated

    if isinstance(function, Decorated) and not options:
        return _decorated(function)
    if function is None:
        decorate = _remote(**options)
        return lambda function: _decorated(decorate(function))
    return _decorated(_remote(function, **options))


# The node.


def init(**options: Any) -> SyncNode:
    """Open a node for this program: at once; `with` closes it at the end of its block.

    Without `with`, `shutdown()` closes it, or the end of the program. A `.remote()`
    before it opens a node with the defaults.

    Args:
        **options: those of `aiogpu.init`.

    Raises:
        OptionError: an option is unknown or invalid.
        NodeError: there is a node already, or it cannot start; or called in a task.
        MisuseError: an event loop runs in this thread: `await aiogpu.init()` there.
    """
    from aiogpu.api import node, portal

    what = "aiogpu.sync.init()"
    way = portal.portal_for(what, opens=True)
    if way is None:
        from aiogpu.client.current import error_inside_task

        raise error_inside_task(what)
    try:
        opened = way.run(what, lambda: node.init(**options))
    except NodeRunningError as error:
        told = str(error).replace("`await aiogpu.", "`aiogpu.sync.")
        raise NodeRunningError(told) from None
    except BaseException:
        if portal.portal_to_program(what) is None:
            portal.close_own_loop()
        raise
    return portal.SyncNode(way, opened)


def is_initialized() -> bool:
    """Return whether this program has a node; inside a task the answer is True."""
    if is_in_task():
        return True
    from aiogpu.api.portal import portal_to_program

    return portal_to_program("aiogpu.sync.is_initialized()") is not None


def _node(what: str) -> SyncNode:
    """The program's node; one is opened if there is none."""
    from aiogpu.api import node, portal, session

    way = portal.portal_for(what)
    if way is None:
        from aiogpu.client.current import error_inside_task

        raise error_inside_task(what)
    mine = way.call(session.session_of_program, what)
    way.run(what, mine.opened)
    return portal.SyncNode(way, node.node_of(mine))


def shutdown() -> None:
    """Close this program's node, if it has one: stop its tasks, leave nothing behind.

    Raises:
        NodeError: called in a task.
    """
    if is_initialized():
        _node("aiogpu.sync.shutdown()").shutdown()


def status() -> NodeStatus:
    """Return who holds which share of which device, what waits and why."""
    return _node("aiogpu.sync.status()").status()


def why(task_id: int) -> Why:
    """Return why a task waits, or its state if it does not; see `aiogpu.why`."""
    return _node("aiogpu.sync.why()").why(task_id)


def cluster_resources() -> dict[str, float]:
    """Return all resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`."""
    return _node("aiogpu.sync.cluster_resources()").cluster_resources()


def available_resources() -> dict[str, float]:
    """Return the free amount of each resource, 0.0 included."""
    return _node("aiogpu.sync.available_resources()").available_resources()


# Results and values.


@overload
def get(handle: Handle[R], /, *, timeout: float | None = None) -> R: ...


@overload
def get(handle: Sequence[Handle[R]], /, *, timeout: float | None = None) -> list[R]: ...


def get(handle: Any, /, *, timeout: float | None = None) -> Any:
    """Wait for the result of a handle, or for those of a list of handles.

    Given an actor's handle, it waits until the actor was made, and returns the handle.

    Args:
        handle: what `.remote()` gave, or a list of such.
        timeout: seconds for all of them, 0 to look only; None waits for ever.

    Returns:
        The result, or a list of results in the order of the handles.

    Raises:
        MisuseError: it is no handle, or an event loop runs in this thread.
        Exception: what one of them has raised, as soon as it has; the others go on.
        TaskTimeoutError: time was up; what was waited for goes on.
    """
    if is_in_task():
        from aiogpu.api.results import wait as waiting

        return waiting.get(handle, timeout=timeout)
    from aiogpu.api.portal import results_of

    return results_of(handle, timeout)


def put(value: R) -> Handle[R]:
    """Keep a value, to hand it to many tasks without copying it for each.

    See `aiogpu.put`; this one gives the handle at once.
    """
    from aiogpu.api.calls import put as keep

    portal = _portal("aiogpu.sync.put()")
    if portal is None:
        return keep(value).handle  # type: ignore[no-any-return]
    from aiogpu.api.portal import unwrap, wrap

    return portal.call(lambda: wrap(portal, keep(unwrap(value)).handle))  # type: ignore[no-any-return]


def wait(
    handles: Collection[Handle[R]],
    /,
    *,
    num_returns: int = 1,
    timeout: float | None = None,
) -> tuple[list[Handle[R]], list[Handle[R]]]:
    """Wait until so many of some handles have ended; gives these and the others.

    See `aiogpu.wait` for the arguments and the errors.
    """
    from aiogpu.api.results import wait as waiting

    portal = _portal("aiogpu.sync.wait()")
    if portal is None:
        return tuple(  # type: ignore[return-value]
            waiting.wait(cast("Any", handles), num_returns=num_returns, timeout=timeout)
        )
    from aiogpu.api.portal import checked_handles, unwrap

    found = checked_handles("wait", handles)

    async def look() -> Any:
        given = {unwrap(one): one for one in found}
        parted = await waiting.wait([*given], num_returns=num_returns, timeout=timeout)
        return tuple([given[one] for one in part] for part in parted)

    return portal.run("aiogpu.sync.wait()", look)  # type: ignore[no-any-return]


def as_completed(handles: Collection[Handle[R]], /) -> Iterator[Handle[R]]:
    """Hand back handles one by one, each when it has ended; see `aiogpu.as_completed`.

    Leaving the loop cancels no work.
    """
    if is_in_task():
        from aiogpu.api.results import wait as waiting

        return iter(waiting.as_completed(cast("Any", handles)))  # type: ignore[arg-type]
    from aiogpu.api.portal import checked_handles, completed

    return completed(checked_handles("as_completed", handles))


# Actors.


def get_actor(name: str, namespace: str | None = None) -> SyncActorHandle[Any]:
    """Return a handle to the living actor of that name; see `aiogpu.get_actor`.

    Raises:
        ActorNameError: no actor has that name.
    """
    from aiogpu.api.actors import actor

    what = "aiogpu.sync.get_actor()"
    portal = _portal(what)
    if portal is None:
        return cast("SyncActorHandle[Any]", actor.get_actor(name, namespace))
    from aiogpu.api.portal import SyncActorHandle

    found = portal.run(what, lambda: actor.get_actor(name, namespace))
    return SyncActorHandle(portal, found)


def kill(actor: SyncActorHandle[Any], *, no_restart: bool = True) -> None:
    """End an actor's process at once; see `aiogpu.kill`."""
    from aiogpu.api.actors.actor import kill as end

    portal = _portal("aiogpu.sync.kill()")
    if portal is None:
        end(cast("Any", actor), no_restart=no_restart)
        return
    from aiogpu.api.portal import unwrap

    portal.call(lambda: end(unwrap(actor), no_restart=no_restart))


# Reservations.


@contextmanager
def lease(**options: Any) -> Iterator[Lease]:
    """Hold resources for code of this process, for the time of a `with` block.

    `with aiogpu.sync.lease(num_gpus=1) as lease:`; the options are those of
    `aiogpu.lease`, and `lease.environ`, `lease.ids` tell what is held.
    """
    from aiogpu.api.reservation import lease as reserve

    what = "aiogpu.sync.lease()"
    with _entered(what, lambda: reserve(**options)) as held:
        yield held


@contextmanager
def placement(
    bundles: Sequence[Mapping[str, Any]], **options: Any
) -> Iterator[Placement]:
    """Hold bundles of resources that tasks use, for the time of a `with` block.

    `with aiogpu.sync.placement([{"num_gpus": 1}] * 2) as group:`, then
    `f.options(placement=group, bundle=0).remote()`; see `aiogpu.placement`.
    """
    from aiogpu.api.reservation import placement as reserve

    what = "aiogpu.sync.placement()"
    with _entered(what, lambda: reserve(bundles, **options)) as group:
        yield group


@contextmanager
def _entered(what: str, reserve: Callable[[], Any]) -> Iterator[Any]:
    """Enter what is entered on a loop, and leave it at the end of the block."""
    portal = _portal(what)
    if portal is None:
        raise MisuseError(
            f"{what} is for programs; a task holds what it has asked for."
        )
    made = portal.call(reserve)
    yield portal.run(what, made.__aenter__)
    portal.run(what, lambda: made.__aexit__(None, None, None))


_LATE: Final = ("ActorPool", "Executor", "Handle", "Queue", "ResultIterator")
"""Names of a module that imports asyncio."""


if not TYPE_CHECKING:

    def __getattr__(name):
        """Load a late name; tell what to use in place of a name of Ray's."""
        from importlib import import_module

        if name in _LATE:
            return getattr(import_module("aiogpu.api.portal"), name)
        if name.endswith("Error"):  # as `ray.exceptions` has them
            found = getattr(import_module("aiogpu"), name, None)
            if isinstance(found, type):
                return found
        usage_errors = import_module("aiogpu.api.usage_errors")
        raise usage_errors.no_such_name(name, __all__, module=__name__)


__all__ = [
    "ActorPool",
    "Executor",
    "Handle",
    "Queue",
    "RemoteClass",
    "RemoteFunction",
    "RemoteGenerator",
    "ResultIterator",
    "as_completed",
    "available_resources",
    "cluster_resources",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "lease",
    "method",
    "placement",
    "put",
    "remote",
    "shutdown",
    "status",
    "wait",
    "why",
]
