"""The process of an actor: it has the user's object, and calls its methods.

A failed constructor is kept and told to whoever calls, with its cause, which Ray itself
would tell in its own words only.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
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
from aiogpu.engines.ray import cluster, task_worker
from aiogpu.engines.ray.cluster import Ref
from aiogpu.engines.ray.errors import TaskFailure, cancelled
from aiogpu.engines.ray.task_worker import TaskClient, TaskLoop, failures, interrupts
from aiogpu.engines.ray.values import from_arguments
from aiogpu.runtime.actors.actor import died, not_made
from aiogpu.serialization.exceptions import RAISED, UNSENDABLE, pack_own_error
from aiogpu.serialization.serializer import load_arguments
from aiogpu.wire.messages import DEFAULT_GROUP
from aiogpu.worker.actors import Methods

Place = tuple[str, int]
"""The node and the process of an actor."""
CLOSE_LIMIT: Final = 5.0
"""Seconds for an object's `close()` when its last handle has gone, and for the end of
calls that are cancelled because another one ends the actor."""

# Messages to an actor's process

_HEAD: Final = struct.Struct(">H")
"""The bytes of the name of a call's method."""


def encode_call(method: bytes, payload: bytes = b"") -> bytes:
    """Return a call in one piece, with its arguments if they are a plain pickle.

    Ray carries bytes as they are. Of any other argument it makes a pickle of its own,
    which costs a small call more than the call itself.
    """
    return b"".join((_HEAD.pack(len(method)), method, payload))


def decode_call(encoded: bytes) -> tuple[str, bytes]:
    """Return the method and the payload of a call."""
    (length,) = _HEAD.unpack_from(encoded)
    end = _HEAD.size + length
    return encoded[_HEAD.size : end].decode(), encoded[end:]


ID_SIZE: Final = 24
"""Bytes of Ray's id of a call."""
MAX_IDS: Final = 1000
"""Ids in one message."""
KEPT_IDS: Final = 100_000
"""Ids of cancelled calls that are kept; those of calls that have ended never come."""
WAKES: Final = 3
"""Signals by which a method that runs is interrupted, or finds that another is."""


def _cancel_address(actor: str) -> str:
    """Return the name of an actor's socket, which stands for no file."""
    return f"\0aiogpu/{actor}"


