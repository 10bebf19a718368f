"""An actor whose coroutine methods interleave on one event loop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from inspect import CORO_CREATED, getcoroutinestate, iscoroutinefunction, signature
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import ActorExit, current, has_exited, method_called
from aiogpu.serialization.exceptions import RAISED, UNREADABLE, UNSENDABLE
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_result, split_results
from aiogpu.wire.messages import Demand, Done, Drop, Failed, Invoke
from aiogpu.worker.actors.serial import Methods, dropped, is_end
from aiogpu.worker.connection import SHORT
from aiogpu.worker.execute import Raised
from aiogpu.worker.invoke import arguments_in, packed
from aiogpu.worker.streams import StreamSender, UnsendableError, send_all_async

if TYPE_CHECKING:
    from aiogpu.worker.actors.serial import ActorRuntime


TURN: Final = 10
"""Glances at the socket after which the loop has a turn."""


class AsyncActor:
    """Begins each call when it comes; the driver sends no more than may run at once."""

    def __init__(self, stage: ActorRuntime, actor: object) -> None:
        self._stage = stage
        self._channel = stage.channel
        self._actor = actor
        self._methods = Methods(actor)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._dropped: set[int] = set()
        self._flows: dict[int, StreamSender] = {}
        self._answers: list[Done | Failed] = []
        self._is_over = False
        self._waits_since = 0.0
        self._is_awake = False
        self._is_telling = False
        self._awake_until = 0.0
        self._loop = asyncio.new_event_loop()

    def play(self) -> None:
        """Obey until it is to end, then give it time for its `close()`."""
        loop = self._loop
        asyncio.set_event_loop(loop)
        client = self._stage.client
        if client is not None:
            client.loop, client.wake = loop, self._look_soon
            client.loans.on_over = self._tell_soon
        loop.add_reader(self._channel.fileno(), self._read)
        loop.call_soon(self._obey)
        try:
            loop.run_forever()
            # Calls that answer from here on must not stop what follows.
            self._is_over = True
            loop.remove_reader(self._channel.fileno())
            loop.run_until_complete(self._close())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            self._flush()
            loop.close()
            if client is not None:
                # It holds the actor, which is to go now.
                client.loop = client.wake = client.loans.on_over = None

    async def _close(self) -> None:
        await _end(self._running.values())
        try:
            close = getattr(self._actor, "close", None)
            if iscoroutinefunction(close) and not signature(close).parameters:
                await close()
        except BaseException:  # noqa: BLE001 - whatever it is, the actor ends
            sys.excepthook(*sys.exc_info())
        await _end(asyncio.all_tasks() - {asyncio.current_task()})

    def _look_soon(self) -> None:
        """A thread of a method's has read what may be for this loop."""
        self._loop.call_soon_threadsafe(self._obey)

    def _read(self) -> None:
        if not self._is_awake and not self._running and self._channel.may_stay_awake:
            self._is_awake = perf_counter() - self._waits_since < SHORT
        if not self._channel.read_ready():
            self._stop()
        self._obey()

    def _wait(self) -> None:
        """Nothing runs; the next call may be on its way. See `Channel.next`."""
        self._waits_since = perf_counter()
        if self._is_awake:
            self._awake_until = self._waits_since + SHORT
            self._loop.call_soon(self._glance)

    def _glance(self) -> None:
        """Look whether it has come, before the loop sleeps: waking up takes longer."""
        if self._running or self._is_over:
            return
        for _ in range(TURN):
            if not self._channel.is_silent(0):
                self._read()
                return
            os.sched_yield()
        if perf_counter() < self._awake_until:
            self._loop.call_soon(self._glance)
        else:
            self._is_awake = False

    def _obey(self) -> None:
        for message in self._channel.take_all():
            if type(message) is Invoke:
                self._begin(message)
            elif type(message) is Drop:
                self._drop(message.call)
            elif type(message) is Demand:
                flow = self._flows.get(message.task)
                if flow is not None:
                    flow.rise(message.limit)
            elif is_end(message):
                self._stop()

    def _stop(self) -> None:
        if not self._is_over:
            self._loop.stop()

    def _begin(self, message: Invoke) -> None:
        # As `loop.create_task` would, which takes half as long again.
        self._running[message.call] = asyncio.Task(self._call(message), loop=self._loop)

    def _drop(self, call: int) -> None:
        task = self._running.get(call)
        if task is None:
            return
        self._dropped.add(call)
        has_begun = getcoroutinestate(task.get_coro()) != CORO_CREATED  # type: ignore[arg-type]
        task.cancel()
        if not has_begun:
            # It will not come to answer by itself.
            del self._running[call]
            self._dropped.discard(call)
            self._answer(dropped(call))

    async def _call(self, message: Invoke) -> None:
        call, kind = message.call, RAISED
        started = perf_counter()
        answer: Done | Failed
        method_called.set(message.method)
        try:
            method = self._methods[message.method]
            kind = UNREADABLE
            args, kwargs = arguments_in(message.payload)
            kind = RAISED
            value = method(*args, **kwargs)
            if type(value) is CoroutineType:
                value = await value
            if type(message.payload) is not bytes:
                value = split_results(value, message.payload)
            if message.limit:
                await self._pour(value, message)
                value = None
            if current.exits and has_exited():
                raise ActorExit
            kind = UNSENDABLE
            result = dump_result(value)
            if isinstance(result, PickledValue):
                result = packed(result)
            answer = Done(call, result, int((perf_counter() - started) * 1e6) + 1)
        except asyncio.CancelledError as error:
            is_dropped = call in self._dropped or self._is_over
            answer = dropped(call) if is_dropped else self._failure(call, kind, error)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            kind = UNSENDABLE if type(error) is UnsendableError else kind
            answer = self._failure(call, kind, error)
        del self._running[call]
        self._dropped.discard(call)
        self._answer(answer)

    async def _pour(self, items: Any, message: Invoke) -> None:
        """Send what a generator yields; a plain one has the loop until it is held."""
        flow = self._stage.executor.flow_of(message.call, message)
        self._flows[message.call] = flow
        try:
            await send_all_async(items, flow, self._loop.create_future)
        finally:
            del self._flows[message.call]

    def _failure(self, call: int, kind: str, error: BaseException) -> Failed:
        return self._stage.executor.describe(call, Raised(kind, error))

    def _answer(self, answer: Done | Failed) -> None:
        if self._channel.is_closed:
            self._stage.end_fork()
        if not self._running and not self._answers:
            self._stage.answer(answer)
            self._wait()
        else:
            if not self._answers:
                self._loop.call_soon(self._flush)
            self._answers.append(answer)
        if self._stage.executor.has_left:
            self._stop()

    def _tell_soon(self) -> None:
        """Something is not needed any more that was in what has ended just now."""
        if not self._is_telling:
            self._is_telling = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_telling = False
        self._stage.tell_rest()

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        if answers:
            self._stage.answer_all(answers)


async def _end(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until they have ended, whatever they do about it."""
    rest = [task for task in tasks if task is not None]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
