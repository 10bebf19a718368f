"""aiogpu for code without an event loop: scripts, threads, ported Ray programs.

    import aiogpu.sync as aiogpu

    @aiogpu.remote(num_gpus=0.25)
    def embed(text: str) -> list[float]: ...

    with aiogpu.init():
        handles = [embed.remote(text) for text in texts]
        vectors = aiogpu.get(handles)

Each function calls its namesake in `aiogpu`, on an event loop in a background thread,
or on the program's own event loop if that has a node. `.remote()` returns a
`concurrent.futures.Future`; generators and `map` return plain iterators. In a task,
these functions are the functions of `aiogpu` itself.

Light to import: workers import each module that uses `aiogpu.sync.remote`, so modules
that need an event loop are imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper
from importlib import import_module
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
from aiogpu.client.current import error_inside_task, is_in_task
from aiogpu.errors import NodeRunningError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from aiogpu.api.actors.actor import exit_actor
    from aiogpu.api.actors.batch import batch
    from aiogpu.api.keywords import (
        ActorKeywords,
        AnyKeywords,
        InitKeywords,
        LeaseKeywords,
        Options,
    )
    from aiogpu.api.portal import (
        ActorPool,
        Executor,
        Handle,
        Program,
        Queue,
        ResultIterator,
        SyncActorHandle,
        SyncLease,
        SyncNode,
        SyncPlacement,
    )
    from aiogpu.api.results.reports import report
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


def _caller(what: str) -> Any:
    """Return what makes a call for the running code: in a task it is `aiogpu` itself.

    `api.portal.Program` has functions of the same names for programs.
    """
    return import_module("aiogpu") if is_in_task() else _program(what)


def _program(what: str) -> Program:
    from aiogpu.api.portal import Program

    return Program(what)


# Remote functions and actors.


class _Decorated:
    """Base of remote functions and classes for code without an event loop."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.__aiogpu_function__ = wrapped.__wrapped__
        update_wrapper(self, wrapped.__wrapped__, updated=())

    def __repr__(self) -> str:
        return repr(self._wrapped)

    def __reduce__(self) -> Any:
        return _wrap, (self._wrapped,)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """Refuse a direct call; see `remote`.

        Raises:
            MisuseError: always, with the call to write instead.
        """
        raise self._wrapped._refusal_without_loop()


class RemoteFunction(_Decorated, Generic[P, R]):
    """A function that runs in workers; call it by `.remote(...)`."""

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Start a task that calls the function; return its handle at once.

        `handle.result()` waits for the result.

        Raises:
            MisuseError: the arguments do not match the function's parameters, or an
                event loop is running in this thread.
            InfeasibleError: the task asks for more than the node has. If the node is
                not open yet, `result()` raises this error instead.
            SerializationError: the function or an argument cannot be pickled.
        """
        if is_in_task():
            return self._wrapped.remote(*args, **kwargs)  # type: ignore[no-any-return]
        program = _program(f"{self._wrapped.__name__}.remote()")
        return program.call(self._wrapped, args, kwargs)  # type: ignore[no-any-return]

    def options(self, **options: Unpack[Options]) -> Self:
        """Return the same function with other options; this one does not change.

        Raises:
            OptionError: an option is unknown or invalid.
        """
        return type(self)(self._wrapped.options(**options))

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
        progress: bool = False,
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
        progress: bool = False,
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
        progress: bool = False,
    ) -> ResultIterator[Any]:
        """Call the function with each item; return an iterator over the results.

        The options are those of `aiogpu.RemoteFunction.map`. An iterable that is not a
        collection is read in a separate thread, at most `limit` items ahead.

        Raises:
            OptionError: an option is invalid.
            MisuseError: `iterable` cannot be iterated, or the call was made in a task.
        """
        options: dict[str, Any] = {
            "limit": limit,
            "ordered": ordered,
            "chunk": chunk,
            "return_exceptions": return_exceptions,
            "progress": progress,
        }
        if is_in_task():
            return self._wrapped.map(iterable, **options)  # type: ignore[no-any-return]
        program = _program(f"{self._wrapped.__name__}.map()")
        return program.map(self._wrapped, iterable, options)


class RemoteGenerator(RemoteFunction[P, R]):
    """A generator that runs in workers; `.remote(...)` returns a plain iterator."""

    if TYPE_CHECKING:

        def remote(  # type: ignore[override]
            self, /, *args: P.args, **kwargs: P.kwargs
        ) -> ResultIterator[R]:
            """Start a task that runs the generator; return an iterator at once."""


class RemoteClass(_Decorated, Generic[P, A]):
    """A class whose objects are actors: each lives in a process of its own."""

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> SyncActorHandle[A]:
        """Start an actor; return its handle at once; see `aiogpu.types.RemoteClass`.

        Raises:
            MisuseError: the arguments do not match the constructor's parameters.
            InfeasibleError: the actor asks for more than the node has.
            SerializationError: the class or an argument cannot be pickled.
        """
        if is_in_task():
            return self._wrapped.remote(*args, **kwargs)  # type: ignore[no-any-return]
        program = _program(f"{self._wrapped.__name__}.remote()")
        return program.make(self._wrapped, args, kwargs)  # type: ignore[no-any-return]

    def options(self, **options: Unpack[ActorKeywords]) -> Self:
        """Return the same class with other options; this one does not change.

        Raises:
            OptionError: an option is unknown or invalid.
        """
        return type(self)(self._wrapped.options(**options))

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type]:
        """Let subclasses inherit from the plain class."""
        return (cast("type", self.__aiogpu_function__),)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a class attribute, static or class method of the plain class."""
            return getattr(self.__dict__.get("_wrapped"), name)