def send_cancels(actor: str, calls: bytes, seconds: float) -> bool:
    """Tell an actor's process that calls are cancelled.

    Returns False if the actor is on another machine.

    Raises:
        TimeoutError: the process has not taken the message in `seconds`.
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

    If a waiting call of a plain method is cancelled by Ray 2.60, the actor loses the
    order of its calls and stops answering. So Ray is not asked. The ids of cancelled
    calls come to a socket, and the process skips or interrupts these calls. The socket
    has a name and no file, so nothing of it is left, however the process ends.
    """

    def __init__(self, actor: str) -> None:
        self._ids: dict[bytes, None] = {}
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Another process of the same actor may not quite have ended.
        with suppress(OSError):
            self._socket.bind(_cancel_address(actor))

    def start(self, on_cancel: Callable[[], object]) -> None:
        """Receive in a thread, since no call may run for long; `on_cancel` follows."""
        threading.Thread(target=self._run, args=(on_cancel,), daemon=True).start()

    def _run(self, on_cancel: Callable[[], object]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while poll.poll():
            self.receive()
            with suppress(RuntimeError):  # the loop is closed
                on_cancel()

    def receive(self) -> bool:
        """Take the messages of this user; return whether any have come."""
        size, has_come = socket.CMSG_SPACE(12), False  # process, user and group
        with suppress(BlockingIOError), self._lock:
            while True:
                message, ancillary, _, _ = self._socket.recvmsg(
                    ID_SIZE * MAX_IDS, size, socket.MSG_DONTWAIT
                )
                users = [
                    int.from_bytes(one[2][4:8], sys.byteorder) for one in ancillary
                ]
                has_come = True
                if users == [os.getuid()]:
                    for start in range(0, len(message), ID_SIZE):
                        self._ids[message[start : start + ID_SIZE]] = None
                while len(self._ids) > KEPT_IDS:
                    del self._ids[next(iter(self._ids))]
        return has_come

    def is_cancelled(self) -> bool:
        """Return whether the running call was cancelled, by what was received."""
        return bool(self._ids) and self.take(running_call())

    def take(self, call: bytes) -> bool:
        """Return whether a call was cancelled; True once."""
        return self._ids.pop(call, self) is None


def running_call() -> bytes:
    """Return Ray's id of the call that runs here."""
    return bytes.fromhex(cluster.task_id())


# The object and its calls


class ActorProcess:
    """The user's object, or why there is none, and the context of its code."""

    _name = "actor"
    # Ray asks for the `repr` if an argument has failed, and this never runs.

    def __init__(self, code: task_worker.RemoteCode, given: Sequence[Any]) -> None:
        self._name = code.name
        own_id = cluster.process_ids()[2]
        self._cancels = CancelReceiver(own_id)
        self._failure: TaskFailure | None = None
        self._client = TaskClient(code.make_engine, TaskLoop(is_of_actor=True))
        self._object: Any = None
        self._groups = code.groups
        task_worker.set_up_process(code.name, code.resources, code.kinds)
        self._place: Place = current.node, os.getpid()
        current.actor = int(own_id[:12], 16)
        host_of_task.set(self._client)
        try:
            with failures(self._name) as step:
                made = code.load()
                args, kwargs = load_arguments(from_arguments(*given))
                step.kind = RAISED
                self._object = made(*args, **kwargs)
        except TaskFailure as failure:
            self._failure = TaskFailure(*not_made(self._name, failure.failed))
        self._methods = Methods(self._object)

    def __repr__(self) -> str:
        return f"<actor {self._name}>"

    def _begin(self) -> None:
        host_of_task.set(self._client)
        if self._failure is not None:
            raise self._failure

    def _invoke(
        self, step: task_worker.Step, method: str, payload: bytes, given: Sequence[Any]
    ) -> tuple[Any, bytes]:
        """Call a method; return what it returns, and the arguments' payload."""
        method_called.set(method)
        try:
            function = self._methods[method]
            if given:
                payload = from_arguments(*given)
            args, kwargs = self._client.load(function, payload)
            step.kind = RAISED
            return function(*args, **kwargs), payload
        finally:
            raise_exit()

    def _check_cancelled(self) -> None:
        if self._cancels.is_cancelled():
            raise cancelled(self._name)

    def _drop(self) -> None:
        """Release the object, so that its own cleanup runs."""
        self._object, self._methods = None, Methods(None)
        gc.collect()

    def __ray_shutdown__(self) -> None:
        """End in order, as Ray asks when the last handle has gone."""
        self._drop()


class PlainActorProcess(ActorProcess):
    """An actor whose methods are plain: one at a time, or each in a thread."""

    def __init__(self, code: task_worker.RemoteCode, *given: Any) -> None:
        self._leaving = count(1)
        super().__init__(code, given)
        self._is_threaded = len(code.limits) > 1
        interrupts.is_meant = self._cancels.is_cancelled
        interrupts.install()
        self._cancels.start(partial(interrupts.insist, threading.get_ident(), WAKES))

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
        try:
            with failures(self._name, ActorExit) as step, interrupts.enabled():
                self._cancels.receive()
                self._check_cancelled()
                value, payload = self._invoke(step, method, payload, given)
                return task_worker.pack_results(step, value, payload)
        except ActorExit:
            leave_now()

    def stream(self, encoded: bytes, *given: Any) -> Iterator[Any]:
        """Call a method that is a generator."""
        self._begin()
        method, payload = decode_call(encoded)
        with failures(self._name, GeneratorExit) as step:
            self._cancels.receive()
            self._check_cancelled()
            items, _ = self._invoke(step, method, payload, given)
            for item in task_worker.pack_items(step, items):
                yield item
                self._cancels.receive()
                if self._cancels.is_cancelled():
                    items.close()
                    return

    def leave(self, groups: int) -> None:
        """End after what was sent before; each of so many groups is told."""
        if next(self._leaving) >= groups:
            leave_now()


class AsyncActorProcess(ActorProcess):
    """An actor whose methods are coroutines, which interleave on Ray's loop.

    The limits of concurrency groups are kept here.
    """

    def __init__(self, code: task_worker.RemoteCode, *given: Any) -> None:
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
        """Run the block as a call of a method, within its group's limit."""
        self._present += 1
        task = asyncio.current_task()
        assert task is not None, self
        try:
            self._begin()
            async with self._places[self._groups.get(method, DEFAULT_GROUP)]:
                if self._ended is not None:
                    raise self._ended
                if self._cancels.receive():
                    self._cancel_calls()
                self._check_cancelled()
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
        passed = ActorExit, asyncio.CancelledError
        try:
            async with self._place_of(method):
                with failures(self._name, *passed) as step:
                    value, payload = self._invoke(step, method, payload, given)
                    if type(value) is CoroutineType:
                        try:
                            value = await value
                        finally:
                            raise_exit()
                    return task_worker.pack_results(step, value, payload)
        except ActorExit:
            await self._exit()

    async def stream(self, encoded: bytes, *given: Any) -> AsyncIterator[Any]:
        """Call a method that is a generator of either kind."""
        method, payload = decode_call(encoded)
        passed = GeneratorExit, asyncio.CancelledError
        async with self._place_of(method):
            with failures(self._name, *passed) as step:
                items, _ = self._invoke(step, method, payload, given)
                if not hasattr(items, "__anext__"):
                    for packed in task_worker.pack_items(step, items):
                        yield packed
                    return
                place = 0
                async for item in items:
                    step.kind, place = UNSENDABLE, place + 1
                    yield task_worker.pack_item(place, item)
                    step.kind = RAISED

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

    async def leave(self, sent: Sequence[Ref]) -> None:
        """End after the caller's calls, and the object's own `close()`.

        Ray begins calls of coroutines nearly in the order in which they were sent. So
        this one may come before others that were sent earlier.

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


def raise_exit() -> None:
    """End the actor if its method called `exit_actor()` and swallowed the exception."""
    if current.exits and has_exited():
        raise ActorExit


def leave_now() -> NoReturn:
    """End the actor's process, once this call has ended."""
    cluster.exit_actor()
    raise ActorExit  # it has raised by now
