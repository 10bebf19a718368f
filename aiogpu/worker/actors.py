"""Actors with plain methods: one call after the other, or in threads.

Actors with coroutine methods are in `async_actor`, so that the others do not import
asyncio.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import method_called
from aiogpu.memory.control_page import ALL
from aiogpu.serialization.exceptions import RAISED, STOPPED
from aiogpu.serialization.serializer import NO_ARGUMENTS, NONE_PAYLOAD
from aiogpu.wire.messages import (
    DEFAULT_GROUP,
    Create,
    Demand,
    Done,
    Drop,
    Exit,
    Failed,
    Invoke,
    Leave,
    Message,
)
from aiogpu.worker.chunk import is_timed, method_of
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import report_dropped
from aiogpu.worker.invoke import (
    Callables,
    Invoker,
    Raised,
    StreamSender,
    invoke,
    run_now,
    send_all,
    timed,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

_ENDS: Final = (Leave, Exit)


def dropped(call: int) -> Failed:
    """Return the answer to a call that was dropped before it began."""
    return Failed(call, STOPPED, "", "", "", None)


def is_end(executor: Executor, message: Message | None) -> bool:
    """Return whether a message ends the actor; None means that the driver has gone."""
    if type(message) is Leave:
        executor.is_evicted = message.is_eviction
    return message is None or type(message) in _ENDS


def last_answer(executor: Executor, actor: object, task: int) -> Done | Failed:
    """Return the last message of an actor, with the state to keep if it is evicted."""
    if not executor.is_evicted or not hasattr(actor, "on_evict"):
        return Done(task, NONE_PAYLOAD, 0)
    outcome = executor.call(task, Methods(actor), "on_evict", NO_ARGUMENTS)
    if type(outcome) is not Raised:
        return outcome
    return executor.describe(task, outcome)


class Methods(Callables):
    """The methods of an actor, bound to it when they are first called.

    Args:
        actor: the object.
        begin: called when the code of a method with a `run_timeout` begins.
    """

    failure = RAISED

    def __init__(
        self, actor: object, begin: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._actor = actor
        self._begin = begin

    def __missing__(self, name: str) -> Callable[..., Any]:
        method = method_of(self._actor, name)
        if self._begin is not None and is_timed(self._actor, name):
            method = timed(method, self._begin)
        self[name] = method
        return method


class SerialActor:
    """Runs one call at a time in the main thread, where it can be interrupted."""

    def __init__(self, executor: Executor, actor: object) -> None:
        self._executor = executor
        self._channel = executor.channel
        self._interrupts = executor.interrupts
        self._methods = Methods(actor, executor.begin_call)
        self._dropped: set[int] = set()
        self._drops = 0

    def serve(self) -> None:
        """Run calls until the actor is to end."""
        executor, interrupts = self._executor, self._interrupts
        while True:
            message = self._channel.next()
            if type(message) is Invoke:
                call = message.call
                interrupts.note_begun(call)
                if interrupts.drops != self._drops and not self._read_drops(call):
                    return
                if call in self._dropped:
                    self._dropped.discard(call)
                    self._channel.send(dropped(call))
                    continue
                executor.answer(self._call(message))
                # The message holds references, whose release is reported next.
                del message
                executor.client.report_ended_loans()
                if executor.has_left:
                    return
            elif type(message) is Drop:
                self._drops += 1
            elif is_end(executor, message):
                return

    def _call(self, message: Invoke) -> Done | Failed:
        executor, call = self._executor, message.call
        method_called.set((message.method, call))
        stream = executor.new_stream(call, message) if message.limit else None
        outcome = executor.call(
            call, self._methods, message.method, message.payload, stream
        )
        if type(outcome) is not Raised:
            return outcome
        return executor.describe(call, outcome)

    def _read_drops(self, call: int) -> bool:
        """Read until all dropped calls are known.

        Args:
            call: the call to run next; all earlier calls were answered.

        Returns:
            False if the actor is to end.
        """
        while True:
            for drop in self._channel.take(Drop):
                assert isinstance(drop, Drop)
                self._drops += 1
                if drop.call >= call:
                    self._dropped.add(drop.call)
            drops = self._interrupts.drops
            if drops == ALL:
                return False
            if self._drops >= drops:
                return True
            if not self._channel.read():
                return False


class ThreadWindow:
    """Holds back a generator that runs in another thread than the reader's.

    Attributes:
        flow: sends its items.
        is_stopped: the generator is to end early.
    """

    def __init__(self, flow: StreamSender) -> None:
        self.flow = flow
        self.is_stopped = False
        self._turn = _thread.allocate_lock()
        flow.on_open = self._wake

    def stop(self) -> None:
        """End the generator at its next `yield`; called by the reading thread."""
        self.is_stopped = True
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the generator's thread is not waiting
            self._turn.release()

    def hold(self) -> None:
        """Wait until the consumer wants more items.

        Raises:
            GeneratorExit: the call is to stop.
        """
        while self.flow.is_held or self.is_stopped:
            if self.is_stopped:
                raise GeneratorExit("the call was dropped")
            self._turn.acquire()


class ThreadedActor(Invoker):
    """The main thread reads; calls run in the threads of their groups.

    A coroutine that a plain method returns is not awaited: there is no loop.
    """

    def __init__(self, executor: Executor, actor: object, creation: Create) -> None:
        # Imported late: serial actors do not need it.
        from concurrent.futures import ThreadPoolExecutor

        self._executor = executor
        self._channel = executor.channel
        self._methods = Methods(actor, executor.begin_call)
        self._groups = creation.groups
        self._pools = {
            group: ThreadPoolExecutor(limit, thread_name_prefix=f"aiogpu-{group}")
            for group, limit in creation.limits.items()
        }
        self._waiting: dict[int, Future[None]] = {}
        self._streams: dict[int, ThreadWindow] = {}

    def serve(self) -> None:
        """Run calls until the actor is to end and all calls have ended."""
        # A method that waits for its child task may read messages for this thread.
        self._executor.client.wake = self._channel.waker()
        is_over = False
        while not is_over:
            try:
                self._channel.wait(None)
            except BaseException as error:  # noqa: BLE001 - no call can have it
                report_dropped(error)
            is_over = not self._channel.read_ready()
            is_over |= self._obey_all()
        for stream in list(self._streams.values()):
            stream.stop()
        has_left = self._executor.has_left
        for pool in self._pools.values():
            pool.shutdown(wait=not has_left, cancel_futures=True)

    def _obey_all(self) -> bool:
        # In a frame of its own, which releases the last message's arguments on return.
        is_over = False
        for message in self._channel.take_all():
            is_over |= self._obey(message)
        return is_over

    def _obey(self, message: Message) -> bool:
        if type(message) is Invoke:
            call = message.call
            if message.limit:
                stream = self._executor.new_stream(call, message)
                self._streams[call] = ThreadWindow(stream)
            pool = self._pools[self._groups.get(message.method, DEFAULT_GROUP)]
            submitted = self._waiting[call] = pool.submit(self._call, [message])
            submitted.add_done_callback(partial(self._forget, call))
        elif type(message) is Drop:
            future = self._waiting.get(message.call)
            # A running call goes on: a thread cannot be interrupted safely.
            if future is not None and future.cancel():
                self._channel.send(dropped(message.call))
            elif message.call in self._streams:
                self._streams[message.call].stop()
            elif future is not None:
                self._executor.dropped.add(message.call)
        elif type(message) is Demand:
            window = self._streams.get(message.task)
            if window is not None:
                window.flow.raise_limit(message.limit)
        return is_end(self._executor, message)

    def _call(self, messages: list[Invoke]) -> None:
        if self._executor.has_left:
            return  # the driver fails all calls at once
        self._executor.answer(self._run(messages.pop()))
        # After `_run`, whose frame held the arguments.
        self._executor.client.report_ended_loans()

    def _run(self, message: Invoke) -> Done | Failed:
        call, window = message.call, self._streams.get(message.call)
        method_called.set((message.method, call))
        outcome = run_now(
            invoke(self, call, self._methods, message.method, message.payload, window)
        )
        if type(outcome) is not Raised:
            return outcome
        if window is not None and window.is_stopped:
            outcome.kind = STOPPED  # by the end of its actor
        return self._executor.describe(call, outcome)

    async def wait(self, coroutine: CoroutineType[Any, Any, Any], _call: int) -> Any:
        """Return the coroutine itself, which cannot be sent."""
        return coroutine

    async def send_items(self, items: Any, window: ThreadWindow) -> None:
        """Run a generator to its end in this thread; never suspends."""
        send_all(items, window.flow, window.hold)

    def _forget(self, call: int, _future: Future[None]) -> None:
        self._waiting.pop(call, None)
        self._streams.pop(call, None)
        if self._executor.dropped:
            self._executor.dropped.discard(call)
