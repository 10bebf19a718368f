"""`Queue`: a first-in, first-out queue between tasks, actors and programs.

The items are in an actor, which holds no CPU. Each operation is a generator of steps
that yields calls of this actor; an event loop awaits each call, a plain task blocks.
Light to import: user modules load this file in every worker, so asyncio is imported
late.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, Unpack, cast

from aiogpu.api.decorator import remote
from aiogpu.api.options import check_seconds, whole
from aiogpu.client.current import for_consumer, is_in_task, is_loop_running
from aiogpu.errors import (
    AiogpuError,
    QueueClosedError,
    QueueEmptyError,
    QueueFullError,
)

if TYPE_CHECKING:
    import asyncio

    from aiogpu.api.actors.actor import ActorHandle
    from aiogpu.api.keywords import ActorKeywords

T = TypeVar("T")
R = TypeVar("R")


WAITING: Final = 1_000_000
"""Most calls that wait for items or for room at the same time."""


class _Put:
    """Items that wait for room; `ended` is settled when all are in the queue."""

    __slots__ = ("ended", "items")

    def __init__(self, items: list[Any], ended: asyncio.Future[None]) -> None:
        self.items = deque(items)
        self.ended = ended


class _Get:
    """A wait for items; `found` is settled with them, or with None at the end."""

    __slots__ = ("found", "most")

    def __init__(self, most: int, found: asyncio.Future[list[Any] | None]) -> None:
        self.most = most
        self.found = found


@remote(num_cpus=0, max_concurrency=WAITING)
class QueueActor:
    """The items of a queue, and the calls that wait for items or room, in order."""

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._items: deque[Any] = deque()
        self._puts: deque[_Put] = deque()
        self._gets: dict[bytes, _Get] = {}
        self._is_closed = False

    async def put(
        self, items: list[Any], timeout: float | None
    ) -> tuple[int, int, bool]:
        """Return the number of items put, the limit, and whether the queue is shut."""
        from asyncio import get_running_loop, wait

        put = _Put(items, get_running_loop().create_future())
        if not self._is_closed:
            self._puts.append(put)
            self._settle()
            try:
                await wait([put.ended], timeout=timeout)
            finally:
                if put in self._puts:
                    self._puts.remove(put)
        return len(items) - len(put.items), self._maxsize, self._is_closed

    async def get(
        self, ticket: bytes, most: int, timeout: float | None
    ) -> list[Any] | None:
        """Return up to `most` items; [] if the time is up, None after shutdown."""
        from asyncio import CancelledError, get_running_loop, wait

        get = self._gets[ticket] = _Get(most, get_running_loop().create_future())
        self._settle()
        try:
            await wait([get.found], timeout=timeout)
        except CancelledError:  # the waiting process has ended
            if get.found.done():
                self._put_back(get.found.result() or [])
            raise
        finally:
            self._gets.pop(ticket, None)
        return get.found.result() if get.found.done() else []

    async def withdraw(self, ticket: bytes) -> None:
        """End a wait for items; it returns no items unless it has them already."""
        get = self._gets.pop(ticket, None)
        if get is not None:
            get.found.set_result([])

    async def put_back(self, items: list[Any]) -> None:
        """Put items that no consumer received back at the front."""
        self._put_back(items)

    def _put_back(self, items: list[Any]) -> None:
        self._items.extendleft(reversed(items))
        self._settle()

    async def size(self) -> tuple[int, int]:
        """Return the number of items, and the limit."""
        return len(self._items), self._maxsize

    async def shutdown(self, immediate: bool) -> None:
        """Accept no more items; with `immediate` drop the items in the queue."""
        self._is_closed = True
        if immediate:
            self._items.clear()
        puts, self._puts = self._puts, deque()
        for put in puts:
            put.ended.set_result(None)
        self._settle()

    def _settle(self) -> None:
        """Move items from waiting puts to waiting gets, as far as there is room."""
        items, puts, gets = self._items, self._puts, self._gets
        while True:
            if puts and not 0 < self._maxsize <= len(items):
                items.append(puts[0].items.popleft())
                if not puts[0].items:
                    puts.popleft().ended.set_result(None)
            elif gets and items:
                get = gets.pop(next(iter(gets)))
                count = min(get.most, len(items))
                get.found.set_result([items.popleft() for _ in range(count)])
            else:
                break
        if self._is_closed and not items:
            for get in gets.values():
                get.found.set_result(None)
            gets.clear()


_check_size: Final = whole(0, "a whole number of items, or 0 for no limit")
_check_most: Final = whole(1, "a whole number of items, 1 or more")

Steps = Generator[Any, Any, R]
"""Yields handles, is sent their results, and returns the result."""


class Queue(Generic[T]):
    """A queue in an actor, for programs, tasks and actors that share it.

    Its methods are awaited. In a plain task, which has no event loop, they block and
    return their result without `await`. A waiting task holds no CPU.

    Items are delivered in the order in which they were put, each to one consumer, and
    consumers are served in the order of their requests. A cancelled or late `get` loses
    no item; after a cancelled `put` the item may be in the queue. An item is lost if
    the process of the consumer that received it dies. A consumer that dies while it
    waits takes no item, except on a Ray cluster.

    The items are in the actor's memory: if the actor dies they are lost, and calls
    raise `ActorDiedError`. The actor ends when the last handle to the queue is dropped.

    On an inline node only code on the program's event loop can use a queue: the program
    itself, and coroutines.

    Example:
        `queue = aiogpu.Queue(maxsize=100)`, `await queue.put(1)`, `await queue.get()`
    """

    def __init__(self, maxsize: int = 0, **options: Unpack[ActorKeywords]) -> None:
        """Make a queue.

        Args:
            maxsize: most items; `put` waits while the queue is full; 0 for no limit.
            **options: options of the queue's actor, such as `name="jobs"` with
                `get_if_exists=True`, or `lifetime="detached"`.

        Raises:
            OptionError: an option is invalid.
            NoLoopError: no event loop is running in this thread; see
                `aiogpu.sync.Queue`.
        """
        limit = _check_size("maxsize", maxsize)
        cls: Any = QueueActor
        if options:
            cls = cls.options(**options)
        self._actor: ActorHandle[Any] = cls.remote(limit)

    def __repr__(self) -> str:
        return f"<Queue of {self._actor!r}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self._actor)

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until the queue is ready; needed before a named queue is passed on."""
        yield from self._actor.__await__()
        return self

    @property
    def actor(self) -> ActorHandle[Any]:
        """The handle of the queue's actor, for `aiogpu.kill`."""
        return self._actor

    def put(self, item: T, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        """Put an item in; wait until there is room.

        Args:
            item: any object that can be pickled; a handle is delivered as a handle.
            timeout: seconds; None waits without limit, 0 does not wait.

        Raises:
            QueueFullError: there was no room within the time.
            QueueClosedError: the queue is shut down.
            ActorDiedError: the queue's actor is dead.
        """
        return self._run(self._putting([item], timeout))

    def put_nowait(self, item: T) -> Coroutine[Any, Any, None]:
        """Put an item in, or raise `QueueFullError` if there is no room."""
        return self.put(item, 0)

    def put_batch(
        self, items: Iterable[T], timeout: float | None = None
    ) -> Coroutine[Any, Any, None]:
        """Put several items in by one call, each as soon as there is room.

        Raises:
            QueueFullError: the time is up; its `count` is the number of items put.
        """
        return self._run(self._putting(list(items), timeout))

    def get(self, timeout: float | None = None) -> Coroutine[Any, Any, T]:
        """Take the next item; wait until there is one.

        Args:
            timeout: seconds; None waits without limit, 0 does not wait.

        Raises:
            QueueEmptyError: there was no item within the time.
            QueueClosedError: the queue is shut down and has no items left.
            ActorDiedError: the queue's actor is dead.
        """
        return self._run(self._getting_one(timeout))

    def get_nowait(self) -> Coroutine[Any, Any, T]:
        """Take the next item, or raise `QueueEmptyError` if there is none."""
        return self.get(0)

    def get_batch(
        self, most: int, timeout: float | None = None
    ) -> Coroutine[Any, Any, list[T]]:
        """Take up to `most` items by one call; wait until there is at least one."""
        return self._run(self._getting(_check_most("most", most), timeout))

    def qsize(self) -> Coroutine[Any, Any, int]:
        """Return the number of items in the queue."""
        return self._run(self._asking(lambda size, _: size))

    def empty(self) -> Coroutine[Any, Any, bool]:
        """Return whether the queue has no item."""
        return self._run(self._asking(lambda size, _: not size))

    def full(self) -> Coroutine[Any, Any, bool]:
        """Return whether the queue has no room."""
        return self._run(self._asking(lambda size, most: 0 < most <= size))

    def shutdown(self, immediate: bool = False) -> Coroutine[Any, Any, None]:
        """Accept no more items: `put` raises, and `get` raises when no item is left.

        Args:
            immediate: True to drop the items in the queue.
        """
        return self._run(self._shutting(immediate))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Take the next item; the loop ends when the queue is shut down and empty."""
        try:
            return await self.get()
        except QueueClosedError:
            raise StopAsyncIteration from None

    # The steps of each operation.

    def _putting(self, items: list[T], timeout: float | None) -> Steps[None]:
        _check_timeout(timeout)
        if not items:
            return
        count, most, is_closed = yield self._actor.put.remote(items, timeout)
        if count == len(items):
            return
        what = "the item" if len(items) == 1 else f"{len(items) - count} items"
        if is_closed:
            raise QueueClosedError(f"the queue is shut down and did not accept {what}.")
        raise QueueFullError(
            f"the queue is full with {most} items, and had no room for {what} within "
            f"{timeout or 0:g} s.",
            count,
        )

    def _getting_one(self, timeout: float | None) -> Steps[T]:
        [item] = yield from self._getting(1, timeout)
        return item

    def _getting(self, most: int, timeout: float | None) -> Steps[list[T]]:
        _check_timeout(timeout)
        ticket, handle = os.urandom(8), None
        try:
            handle = self._actor.get.remote(ticket, most, timeout)
            items = yield handle
        except AiogpuError:
            raise
        except BaseException:
            # The waiter was cancelled, but an item may be on its way. In plain code an
            # interrupt may come inside `.remote()`, after the call was sent.
            with suppress(AiogpuError):
                withdrawn = self._actor.withdraw.remote(ticket)
                late = (yield withdrawn) if handle is None else (yield handle)
                if late:
                    yield self._actor.put_back.remote(late)
            raise
        if items is None:
            raise QueueClosedError("the queue is shut down and has no items left.")
        if not items:
            raise QueueEmptyError(f"the queue had no item within {timeout or 0:g} s.")
        return cast("list[T]", items)

    def _asking(self, answer: Callable[[int, int], R]) -> Steps[R]:
        size, most = yield self._actor.size.remote()
        return answer(size, most)

    def _shutting(self, immediate: bool) -> Steps[None]:
        yield self._actor.shutdown.remote(immediate)

    def _run(self, steps: Steps[R]) -> Coroutine[Any, Any, R]:
        if is_in_task() and not is_loop_running():
            return cast("Coroutine[Any, Any, R]", _run_blocking(steps))
        return _run_on_loop(steps)


def _restored(cls: type[Queue[Any]], actor: ActorHandle[Any]) -> Queue[Any]:
    queue = cls.__new__(cls)
    queue._actor = actor
    return for_consumer(queue)  # type: ignore[no-any-return]


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and timeout != 0:
        check_seconds("timeout", timeout)


def _run_blocking(steps: Any) -> Any:
    from aiogpu.api.results.wait import get

    step: Callable[[Any], Any] = steps.send
    value: Any = None
    while True:
        # An interrupt may come at any point, and must reach the steps.
        try:
            value, step = get(step(value)), steps.send
        except StopIteration as end:
            return end.value
        except BaseException as error:
            if steps.gi_frame is None:
                raise  # the steps raised it
            step, value = steps.throw, error


_unfinished: Final[set[asyncio.Task[Any]]] = set()
"""Cancelled gets that may still have items to put back."""


async def _run_on_loop(steps: Steps[R], stop: BaseException | None = None) -> R:
    """Run the steps; `stop` is an error to throw into them first."""
    from asyncio import CancelledError, ensure_future, wait

    step: Callable[[Any], Any] = steps.send if stop is None else steps.throw
    value: Any = stop
    while True:
        try:
            handle = step(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            await wait([handle])
            step, value = steps.send, handle.result()
        except CancelledError as error:
            if stop is not None:
                step, value = steps.throw, error
                continue
            # A second cancel must not end these steps.
            rest = ensure_future(_run_on_loop(steps, error))
            _unfinished.add(rest)
            rest.add_done_callback(_unfinished.discard)
            await wait([rest])
            raise
        except BaseException as error:  # noqa: BLE001 - the steps raise it
            step, value = steps.throw, error
