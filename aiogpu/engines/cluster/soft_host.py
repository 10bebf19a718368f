"""What Ray makes actors of whose methods are coroutines: they interleave on its loop.

Ray begins their calls as they come. Here they are begun in the order of each caller,
and as many as may run at once; see `turns`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property
from inspect import iscoroutinefunction, signature
from types import CoroutineType
from typing import Any, Final, NoReturn

from aiogpu.client.current import ActorExit, host_of_task
from aiogpu.engines import ray
from aiogpu.engines.cluster.actor_host import (
    Blueprint,
    Place,
    Stage,
    failure,
    leave_now,
    raise_exit,
)
from aiogpu.engines.cluster.failure import TaskFailure
from aiogpu.engines.cluster.spoken import understood
from aiogpu.engines.cluster.turns import Turns
from aiogpu.engines.cluster.work import returned_item
from aiogpu.runtime.actors.actor import died
from aiogpu.serialization.exceptions import RAISED, UNSENDABLE, pack_own_error
from aiogpu.wire.messages import DEFAULT_GROUP

CLOSE_LIMIT: Final = 5.0
"""Seconds for an object's `close()` when its last handle has gone, and for calls to
end that are cancelled as another ends the actor."""


class SoftHost(Stage):
    """See above."""

    def __init__(self, blueprint: Blueprint, *given: Any) -> None:
        super().__init__(blueprint, given)
        self._present = 0
        self._running: set[_Visit] = set()
        self._quiet: asyncio.Event | None = None
        self._ended: TaskFailure | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        limits = blueprint.limits.items()
        self._rooms = {name: asyncio.Semaphore(most) for name, most in limits}
        self._turns = Turns()

    async def ready(self) -> Place:
        """The constructor has returned, in this place; raises why not."""
        self.listen()
        self._begin()
        return self._place

    def listen(self) -> None:
        """Hear of cancelled calls, from the first one on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._cancels.fileno() >= 0:
                self._loop.add_reader(self._cancels.fileno(), self._hear)

    def _hear(self) -> None:
        if self._cancels.take():
            for visit in list(self._running):
                if self._cancels.forget(visit.call):
                    visit.cancel()

    async def enter(self, visit: _Visit) -> None:
        """Wait until a call may begin; raises `TaskFailure` if it never may."""
        self._present += 1
        await self._turns.come(visit.number)
        self._begin()
        await visit.room.acquire()
        visit.has_room = True
        if self._ended is not None:
            raise self._ended
        if self._cancels.has():
            raise self._stopped()
        self._running.add(visit)

    def leave_call(self, visit: _Visit) -> TaskFailure:
        """A call has ended; gives what is told of it if its code was cancelled."""
        self._running.discard(visit)
        if visit.has_room:
            visit.room.release()
        self._present -= 1
        if self._quiet is not None and not self._present:
            self._quiet.set()
        return self._ended or self._stopped()

    def _visit(self, number: int, method: str) -> _Visit:
        self.listen()
        room = self._rooms[self._groups.get(method, DEFAULT_GROUP)]
        return _Visit(self, number, room)

    async def call(self, said: bytes, *given: Any) -> Any:
        """Call a method of the object."""
        number, method, payload = understood(said)
        try:
            async with self._visit(number, method):
                value, payload = self._called(method, payload, given)
                if type(value) is CoroutineType:
                    value = await _awaited(value)
                return self._returned(value, payload)
        except ActorExit:
            await self._exit()

    async def _exit(self) -> NoReturn:
        """A call ends the actor: others are cancelled, and told so."""
        error = died(self._name, "a call ended it by exit_actor().")
        self._ended = TaskFailure(*pack_own_error(error))
        for visit in list(self._running):
            visit.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._until_quiet(), CLOSE_LIMIT)
        leave_now()

    async def _until_quiet(self) -> None:
        if self._present:
            self._quiet = self._quiet or asyncio.Event()
            await self._quiet.wait()

    async def pour(self, said: bytes, *given: Any) -> AsyncIterator[Any]:
        """The same for a generator of either kind."""
        number, method, payload = understood(said)
        kind = RAISED
        try:
            async with self._visit(number, method):
                items, _ = self._called(method, payload, given)
                place = 0
                async for item in _each(items):
                    kind, place = UNSENDABLE, place + 1
                    yield returned_item(place, item)
                    kind = RAISED
        except (GeneratorExit, asyncio.CancelledError, TaskFailure):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise failure(kind, error) from None

    async def leave(self, number: int) -> None:
        """End, after all that was sent before, and the object's own `close()`."""
        await self._turns.come(number)
        await self._until_quiet()
        await self._close()
        self._drop()
        leave_now()

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


class _Visit:
    """One call, for as long as it is in the actor.

    Attributes:
        number: its caller's; see `turns`.
        room: has a place for each call of its group that may run.
        has_room: whether it has one of these.
    """

    def __init__(self, host: SoftHost, number: int, room: asyncio.Semaphore) -> None:
        self.number = number
        self.room = room
        self.has_room = False
        self._host = host
        self._context = copy_context()
        self._task = asyncio.current_task()
        self._is_cancelled = False

    @cached_property
    def call(self) -> bytes:
        """Ray's id of it, which is asked for when one was cancelled."""
        return bytes.fromhex(self._context.run(ray.task_id))

    def cancel(self) -> None:
        """Have its code cancelled where it waits."""
        assert self._task is not None, self
        self._is_cancelled = True
        self._task.cancel()

    async def __aenter__(self) -> None:
        try:
            await self._host.enter(self)
        except BaseException:
            self._host.leave_call(self)
            raise

    async def __aexit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        told = self._host.leave_call(self)
        if self._is_cancelled and isinstance(error, asyncio.CancelledError):
            assert self._task is not None, self
            self._task.uncancel()
            raise told from None


async def _awaited(value: Any) -> Any:
    task = asyncio.current_task()
    try:
        result = await value
        raise_exit()
        return result
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise failure(RAISED, error) from None
    except ActorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
        raise_exit()
        raise failure(RAISED, error) from None


async def _each(items: Any) -> AsyncIterator[Any]:
    if hasattr(items, "__anext__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