def _wrap(remote: Any) -> Any:
    """Wrap a remote function or class of `aiogpu.remote` for code without a loop."""
    from aiogpu.api.actors.actor import RemoteClass as LoopClass
    from aiogpu.api.remote_function import RemoteGenerator as LoopGenerator

    if isinstance(remote, LoopClass):
        return RemoteClass(remote)
    if isinstance(remote, LoopGenerator):
        return RemoteGenerator(remote)
    return RemoteFunction(remote)


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

    For code without an event loop. The options are those of `aiogpu.remote`. A function
    that `aiogpu.remote` already decorates is accepted too:
    `embed = aiogpu.sync.remote(library.embed)`.

    A function that is not in a module is pickled once, at its first `.remote()`. Later
    calls warn once if an outer variable, global or default then is another object,
    which tasks do not see. A change inside a list is not noticed. An `Executor` pickles
    such a function again.

    Raises:
        OptionError: an option is unknown or invalid.
        MisuseError: the argument is not callable, or remote already.
    """
    from aiogpu.api.remote_function import Decorated

    if isinstance(function, Decorated) and not options:
        return _wrap(function)
    if function is None:
        decorate = _remote(**options)
        return lambda function: _wrap(decorate(function))
    return _wrap(_remote(function, **options))


# The node.


def init(**options: Unpack[InitKeywords]) -> SyncNode:
    """Open a node for this program; `with` closes it at the end of its block.

    Without `with`, the node is closed by `shutdown()` or at the end of the program. A
    `.remote()` before `init` opens a node with default options.

    Args:
        **options: options of `aiogpu.init`.

    Raises:
        OptionError: an option is unknown or invalid.
        NodeError: the program already has a node, the node cannot start, or the call
            was made in a task.
        MisuseError: an event loop is running in this thread; use `aiogpu.init()`.
    """
    from aiogpu.api import node, portal

    what = "aiogpu.sync.init()"
    if is_in_task():
        raise error_inside_task(what)
    loop_portal = portal.portal_for(what, opens=True)
    try:
        opened = loop_portal.run(what, lambda: node.init(**options))
    except NodeRunningError as error:
        message = str(error).replace("`await aiogpu.", "`aiogpu.sync.")
        raise NodeRunningError(message) from None
    except BaseException:
        if portal.portal_to_program(what) is None:
            portal.close_own_loop()
        raise
    return portal.SyncNode(loop_portal, opened)


def is_initialized() -> bool:
    """Return whether this program has a node; inside a task the answer is True."""
    if is_in_task():
        return True
    from aiogpu.api.portal import portal_to_program

    return portal_to_program("aiogpu.sync.is_initialized()") is not None


def _node(what: str) -> SyncNode:
    """Return the program's node; open one if there is none."""
    if is_in_task():
        raise error_inside_task(what)
    from aiogpu.api import node, portal, session

    loop_portal = portal.portal_for(what)
    program = loop_portal.call(session.find_session, what)
    loop_portal.run(what, program.opened)
    return portal.SyncNode(loop_portal, node.node_of(program))


def shutdown() -> None:
    """Close this program's node, if any: stop its tasks; leave no process or file.

    Raises:
        NodeError: the call was made in a task.
    """
    if is_initialized():
        _node("aiogpu.sync.shutdown()").shutdown()


def status() -> NodeStatus:
    """Return which tasks hold which devices, and which tasks wait for what."""
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
    """Wait for the result of a handle, or for the results of a list of handles.

    With the handle of an actor, wait until the actor is ready, and return the handle;
    with a lease or a placement, wait until it is granted.

    Args:
        handle: a handle that `.remote()` returned, or a list of handles.
        timeout: seconds for all handles together, 0 to return at once; None waits
            without limit.

    Returns:
        The result, or a list of results in the order of the handles.

    Raises:
        MisuseError: the argument is not a handle, or an event loop is running in this
            thread.
        Exception: the error of the first task that fails; the other tasks go on.
        TaskTimeoutError: the time is up; the tasks go on.
    """
    try:
        return _caller("aiogpu.sync.get()").get(handle, timeout=timeout)
    except BaseException as error:
        from aiogpu.api.results.base import cut_frames

        cut_frames(error)
        raise


def put(value: R) -> Handle[R]:
    """Store a value, to pass it to many tasks without a copy for each.

    See `aiogpu.put`; this function returns the handle at once.
    """
    return _caller("aiogpu.sync.put()").put(value)  # type: ignore[no-any-return]


