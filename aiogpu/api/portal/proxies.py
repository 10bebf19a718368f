"""Actors, pools, queues, reservations and nodes for code without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from aiogpu.api import node as nodes
from aiogpu.api import reservation
from aiogpu.api.actors import gang as gangs
from aiogpu.api.actors import pool as pools
from aiogpu.api.actors import queue as queues
from aiogpu.api.actors.actor import ActorHandle, RemoteMethod
from aiogpu.api.actors.pool import PoolMethod
from aiogpu.api.portal.calls import call_method, map_on
from aiogpu.api.portal.handle import Handle, ResultIterator
from aiogpu.api.portal.loop_thread import (
    Portal,
    blocks_loop,
    close_if_own,
    portal_of_program,
    proxies,
)
from aiogpu.api.portal.proxy import EnteredProxy, Proxy, awaited, call_on, unwrap
from aiogpu.api.usage_errors import SetInItsProcess
from aiogpu.errors import QueueClosedError

if TYPE_CHECKING:
    from aiogpu.core.model.request import PlacementGroupSpec

T = TypeVar("T")
A = TypeVar("A")


# Actors.


class SyncActorHandle(EnteredProxy, SetInItsProcess, Generic[A]):
    """A handle to an actor, in a thread without an event loop.

    Call methods by `handle.method.remote(...)`. `aiogpu.sync.get(handle)` waits until
    the actor is ready. The actor ends when the last handle is dropped; `with` ends it
    at the end of the block, after the calls made so far.
    """

    _target: ActorHandle[A]
    _is_awaited: ClassVar = True

    def __getattr__(self, name: str) -> SyncMethod:
        return SyncMethod(self._portal, self._portal.call(getattr, self._target, name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SyncActorHandle):
            return NotImplemented
        return bool(self._target == other._target)

    def __hash__(self) -> int:
        return hash(self._target)

    def __copy__(self) -> Self:
        return type(self)(self._portal, copy(self._target))

    def __deepcopy__(self, _memo: object) -> Self:
        return copy(self)


class SyncMethod:
    """A method of an actor or a pool; call it by `.remote(...)`."""

    def __init__(self, portal: Portal, method: RemoteMethod | PoolMethod) -> None:
        self._portal = portal
        self._method: Any = method

    def __repr__(self) -> str:
        return repr(self._method)

    def __reduce__(self) -> Any:
        return self._method.__reduce__()  # raises

    def options(self, **options: Any) -> SyncMethod:
        """Return an actor's method with other options; see `aiogpu.method`."""
        return SyncMethod(self._portal, self._method.options(**options))

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method; return a handle at once, or an iterator for a generator."""
        if isinstance(self._method, RemoteMethod):
            return call_method(self._portal, self._method, args, kwargs)
        return call_on(self._portal, self._method.remote, args, kwargs)

    def map(self, iterable: Iterable[Any], /, **options: Any) -> ResultIterator[Any]:
        """Call the method with each item; see `aiogpu.sync.RemoteFunction.map`."""
        return map_on(self._portal, self._method, iterable, options)

    def __call__(self, /, *_args: object, **_kwargs: object) -> Any:
        """Refuse a direct call.

        Raises:
            MisuseError: always, with the call to write instead.
        """
        raise self._method._refusal_without_loop()


class ActorPool(EnteredProxy, SetInItsProcess, Generic[A]):
    """Several actors that are called as one, in a thread without an event loop.

    As `aiogpu.ActorPool`, with blocking calls. `with` waits until the actors are ready,
    and at the end of its block ends the actors that the pool started. The pool has one
    name of its own, `close`; all others are methods of the actors. `for actor in pool`
    iterates over the actors. `aiogpu.util.ActorPool` has the methods of Ray's pool.

    Args:
        actor: a class under `@aiogpu.sync.remote`, a function that starts an actor, or
            a list of actors.
        size: number of actors at first.
        **options: `min_size`, `max_size`, `target`, `idle_after`.

    Raises:
        OptionError: an option is invalid.
        MisuseError: `actor` has another type, or the call was made in a task.

    Example:
        `with ActorPool(Model, 2) as pool: labels = list(pool.classify.map(images))`
    """

    _target: pools.ActorPool[A]

    def __init__(self, actor: Any, size: int | None = None, **options: Any) -> None:
        portal = portal_of_program(
            "aiogpu.sync.ActorPool()",
            "In a task, write the task as `async def` and use aiogpu.ActorPool, or "
            "call the actors one by one.",
        )
        source = getattr(actor, "_wrapped", actor)
        if isinstance(source, list | tuple):
            source = [unwrap(handle) for handle in source]
        elif isinstance(source, FunctionType):
            source = partial(_unwrapped, actor)
        super().__init__(portal, portal.call(pools.ActorPool, source, size, **options))

    def __len__(self) -> int:
        """Return the number of actors, ready or not."""
        return self._portal.call(len, self._target)

    def __iter__(self) -> Iterator[SyncActorHandle[A]]:
        """Iterate over the handles of the actors there are now, ready or not."""
        actors: list[ActorHandle[A]] = self._portal.call(list, self._target)
        return iter([SyncActorHandle(self._portal, actor) for actor in actors])

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> SyncMethod:
        return SyncMethod(self._portal, self._portal.call(getattr, self._target, name))

    close = awaited(pools.ActorPool.aclose, name="close")


def _unwrapped(make: Callable[[], Any]) -> Any:
    """Call a function that starts an actor; return the loop's handle."""
    return unwrap(make())


