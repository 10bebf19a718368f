"""The process of an actor: holds the user's object and calls its methods.

The failure of a constructor is kept and reported to every caller, with its cause. Ray
itself would report only a text.
"""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction, signature
from itertools import count
from typing import Any, Final, NoReturn

from aiogpu.client.current import (
    ActorExit,
    current,
    has_exited,
    method_called,
)
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.cluster import Ref
from aiogpu.engines.ray.errors import TaskFailure, cancelled
from aiogpu.engines.ray.task_worker import (
    RemoteCode,
    Suspended,
    call_user,
    result_of,
    set_up_process,
)
from aiogpu.engines.ray.values import StoredValue
from aiogpu.runtime.actors.actor import died, not_made
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.wire.messages import DEFAULT_GROUP, Done
from aiogpu.worker.actors import Methods
from aiogpu.worker.invoke import Constructor, Raised, run_now

Place = tuple[str, int]
"""The node and the process of an actor."""
CLOSE_LIMIT: Final = 5.0
"""Seconds for an object's `close()` after its last handle has gone, and for the end of
calls that are cancelled because another call ends the actor."""

# Encoded calls

_HEAD: Final = struct.Struct(">H")
"""Length of the name of a call's method."""


def encode_call(method: bytes, payload: bytes = b"") -> bytes:
    """Encode a call as bytes, with its arguments if they are a plain pickle.

    Ray sends bytes unchanged. It pickles any other argument, which takes longer than a
    small call itself.
    """
    return b"".join((_HEAD.pack(len(method)), method, payload))


def decode_call(encoded: bytes) -> tuple[str, bytes]:
    """Return the method and the payload of a call."""
    (length,) = _HEAD.unpack_from(encoded)
    end = _HEAD.size + length
    return encoded[_HEAD.size : end].decode(), encoded[end:]


# The object and its calls