def wait(
    handles: Collection[Handle[R]],
    /,
    *,
    num_returns: int = 1,
    timeout: float | None = None,
) -> tuple[list[Handle[R]], list[Handle[R]]]:
    """Wait until `num_returns` of the handles are done; return these and the others.

    See `aiogpu.wait` for the arguments and the errors.
    """
    caller = _caller("aiogpu.sync.wait()")
    return caller.wait(  # type: ignore[no-any-return]
        handles, num_returns=num_returns, timeout=timeout
    )


def as_completed(handles: Collection[Handle[R]], /) -> Iterator[Handle[R]]:
    """Yield handles one by one, as they end; see `aiogpu.as_completed`.

    Leaving the loop cancels no work.
    """
    caller = _caller("aiogpu.sync.as_completed()")
    return caller.as_completed(handles)  # type: ignore[no-any-return]


# Actors.


def get_actor(name: str, namespace: str | None = None) -> SyncActorHandle[Any]:
    """Return a handle to the living actor with this name; see `aiogpu.get_actor`.

    Raises:
        ActorNameError: no living actor has the name.
    """
    caller = _caller("aiogpu.sync.get_actor()")
    return caller.get_actor(name, namespace)  # type: ignore[no-any-return]


def kill(actor: SyncActorHandle[Any], *, no_restart: bool = True) -> None:
    """End an actor's process at once; see `aiogpu.kill`."""
    _caller("aiogpu.sync.kill()").kill(actor, no_restart=no_restart)


# Reservations.


def lease(**options: Unpack[LeaseKeywords]) -> SyncLease:
    """Reserve resources for code of this process, for the time of a `with` block.

    `with aiogpu.sync.lease(num_gpus=1) as lease:`; the options are those of
    `aiogpu.lease`. `lease.ids` and `lease.environ` identify the devices. Without
    `with`, `aiogpu.sync.get(lease)` waits for the lease, and `release()` ends it.
    """
    from aiogpu.api.portal import SyncLease, portal_of_program
    from aiogpu.api.reservation import lease as reserve

    portal = portal_of_program("aiogpu.sync.lease()", _HELD_BY_OPTIONS)
    return SyncLease(portal, portal.call(reserve, **options))


def placement(bundles: Sequence[Mapping[str, Any]], **options: Any) -> SyncPlacement:
    """Reserve bundles of resources for tasks, for the time of a `with` block.

    `with aiogpu.sync.placement([{"num_gpus": 1}] * 2) as group:`, then
    `f.options(placement=group, bundle=0).remote()`; see `aiogpu.placement`. Without
    `with`, `group.ready()` waits until the bundles are held, and `remove()` ends it.
    """
    from aiogpu.api.portal import SyncPlacement, portal_of_program
    from aiogpu.api.reservation import placement as reserve

    portal = portal_of_program("aiogpu.sync.placement()", _HELD_BY_OPTIONS)
    return SyncPlacement(portal, portal.call(reserve, bundles, **options))


def gang(target: Any, size: int, /, **options: Any) -> Any:
    """Run a function or a class in several processes together; see `aiogpu.gang`.

    `results = aiogpu.sync.gang(train, 4, num_gpus=1)` waits for the results of a
    function, in rank order. `with aiogpu.sync.gang(Trainer, 4, num_gpus=1) as ranks:`,
    then `ranks.call("fit", epochs=3)`, for a class.
    """
    from aiogpu.api.actors.actor import RemoteClass as ClassOfLoop
    from aiogpu.api.actors.gang import gang as make
    from aiogpu.api.portal import SyncGang, portal_of_program

    portal = portal_of_program("aiogpu.sync.gang()", _HELD_BY_OPTIONS)
    if isinstance(target, _Decorated):
        target = target._wrapped
    made = portal.call(make, target, size, **options)
    if isinstance(target, type | ClassOfLoop):
        return SyncGang(portal, made)
    return portal.run("gang()", lambda: made)


_HELD_BY_OPTIONS: Final = "A task holds resources by its options, such as num_gpus=."


_IN_TASKS: Final = ("batch", "exit_actor", "report")
"""Names of `aiogpu` for the code of tasks and actors, the same for both APIs."""


_LATE: Final = ("ActorPool", "Executor", "Handle", "Queue", "ResultIterator")
"""Public names of `api.portal`, which imports asyncio."""


if not TYPE_CHECKING:

    def __getattr__(name):
        """Import a name of `_LATE` or `_IN_TASKS`; suggest one for an unknown name."""
        if name in _LATE:
            return getattr(import_module("aiogpu.api.portal"), name)
        if name in _IN_TASKS:
            return getattr(import_module("aiogpu"), name)
        if name.endswith("Error"):  # for programs that used `ray.exceptions`
            error = getattr(import_module("aiogpu"), name, None)
            if isinstance(error, type):
                return error
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
    "batch",
    "cluster_resources",
    "exit_actor",
    "gang",
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
    "report",
    "shutdown",
    "status",
    "wait",
    "why",
]
