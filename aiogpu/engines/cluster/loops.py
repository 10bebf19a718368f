"""The event loop of a task in a worker of Ray's, in the thread that runs the task.

While it has nothing to do but wait for calls that the task has made, it waits in Ray,
which so knows that the task is blocked, and gives its CPUs to others meanwhile. It
never waits long at a time: Ray interrupts a task between two steps of its code only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from selectors import EpollSelector, SelectorKey
from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines.cluster.asking import OneThread
from aiogpu.engines.cluster.interrupts import interrupts

if TYPE_CHECKING:
    from aiogpu.engines.cluster.calls import Calls
    from aiogpu.engines.ray import Ref

SLICE: Final = 0.05
"""Seconds of one wait, so that a cancel is heard."""
SHARED_SLICE: Final = 0.005
"""The same where the task waits for descriptors of its own as well."""
ON_ITS_WAY: Final = 0.001
"""Seconds for what is ready to be told of, from Ray's thread to this one."""
LOOKED_AT: Final = 1000
"""Objects that one wait is for, at most."""
MOST_ENDS: Final = 10
"""Exceptions by which what is left on a loop may end it."""


class _Waiting(EpollSelector):
    """Waits in Ray while there is something to wait for there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls | None = None
        self.is_shared = False

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        found = super().select(0)
        if found:
            return found
        calls, refs = self.calls, self._awaited()
        is_alone = len(self.get_map()) == 1 and not self.is_shared
        slice_ = SLICE if is_alone or not refs else SHARED_SLICE
        wait = slice_ if timeout is None else min(timeout, slice_)
        if calls is None or not refs:
            return super().select(wait)
        return super().select(ON_ITS_WAY if calls.wait(refs, wait) else 0)

    def _awaited(self) -> Sequence[Ref]:
        if self.calls is None:
            return ()
        # At once: other threads of an actor may make calls meanwhile.
        live = [*islice(self.calls.live.values(), LOOKED_AT)]
        refs = (ref for one in live for ref in one.refs or one.waitables)
        return list(islice(refs, LOOKED_AT))


class TaskLoop:
    """See above; one for each thread, kept between tasks, or one for all of an actor.

    The threads of an actor run it by turns, so that what one of them has started or
    was given another can wait for. What comes while none of them waits, a thread of
    the loop's own has delivered: an actor may be idle for long, and would keep alive
    whatever an answer holds that nobody has looked at.

    Attributes:
        loop: the loop.
    """

    def __init__(self, *, is_of_actor: bool = False) -> None:
        self._is_of_actor = is_of_actor
        self._attendant: OneThread | None = None
        self._turns = threading.Condition()
        self._is_run = False
        self._waiters = 0
        self._waiting = _Waiting()
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(self._waiting)
        self._runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self._runner.get_loop()
        self._main: asyncio.Task[Any] | None = None

    def wait_for(self, calls: Calls) -> None:
        """While it is idle, it waits for these."""
        self._waiting.calls = calls
        if self._is_of_actor:
            calls.on_posted = self._attend

    def _attend(self) -> None:
        """In any thread: something has come. Who waits delivers it himself."""
        with self._turns:
            if self._waiters:
                return
            if self._attendant is None:
                self._attendant = OneThread("aiogpu-attendant")
        self._attendant.submit(self._deliver)

    def _deliver(self) -> None:
        if self._begin_turn(lambda: True):
            try:
                self.settle()
            finally:
                self._end_turn()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await something of the task's, in a context that is a copy of the caller's.

        An interrupt cancels it, and is raised when it has ended by that.
        """
        with interrupts.put_off(self._wake):
            while not self._begin_turn(lambda: False):
                continue  # another thread delivers what has come
            try:
                return self._runner.run(self._awaited(awaitable))
            except asyncio.CancelledError:
                if not interrupts.has_come:
                    raise
                raise KeyboardInterrupt from None
            except (SystemExit, KeyboardInterrupt):
                self.settle()
                raise
            finally:
                self._end_turn()

    async def _awaited(self, awaitable: Awaitable[Any]) -> Any:
        self._main = asyncio.current_task()
        try:
            self._hear()  # what has come before it could be cancelled
            return await awaitable
        finally:
            self._main = None

    def _wake(self) -> None:
        # A cancel may do anything, take a lock say, that the interrupted code holds.
        self.loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        if self._main is not None and interrupts.take():
            self._main.cancel()

    def settle(self) -> None:
        """Run what is due once more.

        Code that ends the loop by an exception of its own may leave the loop's own stop
        behind, which would stop whatever is run next.
        """
        for _ in range(MOST_ENDS):
            stop = self.loop.call_soon(self.loop.stop)
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                stop.cancel()  # it was another's turn to end the loop

    def run_until(self, is_done: Callable[[], bool], deadline: float | None) -> bool:
        """Run what is due until something is done; False if time is up before.

        Args:
            is_done: asked after each step.
            deadline: by `time.monotonic()`, as the loop's own clock; None for no limit.
        """
        with interrupts.put_off():
            self._note_waiters(1)
            try:
                while not (is_done() or interrupts.is_due()):
                    if deadline is not None and self.loop.time() >= deadline:
                        return False
                    if self._begin_turn(is_done):
                        try:
                            self._turn()
                        finally:
                            self._end_turn()
                return True
            finally:
                self._note_waiters(-1)
                calls = self._waiting.calls
                if self._is_of_actor and calls is not None and calls.is_posted:
                    self._attend()

    def _note_waiters(self, more: int) -> None:
        with self._turns:
            self._waiters += more
            self._waiting.is_shared = self._waiters > 1

    def _begin_turn(self, is_done: Callable[[], bool]) -> bool:
        """Whether it is this thread's to run the loop; waits a slice for that."""
        with self._turns:
            self._turns.wait_for(lambda: not self._is_run or is_done(), SLICE)
            if self._is_run:
                return False
            self._is_run = True
            return True

    def _end_turn(self) -> None:
        with self._turns:
            self._is_run = False
            self._turns.notify_all()

    def _turn(self) -> None:
        """Wait for what comes, for the length of a slice at most."""
        loop, calls = self.loop, self._waiting.calls
        assert calls is not None, self
        alarm = loop.call_later(SLICE, loop.stop)
        calls.on_delivered = loop.stop
        try:
            loop.run_forever()
        finally:
            calls.on_delivered = None
            alarm.cancel()

    def end_rest(self) -> None:
        """Cancel what the task has left running on the loop; nothing of it goes on.

        An interrupt cancels it once more, and is raised when it has ended.
        """
        rest = asyncio.all_tasks(self.loop)
        if rest:
            self.run(_ended(rest))


async def _ended(rest: Iterable[asyncio.Task[Any]]) -> None:
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


class _OfThread(threading.local):
    loop: TaskLoop | None = None


_of_thread: Final = _OfThread()


def task_loop() -> TaskLoop:
    """The loop of this thread; made when it is first asked for."""
    if _of_thread.loop is None:
        _of_thread.loop = TaskLoop()
    return _of_thread.loop


def has_loop() -> bool:
    """Return whether this thread has one yet."""
    return _of_thread.loop is not None
