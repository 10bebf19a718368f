"""The process of an actor: holds the user's object and calls its methods.

The failure of a constructor is kept and reported to every caller, with its cause. Ray
itself would report only a text. The methods for aiogpu's own calls begin with
`aiogpu_`; plain Ray programs call the methods of the user's class by their names.
"""

from __future__ import annotations

import asyncio
import gc
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import Any, Final, NoReturn

from aiogpu.client.current import (
    ActorExit,
    current,
    has_exited,
    method_called,
)
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.cluster import Ref
from aiogpu.engines.ray.process import RemoteCode, Suspended, call_user, result_of
from aiogpu.engines.ray.values import StoredValue, TaskFailure, number_of
from aiogpu.runtime.actors.actor import not_made
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, Done
from aiogpu.worker.actors import Methods
from aiogpu.worker.invoke import Constructor, Raised, run_now

CLOSE_LIMIT: Final = 5.0
"""Seconds for an object's `close()` after its last handle has gone."""
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
        code.set_up_process()
        actor_id = cluster.process_ids()[2]
        current.actor = int(actor_id[:12], 16)
        constructor = Constructor(code.functions, self._keep)
        try:
            result_of(self._name, run_now(call_user(constructor, 0, arguments)))
        except TaskFailure as failure:
            failed = not_made(self._name, failure.failed)
            # Callers must tell it from the same failure of an actor in an argument.
            marked = failed._replace(task=number_of(actor_id))
            self._failure = TaskFailure(*marked)
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

    def __ray_shutdown__(self) -> None:
        """Release the object, when Ray reports that the last handle has gone."""
        self._object, self._methods = None, Methods(None)
        gc.collect()  # runs the object's own cleanup


class PlainActorProcess(ActorProcess):
    """An actor whose methods are plain: one at a time, or each in a thread."""

    def __init__(self, code: RemoteCode, *arguments: Any) -> None:
        super().__init__(code, arguments)
        self._is_threaded = len(code.limits) > 1

    def aiogpu_ready(self) -> None:
        """Return once the constructor has returned."""
        self._begin()

    def aiogpu_call(self, encoded: bytes, *arguments: Any) -> Any:
        """Call a method of the object."""
        self._begin()
        method, payload = decode_call(encoded)
        if self._is_threaded:
            # Ray's threads have no names, which logs would show.
            group = self._groups.get(method, DEFAULT_GROUP)
            threading.current_thread().name = f"aiogpu-{group}"
        outcome = run_now(self._invoke(method, arguments or (payload,)))
        if _has_left(outcome):
            _leave_now()
        return result_of(self._name, outcome)

    def aiogpu_stream(self, encoded: bytes, *arguments: Any) -> Iterator[Any]:
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

    def aiogpu_leave(self, sent: Sequence[Ref]) -> None:
        """End after the caller's calls; see `AsyncActorProcess.aiogpu_leave`."""
        cluster.wait_for_all(sent)
        _leave_now()


class AsyncActorProcess(ActorProcess):
    """An actor whose methods are coroutines, which interleave on Ray's loop.

    This class enforces the limits of concurrency groups: Ray would run each group on a
    loop of its own.
    """

    def __init__(self, code: RemoteCode, *arguments: Any) -> None:
        super().__init__(code, arguments)
        self._present = 0
        self._is_idle = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        limits = code.limits.items()
        self._places = {name: asyncio.Semaphore(most) for name, most in limits}

    async def aiogpu_ready(self) -> None:
        """Return once the constructor has returned."""
        self._begin()

    @asynccontextmanager
    async def _place_of(self, method: str) -> AsyncIterator[None]:
        """Run the block as a call of a method, within its group's limit."""
        self._begin()
        self._present += 1
        self._loop = asyncio.get_running_loop()
        try:
            async with self._places[self._groups.get(method, DEFAULT_GROUP)]:
                yield
        finally:
            self._present -= 1
            if not self._present:
                self._is_idle.set()

    async def aiogpu_call(self, encoded: bytes, *arguments: Any) -> Any:
        """Call a method of the object."""
        method, payload = decode_call(encoded)
        async with self._place_of(method):
            outcome = await self._invoke(method, arguments or (payload,))
        if _has_left(outcome):
            _leave_now()
        return result_of(self._name, outcome)

    async def aiogpu_stream(
        self, encoded: bytes, *arguments: Any
    ) -> AsyncIterator[Any]:
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
        result_of(self._name, outcome)

    async def aiogpu_leave(self, sent: Sequence[Ref]) -> None:
        """End after the caller's calls, and the object's own `close()`.

        Ray does not start calls of coroutines exactly in the order of sending. So this
        call may start before calls that were sent earlier.

        Args:
            sent: objects of the calls that have not ended.
        """
        await asyncio.to_thread(cluster.wait_for_all, sent)
        while self._present:
            self._is_idle.clear()
            await self._is_idle.wait()
        await self._close()
        super().__ray_shutdown__()
        _leave_now()

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


def _plain_method(name: str) -> Callable[..., Any]:
    def call(self: PlainActorProcess, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return self._methods[name](*args, **kwargs)

    return call


def _async_method(name: str) -> Callable[..., Any]:
    async def call(self: AsyncActorProcess, *args: Any, **kwargs: Any) -> Any:
        async with self._place_of(name):
            result = self._methods[name](*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

    return call


def process_class(mode: str, methods: Sequence[str]) -> type[ActorProcess]:
    """Return the class of an actor's process, with its methods for plain Ray programs.

    Generators are not among them: Ray asks for a flag of its own at each call of one.

    Args:
        mode: how calls run; see `wire.messages`.
        methods: names of the methods of the user's class.
    """
    is_async = mode == ASYNC
    base: type[ActorProcess] = AsyncActorProcess if is_async else PlainActorProcess
    make = _async_method if is_async else _plain_method
    return type(base.__name__, (base,), {name: make(name) for name in methods})


def _has_left(outcome: Done | Raised) -> bool:
    """Return whether a call has ended its actor by `exit_actor()`."""
    return type(outcome) is Raised and (
        bool(current.exits and has_exited()) or type(outcome.error) is ActorExit
    )


def _leave_now() -> NoReturn:
    """End the actor's process, once this call has ended."""
    cluster.exit_actor()
    raise ActorExit  # never reached: `exit_actor` raises
