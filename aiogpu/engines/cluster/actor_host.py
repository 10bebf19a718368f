"""What Ray makes actors of: it has the user's object, and calls its methods.

A failed constructor is kept and told to whoever calls, with its cause, which Ray itself
would tell in its own words only.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from inspect import iscoroutinefunction, signature
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiogpu.engines import ray
from aiogpu.engines.cluster.failure import TaskFailure, packed
from aiogpu.engines.cluster.host import ClusterHost
from aiogpu.engines.cluster.loops import TaskLoop
from aiogpu.engines.cluster.work import (
    NeedFailedError,
    adopt,
    arguments,
    returned,
    returned_item,
    search_path,
    take_place,
)
from aiogpu.engines.family import host_of_task
from aiogpu.runtime.actor_end import not_made
from aiogpu.wire.acting import DEFAULT_GROUP
from aiogpu.wire.failure import RAISED, UNREADABLE, UNSENDABLE
from aiogpu.wire.payload import load_arguments, load_function, several
from aiogpu.worker.actor import Methods
from aiogpu.worker.context import ActorExit, current

if TYPE_CHECKING:
    from aiogpu.runtime.call import Site

CLOSE_LIMIT: Final = 5.0
"""Seconds for an object's `close()` when its last handle has gone."""


class Blueprint:
    """A class with its options, as it comes to the process of an actor.

    Attributes:
        name: how errors call the actor.
        resources: what it holds.
        limits: by concurrency group, how many coroutines run at once.
        groups: by method, its group, where it is not the default one.
        kinds: the kinds of devices that the cluster has.
    """

    def __init__(self, site: Site, kinds: tuple[str, ...]) -> None:
        assert site.actor is not None, site
        self.name = site.spec.name
        self.resources = dict(site.resources)
        self.limits = dict(site.actor.limits)
        self.groups = dict(site.actor.groups)
        self.kinds = kinds
        self._payload = site.function.payload
        self._places = search_path()

    def __repr__(self) -> str:
        return f"<Blueprint {self.name}>"

    def load(self) -> Any:
        """The class; raises whatever unpickling it raises."""
        adopt(self._places)
        return load_function(self._payload)


