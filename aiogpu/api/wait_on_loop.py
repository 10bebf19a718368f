"""`wait` and `as_completed` on an event loop; see `api.wait`.

Who looks at a handle counts as somebody who wants its result: so the work goes on
although all who have awaited it were cancelled. Whoever stops looking cancels nothing.
This file imports asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any, NoReturn

from aiogpu.api.handle import Handle
from aiogpu.api.usage_errors import no_handle, parted
from aiogpu.errors import MisuseError

Parted = tuple[list[Handle[Any]], list[Handle[Any]]]


def check_on_loop(what: str, handles: list[Any]) -> None:
    """Raise `MisuseError` unless all are handles of the loop that runs."""
    loop = asyncio.get_running_loop()
    for one in handles:
        if isinstance(one, Handle):
            if one.get_loop() is not loop:
                raise MisuseError(
                    f"the handle of {one.task_name} belongs to another event loop; "
                    f"call {what} where .remote() was called."
                )
        elif hasattr(one, "task_name"):
            raise MisuseError(
                f"the handle of {one.task_name} was made in a plain function, where "
                f"no event loop runs; {what} must be called there too."
            )
        else:
            raise no_handle(what, one)


def wait_on_loop(
    handles: list[Handle[Any]], count: int, timeout: float | None
) -> Waiting:
    """Wait until so many have ended, or time is up."""
    return Waiting(wait(handles, count, timeout))


class Waiting(Coroutine[Any, Any, Parted]):
    """The coroutine of `wait`, which says so where its `await` was forgotten.

    Ray's own is called without.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Parted]) -> None:
        self._coroutine = coroutine

    def __iter__(self) -> NoReturn:
        self.close()
        raise MisuseError(
            "aiogpu.wait() waits on the event loop here: write `ready, pending = await "
            "aiogpu.wait(handles)`."
        )

    def __await__(self) -> Generator[Any, Any, Parted]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """See `collections.abc.Coroutine`."""
        self._coroutine.close()


async def wait(handles: list[Handle[Any]], count: int, timeout: float | None) -> Parted:
    """The same; named as what has called it, for Python's warnings."""
    pending = [handle for handle in handles if not handle.done()]
    missing = count - (len(handles) - len(pending))
    if missing > 0 and pending:
        if timeout == 0:
            await asyncio.sleep(0)  # what has come is read
        else:
            await _wait_for(pending, missing, timeout)
    return parted(handles, count)


async def _wait_for(
    pending: list[Handle[Any]], missing: int, timeout: float | None
) -> None:
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def note(_handle: Handle[Any]) -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            tell()

    def tell() -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if timeout is None else loop.call_later(timeout, tell)
    for handle in pending:
        handle.add_done_callback(note)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for handle in pending:
            handle.remove_done_callback(note)


class CompletionsOnLoop:
    """The handles of a loop, each when it has ended."""

    def __init__(self, handles: list[Handle[Any]]) -> None:
        self._total = len(handles)
        self._look = _Look(handles)

    def __len__(self) -> int:
        """Return how many handles there are in all, those that were given included."""
        return self._total

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<as_completed: {self._look.left} handles to come>"

    def __aiter__(self) -> CompletionsOnLoop:
        return self

    async def __anext__(self) -> Handle[Any]:
        look = self._look
        if look.waiter is not None:
            raise MisuseError(
                "another asyncio task is waiting for the next handle of this "
                "as_completed(); let one task iterate."
            )
        if not look.left:
            raise StopAsyncIteration
        while not look.ended:
            await look.news()
        look.left -= 1
        return look.ended.popleft()

    def __iter__(self) -> NoReturn:
        raise MisuseError(
            "a plain loop would block the event loop that runs here; write `async for "
            "handle in aiogpu.as_completed(handles)`."
        )

    def __del__(self) -> None:
        look = getattr(self, "_look", None)
        if look is not None and look.left:
            # Who drops the last reference may be any thread; a loop that is closed
            # refuses.
            with suppress(RuntimeError):
                look.loop.call_soon_threadsafe(look.leave)


class _Look:
    """Notes which handles have ended; it does not know the iterator that is the user's.

    Attributes:
        left: how many the iterator has not given.
        ended: those of them that have ended.
        waiter: set when the asyncio task that waits shall look again.
    """

    def __init__(self, handles: list[Handle[Any]]) -> None:
        self.loop = asyncio.get_running_loop()
        self.left = len(handles)
        self.ended: deque[Handle[Any]] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self._in_turn = handles[::-1]
        for handle in handles:
            if handle.done():
                self.ended.append(handle)
            else:
                # In a task that of its class would tell its node that it waits, also
                # while it does not.
                Handle.add_done_callback(handle, self._note)

    def _note(self, handle: Handle[Any]) -> None:
        self.ended.append(handle)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def news(self) -> None:
        """Wait until another one has ended."""
        in_turn = self._in_turn
        while in_turn and in_turn[-1].done():
            in_turn.pop()
        # The first stands for all: a task's node must know that it waits for one.
        first = in_turn[-1] if in_turn else None
        waits = getattr(first, "_waits", None)
        self.waiter = self.loop.create_future()
        if first is not None and waits is not None:
            waits.begin_wait(first.task_id)
        try:
            await self.waiter
        finally:
            self.waiter = None
            if first is not None and waits is not None:
                waits.end_wait(first.task_id)

    def leave(self) -> None:
        """Look no more."""
        for handle in self._in_turn:
            if not handle.done():
                Handle.remove_done_callback(handle, self._note)
