"""The process of an actor: it has the user's object, and calls its methods.

A failed constructor is kept and told to whoever calls, with its cause, which Ray itself
would tell in its own words only.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from inspect import iscoroutinefunction, signature
from itertools import count
from types import CoroutineType
from typing import Any, Final, NoReturn

from aiogpu.client.current import (
    ActorExit,
    current,
    has_exited,
    host_of_task,
    method_called,
)
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.errors import TaskFailure, cancelled, pack_error
from aiogpu.engines.ray.task_worker import (
    RemoteCode,
    TaskClient,
    TaskLoop,
    pack_item,
    pack_result,
    release_pickled_handles,
    set_up_process,
)
from aiogpu.engines.ray.values import from_arguments
from aiogpu.runtime.actors.actor import died, not_made
from aiogpu.serialization.exceptions import (
    RAISED,
    UNREADABLE,
    UNSENDABLE,
    pack_own_error,
)
from aiogpu.serialization.serializer import load_arguments, split_results
from aiogpu.wire.messages import DEFAULT_GROUP
from aiogpu.worker.actor import Methods

Place = tuple[str, int]
"""The node and the process of an actor."""
CLOSE_LIMIT: Final = 5.0
"""Seconds for an object's `close()` when its last handle has gone, and for the end of
calls that are cancelled because another one ends the actor."""

STRAGGLE: Final = 0.05
"""Seconds in which a call comes that was sent before: Ray keeps their order nearly."""

# Messages to an actor's process


def encode_call(method: bytes, payload: bytes = b"") -> bytes:
    """Return a call in one piece, with its arguments if they are a plain pickle.

    Ray carries bytes as they are. Of any other argument it makes a pickle of its own,
    which costs a small call more than the call itself.
    """
    return b"%b\0%b" % (method, payload)


def decode_call(encoded: bytes) -> tuple[str, bytes]:
    """Return the method and the payload of a call."""
    method, _, payload = encoded.partition(b"\0")
    return method.decode(), payload


ID_SIZE: Final = 24
"""Bytes of Ray's id of a call."""
MAX_IDS: Final = 1000
"""Ids in one message."""
KEPT_IDS: Final = 100_000
"""Ids of cancelled calls that are kept; those of calls that have ended never come."""
SEND_LIMIT: Final = 1.0
"""Seconds for a process to take a message."""


def _cancel_address(actor: str) -> str:
    """Return the name of an actor's socket, which stands for no file."""
    return f"\0aiogpu/{actor}"


def send_cancels(actor: str, calls: bytes, seconds: float = SEND_LIMIT) -> bool:
    """Tell an actor's process that calls are cancelled; False if it is not here.

    Raises:
        TimeoutError: it has not taken the message in so many seconds.
        BlockingIOError: it has not taken it at once, and `seconds` is 0.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(seconds)
        try:
            sender.sendto(calls, _cancel_address(actor))
        except ConnectionRefusedError:
            return False
    return True


class CancelReceiver:
    """The cancelled calls of an actor, in its process.

    Ray 2.60 loses an actor's order where a call of a plain method is cancelled that
    waits. So calls are cancelled past Ray: their ids come to a socket, and the process
    does not begin them. The socket has a name and no file, so that nothing of it is
    left, whatever ends the process.
    """

    def __init__(self, actor: str) -> None:
        self._ids: dict[bytes, None] = {}
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Another process of the same actor may not quite have ended.
        with suppress(OSError):
            self._socket.bind(_cancel_address(actor))

    def __repr__(self) -> str:
        return f"<CancelReceiver {len(self._ids)}>"

    def start(self, on_cancel: Callable[[], object]) -> None:
        """Receive in a thread, since no call may run for long; `on_cancel` follows."""
        receive = threading.Thread(target=self._run, args=(on_cancel,), daemon=True)
        receive.start()

    def _run(self, on_cancel: Callable[[], object]) -> None:
        while True:
            self._receive(0)
            with suppress(RuntimeError):  # the loop is closed
                on_cancel()

    def _receive(self, flags: int) -> None:
        """Take a message, if it is of this user."""
        size = socket.CMSG_SPACE(12)  # process, user and group of the sender
        message, ancillary, _, _ = self._socket.recvmsg(ID_SIZE * MAX_IDS, size, flags)
        for _level, _kind, data in ancillary:
            if int.from_bytes(data[4:8], sys.byteorder) != os.getuid():
                return
        with self._lock:
            for start in range(0, len(message), ID_SIZE):
                self._ids[message[start : start + ID_SIZE]] = None
            while len(self._ids) > KEPT_IDS:
                del self._ids[next(iter(self._ids))]

    def is_cancelled(self) -> bool:
        """Return whether the call that is about to begin was cancelled."""
        with suppress(BlockingIOError):
            while True:  # what the thread has not received yet
                self._receive(socket.MSG_DONTWAIT)
        return bool(self._ids) and self.take(running_call())

    def take(self, call: bytes) -> bool:
        """Return whether a call was cancelled; True once."""
        with self._lock:
            return self._ids.pop(call, self) is None


def running_call() -> bytes:
    """Return Ray's id of the call that runs here."""
    return bytes.fromhex(cluster.task_id())


