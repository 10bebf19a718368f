"""An actor whose plain methods run in threads, as many at once as their group may."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from aiogpu.client.current import ActorExit, current, has_exited, method_called
from aiogpu.serialization.exceptions import RAISED, STOPPED, UNREADABLE, UNSENDABLE
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_result, split_results
from aiogpu.wire.messages import (
    DEFAULT_GROUP,
    Create,
    Demand,
    Done,
    Drop,
    Failed,
    Invoke,
)
from aiogpu.worker.actors.serial import Methods, dropped, is_end
from aiogpu.worker.execute import Raised
from aiogpu.worker.invoke import arguments_in, packed
from aiogpu.worker.streams import ThreadWindow, UnsendableError, send_all

if TYPE_CHECKING:
    from aiogpu.worker.actors.serial import ActorRuntime


class ThreadedActor:
    """The main thread reads; what comes runs in the threads of its group."""

    def __init__(self, stage: ActorRuntime, actor: object, creation: Create) -> None:
        self._stage = stage
        self._channel = stage.channel
        self._methods = Methods(actor)
        self._groups = creation.groups
        self._pools = {
            group: ThreadPoolExecutor(limit, thread_name_prefix=f"aiogpu-{group}")
            for group, limit in creation.limits.items()
        }
        self._waiting: dict[int, Future[None]] = {}
        self._streams: dict[int, ThreadWindow] = {}

    def play(self) -> None:
        """Obey until it is to end and all calls have ended."""
        if self._stage.client is not None:
            # A method that waits for its task reads what may be for this thread.
            self._stage.client.wake = self._channel.waker()
        is_over = False
        while not is_over:
            self._channel.wait(None)
            is_over = not self._channel.read_ready()
            is_over |= self._obey_all()
        for stream in list(self._streams.values()):
            stream.stop()
        has_left = self._stage.executor.has_left
        for pool in self._pools.values():
            pool.shutdown(wait=not has_left, cancel_futures=True)

    def _obey_all(self) -> bool:
        # In a frame that goes, for it holds on to the last one's arguments.
        is_over = False
        for message in self._channel.take_all():
            is_over |= self._obey(message)
        return is_over

    def _obey(self, message: object) -> bool:
        if type(message) is Invoke:
            if message.limit:
                flow = self._stage.executor.flow_of(message.call, message)
                self._streams[message.call] = ThreadWindow(flow)
            pool = self._pools[self._groups.get(message.method, DEFAULT_GROUP)]
            begun = self._waiting[message.call] = pool.submit(self._call, [message])
            begun.add_done_callback(partial(self._forget, message.call))
        elif type(message) is Drop:
            future = self._waiting.get(message.call)
            # One that runs goes on: a thread cannot be interrupted safely.
            if future is not None and future.cancel():
                self._channel.send(dropped(message.call))
            elif message.call in self._streams:
                self._streams[message.call].stop()
        elif type(message) is Demand:
            stream = self._streams.get(message.task)
            if stream is not None:
                stream.flow.rise(message.limit)
        return is_end(message)  # type: ignore[arg-type]

    def _call(self, held: list[Invoke]) -> None:
        if self._stage.executor.has_left:
            return  # the driver is told of all calls at once
        self._stage.answer(self._outcome(held.pop()))
        client = self._stage.client
        if client is not None and client.loans.are_used:
            # Not before the frame that held the arguments has gone.
            self._stage.tell_rest()

    def _outcome(self, message: Invoke) -> Done | Failed:
        call, kind, stream = message.call, UNREADABLE, self._streams.get(message.call)
        started = perf_counter()
        method_called.set(message.method)
        try:
            args, kwargs = arguments_in(message.payload)
            kind = RAISED
            value = self._methods[message.method](*args, **kwargs)
            if type(message.payload) is not bytes:
                value = split_results(value, message.payload)
            if stream is not None:
                send_all(value, stream.flow, stream.hold)
                value = None
            if current.exits and has_exited():
                raise ActorExit
            kind = UNSENDABLE
            result = dump_result(value)
            if isinstance(result, PickledValue):
                result = packed(result)
            took = int((perf_counter() - started) * 1e6) + 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            kind = UNSENDABLE if type(error) is UnsendableError else kind
            if stream is not None and stream.is_stopped:
                kind = STOPPED  # by the end of its actor, if somebody still waits
            return self._stage.executor.describe(call, Raised(kind, error))
        return Done(call, result, took)

    def _forget(self, call: int, _future: Future[None]) -> None:
        self._waiting.pop(call, None)
        self._streams.pop(call, None)