class Queue(Proxy, Generic[T]):
    """A queue in an actor, in a thread without an event loop; see `aiogpu.Queue`.

    Methods that are awaited there block here. A queue can be an argument of
    `.remote()`.

    Args:
        maxsize: most items; `put` waits while the queue is full; 0 for no limit.
        **options: options of the queue's actor.

    Raises:
        OptionError: an option is invalid.
        MisuseError: the call was made in a task.
    """

    _target: queues.Queue[T]

    def __init__(self, maxsize: int = 0, **options: Any) -> None:
        what = "aiogpu.sync.Queue()"
        portal = portal_of_program(
            what,
            "In a task write aiogpu.Queue(), or pass the queue to the task as an "
            "argument.",
        )
        super().__init__(portal, portal.call(queues.Queue, maxsize, **options))
        portal.run(what, lambda: self._target)

    @classmethod
    def _over(cls, portal: Portal, target: queues.Queue[T]) -> Self:
        """Return a proxy of an existing queue."""
        queue = cls.__new__(cls)
        target._actor = unwrap(target._actor)
        queue._portal, queue._target = portal, target
        return queue

    @property
    def actor(self) -> SyncActorHandle[Any]:
        """The handle of the queue's actor, for `aiogpu.sync.kill`."""
        return SyncActorHandle(self._portal, self._target.actor)

    def __iter__(self) -> Iterator[T]:
        """Take items until the queue is shut down and empty."""
        with suppress(QueueClosedError):
            while True:
                yield self.get()

    def put_batch(self, items: Iterable[T], timeout: float | None = None) -> None:
        """Put several items in by one call, each as soon as there is room."""
        self._put_batch([unwrap(item) for item in items], timeout)

    put = awaited(queues.Queue[T].put)
    put_nowait = awaited(queues.Queue[T].put_nowait)
    _put_batch = awaited(queues.Queue[T].put_batch)
    get = awaited(queues.Queue[T].get, gives_value=True)
    get_nowait = awaited(queues.Queue[T].get_nowait, gives_value=True)
    get_batch = awaited(queues.Queue[T].get_batch, gives_value=True)
    qsize = awaited(queues.Queue[T].qsize)
    empty = awaited(queues.Queue[T].empty)
    full = awaited(queues.Queue[T].full)
    shutdown = awaited(queues.Queue[T].shutdown)


# Reservations.


class _WithFacts(EnteredProxy):
    """A proxy of an object whose plain attributes any thread may read."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a fact about the object."""
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._target, name)


class SyncLease(_WithFacts):
    """A lease, in a thread without an event loop; see `aiogpu.types.Lease`.

    `aiogpu.sync.get(lease)` waits until it is granted, as `with` does.
    """

    _target: reservation.Lease
    _is_awaited: ClassVar = True
    ids: list[int | str]
    accelerators: dict[str, list[int | str]]
    environ: dict[str, str]
    gpu_memory: int
    is_held: bool

    def __reduce__(self) -> Any:
        return self._target.__reduce__()  # raises

    release = awaited(reservation.Lease.release)
    lost = awaited(reservation.Lease.lost)
    why = awaited(reservation.Lease.why)


class SyncPlacement(_WithFacts):
    """A placement group, in a thread without an event loop; see `aiogpu.placement`."""

    _target: reservation.Placement
    _is_awaited: ClassVar = True
    id: str
    name: str
    strategy: str
    bundles: tuple[Mapping[str, float], ...]
    is_ready: bool

    def __reduce__(self) -> Any:
        return self._target.__reduce__()

    def __len__(self) -> int:
        """Return the number of bundles."""
        return len(self._target)

    def placement_group_of(self) -> PlacementGroupSpec:
        """Return the specification, for `options(placement=...)`."""
        return self._target.placement_group_of()

    def ready(self) -> Self:
        """Wait until the group holds all its bundles; return the group."""
        self._portal.run("ready()", self._target.ready)
        return self

    remove = awaited(reservation.Placement.remove)
    why = awaited(reservation.Placement.why)


class SyncGang(EnteredProxy):
    """The ranks of a class, in a thread without an event loop; see `aiogpu.gang`."""

    _target: gangs.Gang

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._target)

    call = awaited(gangs.Gang.call)
    close = awaited(gangs.Gang.close)


# The node.


class SyncNode(_WithFacts):
    """The node of a program without an event loop; `with` closes it."""

    _target: nodes.Node
    is_open: bool
    dashboard_url: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    status = awaited(nodes.Node.status)
    dashboard = awaited(nodes.Node.dashboard)
    why = awaited(nodes.Node.why)
    cluster_resources = awaited(nodes.Node.cluster_resources)
    available_resources = awaited(nodes.Node.available_resources)

    def stack(self, task: int | Handle[Any]) -> str:
        """Return where the code of a running task is; see `aiogpu.types.Node.stack`."""
        number = task.why().task if isinstance(task, Handle) else task
        return self._portal.run("stack()", lambda: self._target.stack(number))

    def shutdown(self, at_once: bool = False) -> None:
        """Close the node: stop its tasks; leave no process or file. Idempotent.

        Ctrl-C during the shutdown ends the tasks at once.

        Args:
            at_once: True to give running tasks no time to stop by themselves.
        """
        portal = self._portal
        if not portal.is_usable:
            return
        if portal.is_here:
            raise blocks_loop("shutdown() in a callback")
        try:
            portal.run("shutdown()", lambda: self._target.shutdown(at_once))
        except KeyboardInterrupt:
            portal.run("shutdown()", lambda: self._target.shutdown(at_once=True))
            raise
        finally:
            close_if_own(portal)


proxies[ActorHandle] = SyncActorHandle
proxies[queues.Queue] = Queue[Any]._over