# The object and its calls


class ActorProcess:
    """The user's object, or why there is none, and the context of its code."""

    _name = "actor"
    # Ray asks for the `repr` if an argument has failed, and this never runs.

    def __init__(self, code: RemoteCode, given: Sequence[Any]) -> None:
        self._name = code.name
        own_id = cluster.process_ids()[2]
        self._cancels = CancelReceiver(own_id)
        self._failure: TaskFailure | None = None
        self._client = TaskClient(code.make_engine, TaskLoop(is_of_actor=True))
        self._object: Any = None
        self._groups = code.groups
        set_up_process(code.name, code.resources)
        self._place: Place = current.node, os.getpid()
        current.actor = int(own_id[:12], 16)
        host_of_task.set(self._client)
        kind = UNREADABLE
        try:
            made = code.load()
            args, kwargs = load_arguments(from_arguments(*given))
            kind = RAISED
            self._object = made(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - foreign code may raise anything
            failed = pack_error(kind, error).failed
            self._failure = TaskFailure(*not_made(self._name, failed))
        release_pickled_handles()
        self._methods = Methods(self._object)

    def __repr__(self) -> str:
        return f"<actor {self._name}>"

    def _begin(self) -> None:
        host_of_task.set(self._client)
        if self._failure is not None:
            raise self._failure

    def _call(
        self, method: str, payload: bytes, given: Sequence[Any]
    ) -> tuple[Any, bytes]:
        """Call a method; return its value, and the arguments' payload."""
        kind = UNREADABLE
        method_called.set(method)
        try:
            function = self._methods[method]
            if given:
                payload = from_arguments(*given)
                args, kwargs = self._client.load(function, payload)
            else:
                args, kwargs = load_arguments(payload)
            kind = RAISED
            value = function(*args, **kwargs)
            raise_exit()
            return value, payload
        except ActorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise_exit()
            raise pack_error(kind, error) from None

    def _pack(self, value: Any, payload: bytes) -> Any:
        kind = RAISED
        try:
            results = split_results(value, payload)
            kind = UNSENDABLE
            return pack_result(results)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise pack_error(kind, error) from None

    def _drop(self) -> None:
        """Release the object, so that its own cleanup runs."""
        self._object, self._methods = None, Methods(None)
        gc.collect()

    def __ray_shutdown__(self) -> None:
        """End in order, as Ray asks when the last handle has gone."""
        self._drop()


class PlainActorProcess(ActorProcess):
    """An actor whose methods are plain: one at a time, or each in a thread."""

    def __init__(self, code: RemoteCode, *given: Any) -> None:
        self._leaving = count(1)
        super().__init__(code, given)
        self._is_threaded = len(code.limits) > 1
        self._cancels.start(lambda: None)

    def ready(self) -> Place:
        """Return where the actor is, once its constructor has returned."""
        self._begin()
        return self._place

    def call(self, encoded: bytes, *given: Any) -> Any:
        """Call a method of the object."""
        self._begin()
        method, payload = decode_call(encoded)
        if self._is_threaded:
            # Ray's threads have no names of their own, which logs would show.
            group = self._groups.get(method, DEFAULT_GROUP)
            threading.current_thread().name = f"aiogpu-{group}"
        if self._cancels.is_cancelled():
            raise cancelled(self._name)
        try:
            return self._pack(*self._call(method, payload, given))
        except ActorExit:
            leave_now()
        finally:
            release_pickled_handles()

    def stream(self, encoded: bytes, *given: Any) -> Iterator[Any]:
        """Call a method that is a generator."""
        self._begin()
        method, payload = decode_call(encoded)
        if self._cancels.is_cancelled():
            raise cancelled(self._name)
        items, _ = self._call(method, payload, given)
        kind = RAISED
        try:
            for place, item in enumerate(items, 1):
                kind = UNSENDABLE
                yield pack_item(place, item)
                kind = RAISED
                if self._cancels.is_cancelled():
                    items.close()
                    return
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise pack_error(kind, error) from None
        finally:
            release_pickled_handles()

    def leave(self, groups: int) -> None:
        """End after what was sent before; each of so many groups is told."""
        if next(self._leaving) >= groups:
            leave_now()


class AsyncActorProcess(ActorProcess):
    """An actor whose methods are coroutines, which interleave on Ray's loop.

    Ray begins their calls as they come. The limits of concurrency groups are kept here.
    """

    def __init__(self, code: RemoteCode, *given: Any) -> None:
        super().__init__(code, given)
        self._running: dict[asyncio.Task[Any], Context] = {}
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

    def _begin(self) -> None:
        if self._loop is None:
            self._loop = loop = asyncio.get_running_loop()
            self._cancels.start(lambda: loop.call_soon_threadsafe(self._cancel_calls))
        super()._begin()

    def _cancel_calls(self) -> None:
        # Ray's id of a call is asked for only here: it costs a call more than the rest.
        for task, context in self._running.items():
            if self._cancels.take(context.run(running_call)):
                task.cancel()

    @asynccontextmanager
    async def _place_of(self, method: str) -> AsyncIterator[None]:
        """Run the block as a call of a method, when its group has a place."""
        self._present += 1
        task = asyncio.current_task()
        assert task is not None, self
        try:
            self._begin()
            async with self._places[self._groups.get(method, DEFAULT_GROUP)]:
                if self._ended is not None:
                    raise self._ended
                if self._cancels.is_cancelled():
                    raise cancelled(self._name)
                self._running[task] = copy_context()
                try:
                    yield
                finally:
                    del self._running[task]
        except asyncio.CancelledError:
            if not task.uncancel():
                raise (self._ended or cancelled(self._name)) from None
            raise
        finally:
            self._present -= 1
            if not self._present:
                self._is_idle.set()

    async def call(self, encoded: bytes, *given: Any) -> Any:
        """Call a method of the object."""
        method, payload = decode_call(encoded)
        try:
            async with self._place_of(method):
                value, payload = self._call(method, payload, given)
                if type(value) is CoroutineType:
                    value = await _result_of(value)
                return self._pack(value, payload)
        except ActorExit:
            await self._exit()

    async def stream(self, encoded: bytes, *given: Any) -> AsyncIterator[Any]:
        """Call a method that is a generator of either kind."""
        method, payload = decode_call(encoded)
        kind = RAISED
        try:
            async with self._place_of(method):
                items, _ = self._call(method, payload, given)
                place = 0
                async for item in _iterate(items):
                    kind, place = UNSENDABLE, place + 1
                    yield pack_item(place, item)
                    kind = RAISED
        except (GeneratorExit, asyncio.CancelledError, TaskFailure):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise pack_error(kind, error) from None

    async def _exit(self) -> NoReturn:
        """End the actor from a call: others are cancelled, and told so."""
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

    async def leave(self) -> None:
        """End after the calls that were sent before, and the object's own `close()`."""
        while self._present:
            await self._until_idle()
            await asyncio.sleep(STRAGGLE)
        await self._close()
        self._drop()
        leave_now()

    async def _close(self) -> None:
        """Await the object's own `close()`, once."""
        host_of_task.set(self._client)
        close = getattr(self._object, "close", None)
        is_closed, self._is_closed = self._is_closed, True
        if is_closed or not iscoroutinefunction(close) or signature(close).parameters:
            return
        try:
            await close()
        except BaseException:  # noqa: BLE001 - whatever it is, the actor ends
            sys.excepthook(*sys.exc_info())

    def __ray_shutdown__(self) -> None:
        """End in order, as Ray asks when the last handle has gone."""
        loop = self._loop
        # Ray has stopped the loop by now, and leaves it as it is.
        if loop is not None and not loop.is_running() and not loop.is_closed():
            with suppress(TimeoutError):
                loop.run_until_complete(asyncio.wait_for(self._close(), CLOSE_LIMIT))
        super().__ray_shutdown__()


async def _result_of(coroutine: Any) -> Any:
    task = asyncio.current_task()
    try:
        result = await coroutine
        raise_exit()
        return result
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise pack_error(RAISED, error) from None
    except ActorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
        raise_exit()
        raise pack_error(RAISED, error) from None


async def _iterate(items: Any) -> AsyncIterator[Any]:
    if hasattr(items, "__anext__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def raise_exit() -> None:
    """End the actor if its method called `exit_actor()` and swallowed the exception."""
    if current.exits and has_exited():
        raise ActorExit


def leave_now() -> NoReturn:
    """End the actor's process, once this call has ended."""
    cluster.exit_actor()
    raise ActorExit  # it has raised by now