class ActorProcess:
    """The user's object or its constructor's failure, and the context of its code."""

    _name = "actor"
    # A class attribute, since Ray calls `repr` even if `__init__` never runs, after the
    # failure of an argument.

    def __init__(self, code: RemoteCode, arguments: Sequence[Any]) -> None:
        self._name = code.name
        self._failure: TaskFailure | None = None
        self._object: Any = None
        self._groups = code.groups
        set_up_process(code)
        self._place: Place = current.node, os.getpid()
        current.actor = int(cluster.process_ids()[2][:12], 16)
        constructor = Constructor(code.functions, self._keep)
        try:
            call = call_user(constructor, 0, arguments)
            result_of(self._name, run_now(call))
        except TaskFailure as failure:
            self._failure = TaskFailure(*not_made(self._name, failure.failed))
        self._methods = Methods(self._object)

    def _keep(self, made: object) -> None:
        self._object = made

    def __repr__(self) -> str:
        return f"<actor {self._name}>"

    def _begin(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _invoke(
        self, method: str, arguments: Sequence[Any], *, is_stream: bool = False
    ) -> Coroutine[Any, Any, Done | Raised]:
        """Return the coroutine that calls a method; see `call_user`."""
        method_called.set((method, 0))
        return call_user(self._methods, method, arguments, is_stream=is_stream)

    def _drop(self) -> None:
        """Release the object, so that its own cleanup runs."""
        self._object, self._methods = None, Methods(None)
        gc.collect()

    def __ray_shutdown__(self) -> None:
        """End in an orderly way, when Ray reports that the last handle has gone."""
        self._drop()


class PlainActorProcess(ActorProcess):
    """An actor whose methods are plain: one at a time, or each in a thread."""

    def __init__(self, code: RemoteCode, *arguments: Any) -> None:
        self._leaving = count(1)
        super().__init__(code, arguments)
        self._is_threaded = len(code.limits) > 1

    def ready(self) -> Place:
        """Return where the actor is, once its constructor has returned."""
        self._begin()
        return self._place

    def call(self, encoded: bytes, *arguments: Any) -> Any:
        """Call a method of the object."""
        self._begin()
        method, payload = decode_call(encoded)
        if self._is_threaded:
            # Ray's threads have no names, which logs would show.
            group = self._groups.get(method, DEFAULT_GROUP)
            threading.current_thread().name = f"aiogpu-{group}"
        outcome = run_now(self._invoke(method, arguments or (payload,)))
        if has_left(outcome):
            leave_now()
        return result_of(self._name, outcome)

    def stream(self, encoded: bytes, *arguments: Any) -> Iterator[Any]:
        """Call a method that is a generator; end it after an item if it is cancelled.

        Ray does not interrupt plain methods. It only marks the call as cancelled.
        """
        self._begin()
        method, payload = decode_call(encoded)
        call = self._invoke(method, arguments or (payload,), is_stream=True)
        items = call.__await__()
        try:
            while not cluster.is_cancelled():
                yield next(items)
        except StopIteration as ended:
            result_of(self._name, ended.value)
        finally:
            items.close()

    def leave(self, groups: int) -> None:
        """End after the calls sent before; each concurrency group gets a message."""
        if next(self._leaving) >= groups:
            leave_now()


class AsyncActorProcess(ActorProcess):
    """An actor whose methods are coroutines, which interleave on Ray's loop.

    This class enforces the limits of concurrency groups.
    """

    def __init__(self, code: RemoteCode, *arguments: Any) -> None:
        super().__init__(code, arguments)
        self._running: set[asyncio.Task[Any]] = set()
        self._present = 0
        self._is_idle = asyncio.Event()
        self._ended: TaskFailure | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        limits = code.limits.items()
        self._places = {name: asyncio.Semaphore(most) for name, most in limits}

    async def ready(self) -> Place:
        """Return where the actor is, once its constructor has returned."""
        self._begin()
        return self._place

    @asynccontextmanager
    async def _place_of(self, method: str) -> AsyncIterator[None]:
        """Run the block as a call of a method, within its group's limit."""
        self._present += 1
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, self
        try:
            self._begin()
            async with self._places[self._groups.get(method, DEFAULT_GROUP)]:
                if self._ended is not None:
                    raise self._ended
                self._running.add(task)
                try:
                    yield
                finally:
                    self._running.discard(task)
        finally:
            self._present -= 1
            if not self._present:
                self._is_idle.set()

    def _result_of(self, outcome: Done | Raised) -> Any:
        """Return the value that Ray stores for an outcome; see `result_of`."""
        if type(outcome) is Raised and type(outcome.error) is asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise self._ended or cancelled(self._name)
        return result_of(self._name, outcome)

    async def call(self, encoded: bytes, *arguments: Any) -> Any:
        """Call a method of the object."""
        method, payload = decode_call(encoded)
        async with self._place_of(method):
            outcome = await self._invoke(method, arguments or (payload,))
        if has_left(outcome):
            await self._exit()
        return self._result_of(outcome)

    async def stream(self, encoded: bytes, *arguments: Any) -> AsyncIterator[Any]:
        """Call a method that is a plain or async generator.

        `invoke` suspends with an item, or with a future for the loop.
        """
        method, payload = decode_call(encoded)
        async with self._place_of(method):
            running = self._invoke(method, arguments or (payload,), is_stream=True)
            go_on = partial(running.send, None)
            while True:
                try:
                    suspended = go_on()
                except StopIteration as ended:
                    outcome: Done | Raised = ended.value
                    break
                go_on = partial(running.send, None)
                try:
                    if isinstance(suspended, bytes | StoredValue):
                        yield suspended
                    else:
                        await Suspended(suspended)
                except BaseException as error:  # noqa: BLE001 - thrown into the generator
                    go_on = partial(running.throw, error)
        if type(outcome) is Raised and type(outcome.error) is GeneratorExit:
            return
        self._result_of(outcome)

    async def _exit(self) -> NoReturn:
        """End the actor from a call; its other calls are cancelled."""
        error = died(self._name, "a call ended it by exit_actor().")
        self._ended = TaskFailure(*pack_own_error(error))
        for task in self._running:
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._until_idle(), CLOSE_LIMIT)
        leave_now()

    async def _until_idle(self) -> None:
        while self._present:
            self._is_idle.clear()
            await self._is_idle.wait()

    async def leave(self, sent: Sequence[Ref]) -> None:
        """End after the caller's calls, and the object's own `close()`.

        Ray does not start calls of coroutines exactly in the order of sending. So this
        call may start before calls that were sent earlier.

        Args:
            sent: objects of the calls that have not ended.
        """
        await asyncio.to_thread(cluster.wait_for_all, sent)
        await self._until_idle()
        await self._close()
        self._drop()
        leave_now()

    async def _close(self) -> None:
        """Await the object's own `close()`, once."""
        close = getattr(self._object, "close", None)
        is_closed, self._is_closed = self._is_closed, True
        if is_closed or not iscoroutinefunction(close) or signature(close).parameters:
            return
        try:
            await close()
        except BaseException:  # noqa: BLE001 - the actor ends in any case
            sys.excepthook(*sys.exc_info())

    def __ray_shutdown__(self) -> None:
        """End in an orderly way, when Ray reports that the last handle has gone."""
        loop = self._loop
        # Ray has stopped the loop by now, but has not closed it.
        if loop is not None and not loop.is_running() and not loop.is_closed():
            with suppress(TimeoutError):
                loop.run_until_complete(asyncio.wait_for(self._close(), CLOSE_LIMIT))
        super().__ray_shutdown__()


def has_left(outcome: Done | Raised) -> bool:
    """Return whether a call has ended its actor by `exit_actor()`."""
    return type(outcome) is Raised and (
        bool(current.exits and has_exited()) or type(outcome.error) is ActorExit
    )


def leave_now() -> NoReturn:
    """End the actor's process, once this call has ended."""
    cluster.exit_actor()
    raise ActorExit  # never reached: `exit_actor` raises