class _Stage:
    """The user's object, or why there is none, and what its code finds around it."""

    _name = "actor"
    # Ray asks for its `repr` where an argument has failed, and this never runs.

    def __init__(self, blueprint: Blueprint, given: Sequence[Any]) -> None:
        self._name = blueprint.name
        self._failure: TaskFailure | None = None
        self._host = ClusterHost(TaskLoop())
        self._object: Any = None
        self._groups = blueprint.groups
        take_place(blueprint.name, blueprint.resources, blueprint.kinds)
        current.is_actor = True
        host_of_task.set(self._host)
        kind = UNREADABLE
        try:
            made = blueprint.load()
            head, places, _, *values = (*given, (), 0)[: max(3, len(given))]
            args, kwargs = load_arguments(arguments(head, places, 0, values))
            kind = RAISED
            self._object = made(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - foreign code may raise anything
            failed = _failure(kind, error).failed
            self._failure = TaskFailure(*not_made(self._name, failed))
        self._methods = Methods(self._object)

    def __repr__(self) -> str:
        return f"<actor {self._name}>"

    def _begin(self) -> None:
        host_of_task.set(self._host)
        if self._failure is not None:
            raise self._failure

    def _called(self, method: str, given: Sequence[Any]) -> tuple[Any, bytes]:
        """Call a method; gives what it has given, and the arguments' payload."""
        kind = UNREADABLE
        try:
            head, places, returns, *values = (*given, (), 0)[: max(3, len(given))]
            payload = arguments(head, places, returns, values)
            found = self._methods[method]
            args, kwargs = self._host.opened(found, payload, load_arguments)
            kind = RAISED
            return found(*args, **kwargs), payload
        except ActorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise _failure(kind, error) from None

    def _returned(self, value: Any, payload: bytes) -> Any:
        kind = RAISED
        try:
            found = several(value, payload)
            kind = UNSENDABLE
            return returned(found)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise _failure(kind, error) from None

    def _drop(self) -> None:
        """Let go of the object, so that it may still do what it does at its end."""
        self._object, self._methods = None, Methods(None)
        gc.collect()

    def __ray_shutdown__(self) -> None:
        """Ray ends this process in an orderly way."""
        self._drop()


class PlainHost(_Stage):
    """An actor whose methods are plain: one at a time, or each in a thread."""

    def __init__(self, blueprint: Blueprint, *given: Any) -> None:
        super().__init__(blueprint, given)
        self._is_threaded = len(blueprint.limits) > 1

    def ready(self) -> None:
        """The constructor has returned; raises why not."""
        self._begin()

    def call(self, method: str, *given: Any) -> Any:
        """Call a method of the object."""
        self._begin()
        if self._is_threaded:
            # Ray's threads have no names of their own, which logs would show.
            group = self._groups.get(method, DEFAULT_GROUP)
            threading.current_thread().name = f"aiogpu-{group}"
        try:
            return self._returned(*self._called(method, given))
        except ActorExit:
            _leave()

    def pour(self, method: str, *given: Any) -> Iterator[Any]:
        """The same for a generator."""
        self._begin()
        items, _ = self._called(method, given)
        kind = RAISED
        try:
            for place, item in enumerate(items, 1):
                kind = UNSENDABLE
                yield returned_item(place, item)
                kind = RAISED
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise _failure(kind, error) from None

    def leave(self) -> None:
        """End, after all that was sent before."""
        _leave()


class SoftHost(_Stage):
    """An actor with coroutine methods, which interleave on Ray's event loop."""

    def __init__(self, blueprint: Blueprint, *given: Any) -> None:
        super().__init__(blueprint, given)
        self._running = 0
        self._quiet: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._rooms: dict[str, AbstractAsyncContextManager[Any]] = {}
        if len(blueprint.limits) > 1:
            limits = blueprint.limits.items()
            self._rooms = {name: asyncio.Semaphore(most) for name, most in limits}

    async def interleaves(self) -> bool:
        """True; that an actor has this method tells its handles so."""
        return True

    def _room(self, method: str) -> AbstractAsyncContextManager[Any]:
        """A place in the method's group; Ray sees to it where there is one group."""
        group = self._groups.get(method, DEFAULT_GROUP)
        return self._rooms.get(group) or nullcontext()

    async def ready(self) -> None:
        """The constructor has returned; raises why not."""
        self._loop = asyncio.get_running_loop()
        self._begin()

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the object."""
        self._begin()
        self._running += 1
        try:
            async with self._room(method):
                value, payload = self._called(method, given)
                if type(value) is CoroutineType:
                    value = await _awaited(value)
                return self._returned(value, payload)
        except ActorExit:
            _leave()
        finally:
            self._end()

    async def pour(self, method: str, *given: Any) -> AsyncIterator[Any]:
        """The same for a generator of either kind."""
        self._begin()
        self._running += 1
        kind = RAISED
        try:
            async with self._room(method):
                items, _ = self._called(method, given)
                place = 0
                async for item in _each(items):
                    kind, place = UNSENDABLE, place + 1
                    yield returned_item(place, item)
                    kind = RAISED
        except (GeneratorExit, asyncio.CancelledError, TaskFailure):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise _failure(kind, error) from None
        finally:
            self._end()

    def _end(self) -> None:
        self._running -= 1
        if self._quiet is not None and not self._running:
            self._quiet.set()

    async def leave(self) -> None:
        """End, after all that was sent before, and the object's own `close()`."""
        if self._running:
            self._quiet = asyncio.Event()
            await self._quiet.wait()
        await self._close()
        self._drop()
        _leave()

    async def _close(self) -> None:
        """The object's own `close()`, once."""
        host_of_task.set(self._host)
        close = getattr(self._object, "close", None)
        is_closed, self._is_closed = self._is_closed, True
        if is_closed or not iscoroutinefunction(close) or signature(close).parameters:
            return
        try:
            await close()
        except BaseException:  # noqa: BLE001 - whatever it is, the actor ends
            sys.excepthook(*sys.exc_info())

    def __ray_shutdown__(self) -> None:
        """Ray ends this process in an orderly way: its last handle has gone."""
        loop = self._loop
        # Ray has stopped it by now, and leaves it as it is.
        if loop is not None and not loop.is_running() and not loop.is_closed():
            with suppress(TimeoutError):
                loop.run_until_complete(asyncio.wait_for(self._close(), CLOSE_LIMIT))
        super().__ray_shutdown__()


async def _awaited(value: Any) -> Any:
    task = asyncio.current_task()
    try:
        return await value
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise _failure(RAISED, error) from None
    except ActorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
        raise _failure(RAISED, error) from None


async def _each(items: Any) -> AsyncIterator[Any]:
    if hasattr(items, "__anext__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _failure(kind: str, error: BaseException) -> TaskFailure:
    if isinstance(error, TaskFailure):
        return error
    if isinstance(error, NeedFailedError):
        return TaskFailure(*error.fields)
    return packed(kind, error)


def _leave() -> NoReturn:
    ray.exit_actor()
    raise ActorExit  # it has raised by now
