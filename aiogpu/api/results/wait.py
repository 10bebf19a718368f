"""`get`, `wait` and `as_completed`: waiting for results, and which have ended.

`wait` and `as_completed` return the handles themselves. They unpickle no result, and
being cancelled they cancel no work. While they wait for a handle its work goes on, even
if all tasks that awaited the handle were cancelled. Plain tasks use this module too, so
asyncio is imported late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import suppress
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NoReturn,
    Protocol,
    TypeVar,
    overload,
)

from aiogpu.api.calls import Putting
from aiogpu.api.options import check_duration, whole_number
from aiogpu.api.results.blocking import (
    BlockingHandle,
    HandleBase,
    StreamBase,
    await_end,
    block,
    blocks_loop,
    check_client,
    fetch,
)
from aiogpu.api.usage_errors import options_of, refuse
from aiogpu.client.current import client_of_task, is_loop_running
from aiogpu.errors import (
    MisuseError,
    NodeError,
    NoLoopError,
    OptionError,
)

if TYPE_CHECKING:
    import asyncio

    from aiogpu.api.results.handle import Handle


T = TypeVar("T")


Lists = tuple[list[Any], list[Any]]


GLANCE: Final = 0.001
"""Seconds that a plain task reads what has arrived if its timeout is 0."""


@overload
def get(handle: Handle[T], /, *, timeout: float | None = None) -> T: ...


@overload
def get(handle: Sequence[Handle[T]], /, *, timeout: float | None = None) -> list[T]: ...


def get(handle: Any, /, *, timeout: float | None = None, **unknown: Any) -> Any:
    """Return results in a plain task; waiting for them releases its CPUs.

    Args:
        handle: what `.remote()` gave in this task, or a list of such.
        timeout: seconds; None waits as long as it takes.
        **unknown: none; they are misspelt.

    Returns:
        The result, or a list of results in the order of the handles.

    Raises:
        OptionError: an option is unknown or ill-valued.
        MisuseError: an event loop runs here: await the handle instead.
        Exception: what one of them has raised, as soon as it has; the others go on.
        TaskTimeoutError: time was up; what was waited for goes on.
        DeadlockError: the wait could never end.
    """
    if unknown:
        refuse(unknown, {"timeout": timeout}, "get()")
    if isinstance(handle, Putting):
        return handle.handle
    if is_loop_running():
        raise blocks_loop("aiogpu.get()")
    are_several = isinstance(handle, list | tuple)
    handles = list(handle) if are_several else [handle]
    del handle
    try:
        for one in handles:
            if not isinstance(one, BlockingHandle):
                raise MisuseError(_not_for_get(one))
        await_end(handles, timeout)
        results = [one.result() for one in handles]
    finally:
        one = None
        del handles  # see `BlockingHandle.result`
    return results if are_several else results[0]


def _not_for_get(given: object) -> str:
    if isinstance(given, StreamBase):
        return (
            f"aiogpu.get() was given {given!r}; iterate it, its items come one by one."
        )
    if isinstance(given, HandleBase):
        return (
            "aiogpu.get() waits in plain tasks, for what they have started; this "
            "handle belongs to an event loop: await it there."
        )
    return (
        f"aiogpu.get() was given {given!r}; give it what .remote() has returned in "
        f"this task, or a list of such."
    )


class Parted(Protocol[T]):
    """The result of `wait`: `ready, pending = await aiogpu.wait(handles)`.

    In a plain task, which has no event loop, it is the two lists themselves.
    """

    def __await__(
        self,
    ) -> Generator[Any, None, tuple[list[Handle[T]], list[Handle[T]]]]:
        """Wait on an event loop."""

    def __iter__(self) -> Iterator[list[Handle[T]]]:
        """The lists of the ready and of the pending ones."""


@options_of("wait()")
def wait(
    handles: Collection[Handle[T]],
    /,
    *,
    num_returns: int = 1,
    timeout: float | None = None,
) -> Parted[T]:
    """Wait until so many of some handles have ended, and say which.

    `ready, pending = await aiogpu.wait(handles)`; in a plain task without the `await`,
    and its CPUs are free meanwhile. It only looks: no result is fetched or unpickled,
    an error stays in its handle, and cancelling the wait cancels no work.

    Args:
        handles: what `.remote()` gave; each once. Of none both lists are empty.
        num_returns: how many are waited for, 1 or more, and no more than there are
            handles if there are any.
        timeout: seconds, 0 or more; None waits as long as it takes.

    Returns:
        Two lists, each in the order of `handles`: `num_returns` that have ended, or
        fewer if time was up, and all others, of which some may have ended too.

    Raises:
        MisuseError: it was given something else, or handles of another loop or task.
        OptionError: `num_returns` or `timeout` is ill-valued.
        NoLoopError: this is neither code on an event loop nor a plain task.
    """
    found = _checked("wait", handles)
    whole_number("num_returns", num_returns, 1, "a whole number of handles, 1 or more")
    if num_returns > len(found) > 0:
        raise OptionError(
            f"num_returns={num_returns} is more than the {len(found)} handles that "
            f"aiogpu.wait() was given."
        )
    if timeout is not None:
        what = "a number of seconds, 0 or more, or None to wait as long as it takes"
        check_duration("timeout", timeout, what)
    if is_loop_running():
        return Waiting(_wait_on_loop(found, num_returns, timeout))
    look, deadline = _Look(found), None
    if timeout is not None:
        deadline = time.monotonic() + (timeout or GLANCE)
    try:
        look.until(num_returns, list(look.pending), deadline)
    finally:
        look.leave()
    return _parted(found, num_returns)  # type: ignore[return-value]


def as_completed(handles: Collection[Handle[T]], /) -> Completions[T]:
    """Hand back handles one by one, each when it has ended.

    `async for handle in aiogpu.as_completed(handles)`; in a plain task without the
    `async`, and its CPUs are free while it waits. It only looks: no result is fetched
    or unpickled, an error stays in its handle, and leaving the loop cancels no work.

    Args:
        handles: what `.remote()` gave; each once.

    Raises:
        MisuseError: it was given something else, or handles of another loop or task.
        NoLoopError: this is neither code on an event loop nor a plain task.
    """
    return Completions(_checked("as_completed", handles))


def _parted(handles: list[Any], count: int) -> Lists:
    """At most `count` handles that have ended, and all others."""
    ready: list[Any] = []
    pending: list[Any] = []
    for handle in handles:
        takes = len(ready) < count and handle.done()
        (ready if takes else pending).append(handle)
    return ready, pending


# Which handles can be waited for here.


def _checked(name: str, given: Any) -> list[Any]:
    """The handles as a list, all of which can be waited for here.

    Raises:
        MisuseError: one is no handle, belongs elsewhere, or is there twice.
        NoLoopError: nothing can be waited for here.
    """
    what = f"aiogpu.{name}()"
    if hasattr(given, "task_name"):
        raise MisuseError(
            f"{what} was given one handle, of {given.task_name}; give it a list of "
            f"handles, or write `await handle`."
        )
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise MisuseError(
            f"{what} was given {given!r}; give it a list of what .remote() has given."
        )
    handles = list(given)
    (_check_on_loop if is_loop_running() else _check_here)(what, handles)
    if len(set(handles)) < len(handles):
        twice = next(one for one in handles if handles.count(one) > 1)
        raise MisuseError(
            f"{what} was given {twice!r} more than once; give it each handle once."
        )
    return handles


def _check_on_loop(what: str, handles: list[Any]) -> None:
    import asyncio

    from aiogpu.api.results.handle import Handle

    loop = asyncio.get_running_loop()
    for one in handles:
        if not hasattr(one, "task_name"):
            raise _no_handle(what, one)
        if not isinstance(one, Handle):
            raise MisuseError(
                f"the handle of {one.task_name} was made in a plain function, where "
                f"no event loop runs; {what} must be called there too."
            )
        if one.get_loop() is not loop:
            raise MisuseError(
                f"the handle of {one.task_name} belongs to another event loop; "
                f"call {what} where .remote() was called."
            )


def _check_here(what: str, handles: list[Any]) -> None:
    for one in handles:
        if not hasattr(one, "task_name"):
            raise _no_handle(what, one)
        if not isinstance(one, BlockingHandle):
            raise NoLoopError(
                f"{what} was called where no event loop runs; the handle of "
                f"{one.task_name} belongs to one: call it there."
            )
    fetch(handles)
    try:
        client = client_of_task()
    except NodeError:
        from aiogpu.api.session import no_loop

        raise no_loop(what) from None
    check_client(what, handles, client)


def _no_handle(what: str, one: object) -> MisuseError:
    return MisuseError(
        f"{what} was given a list with {one!r} in it, which is no handle; give it "
        f"what .remote() has returned. For other futures there is asyncio.wait()."
    )


class _Look:
    """Notes which handles have ended. It does not refer to the user's iterator.

    This class is for plain code, where a handle may end in any thread.

    Attributes:
        ended: handles that have ended and were not returned yet.
        pending: handles that have not ended.
    """

    def __init__(self, handles: list[Any]) -> None:
        self.ended: deque[Any] = deque()
        self.pending: dict[Any, None] = dict.fromkeys(handles)
        self._in_turn = handles[::-1]
        for handle in handles:
            if not handle.done():
                self._attach(handle)
            if handle.done():
                self._note(handle)

    def _note(self, handle: Any) -> None:
        if self.pending.pop(handle, handle) is None:
            self.ended.append(handle)

    def _attach(self, handle: Any) -> None:
        handle.on_end += (self._note,)

    def _detach(self, handle: Any) -> None:
        handle.on_end = tuple(one for one in handle.on_end if one != self._note)

    def until(
        self, count: int, awaited: list[Any], deadline: float | None = None
    ) -> None:
        """Wait until `count` have ended, or `timeout`; the node knows of the wait."""
        if len(self.ended) < count and awaited:
            block(
                client_of_task(),
                tuple(one.task_id for one in awaited),
                lambda: len(self.ended) >= count,
                lambda: all(one.done() for one in awaited),
                deadline,
            )

    def first(self) -> Any:
        """The first handle that has not ended; None if all have."""
        in_turn = self._in_turn
        while in_turn and in_turn[-1].done():
            in_turn.pop()
        return in_turn[-1] if in_turn else None

    def leave(self) -> None:
        """Stop watching."""
        for handle in list(self.pending):
            self._detach(handle)

    leave_soon = leave


# On an event loop.


class Waiting(Coroutine[Any, Any, Lists]):
    """The coroutine of `wait`; unpacking it says that its `await` was forgotten.

    Ray's `wait` is called without `await`.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Lists]) -> None:
        self._coroutine = coroutine

    def __iter__(self) -> NoReturn:
        self.close()
        raise MisuseError(
            "aiogpu.wait() waits on the event loop here: write `ready, pending = await "
            "aiogpu.wait(handles)`."
        )

    def __await__(self) -> Generator[Any, Any, Lists]:
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


async def _wait_on_loop(
    handles: list[Handle[Any]], count: int, timeout: float | None
) -> Lists:
    look = _LookOnLoop(handles)
    try:
        if timeout == 0:
            from asyncio import sleep

            await sleep(0)  # lets the loop read what has arrived
        else:
            await look.wait(count, list(look.pending), timeout)
    finally:
        look.leave()
    return _parted(handles, count)


_wait_on_loop.__qualname__ = "wait"  # for Python's warnings


class _LookOnLoop(_Look):
    """Looks at handles on an event loop.

    Attributes:
        loop: that loop.
        waiter: set when the asyncio task that waits shall look again.
    """

    def __init__(self, handles: list[Handle[Any]]) -> None:
        import asyncio

        from aiogpu.api.results.handle import Handle

        self.loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[None] | None = None
        self._count = 1
        self._kind = Handle
        super().__init__(handles)

    def _attach(self, handle: Any) -> None:
        # `ChildHandle.add_done_callback` would tell the node that the task waits, also
        # while it does not.
        self._kind.add_done_callback(handle, self._note)

    def _detach(self, handle: Any) -> None:
        self._kind.remove_done_callback(handle, self._note)

    def _note(self, handle: Any) -> None:
        super()._note(handle)
        if len(self.ended) >= self._count:
            self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def leave_soon(self) -> None:
        """Stop watching, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody is told anything
            self.loop.call_soon_threadsafe(self.leave)

    async def wait(
        self, count: int, awaited: list[Any], timeout: float | None = None
    ) -> None:
        """Wait until `count` have ended, or `timeout`; the node knows of the wait."""
        if len(self.ended) >= count or not awaited:
            return
        waits: Any = getattr(awaited[0], "_waits", None)
        told = [one.task_id for one in awaited] if waits is not None else []
        timer = None if timeout is None else self.loop.call_later(timeout, self._wake)
        self._count, self.waiter = count, self.loop.create_future()
        for task in told:
            waits.begin_wait(task)
        try:
            await self.waiter
        finally:
            self.waiter = None
            for task in told:
                waits.end_wait(task)
            if timer is not None:
                timer.cancel()


class Completions(Generic[T]):
    """The result of `as_completed`: an async iterator, in plain tasks a plain one.

    Its length is the number of handles; it is true even if that is 0.
    """

    def __init__(self, handles: list[Any]) -> None:
        self._total = len(handles)
        self._look = _LookOnLoop(handles) if is_loop_running() else _Look(handles)

    def __repr__(self) -> str:
        look = self._look
        return f"<as_completed: {len(look.pending) + len(look.ended)} handles to come>"

    def __len__(self) -> int:
        """Return how many handles there are in all, those that were given included."""
        return self._total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Handle[T]]:
        if isinstance(self._look, _LookOnLoop):
            raise MisuseError(
                "a plain loop would block the event loop that runs here; write `async "
                "for handle in aiogpu.as_completed(handles)`."
            )
        return self

    def __next__(self) -> Handle[T]:
        look = self._look
        if not look.ended and (first := look.first()) is not None:
            # It stands for all: its task waits for one of them, and that is all that
            # the node must know.
            look.until(1, [first])
        if not look.ended:
            raise StopIteration
        return look.ended.popleft()  # type: ignore[no-any-return]

    def __aiter__(self) -> AsyncIterator[Handle[T]]:
        if not isinstance(self._look, _LookOnLoop):
            raise MisuseError(
                "these handles were made in a plain function, where no event loop "
                "runs; write `for handle in aiogpu.as_completed(handles)`."
            )
        return self

    async def __anext__(self) -> Handle[T]:
        look = self._look
        assert isinstance(look, _LookOnLoop), self
        if look.waiter is not None:
            raise MisuseError(
                "another asyncio task is waiting for the next handle of this "
                "as_completed(); let one task iterate."
            )
        while not look.ended:
            if not look.pending:
                raise StopAsyncIteration
            # The first stands for all: the node must know that it waits for one.
            await look.wait(1, [look.first()])
        return look.ended.popleft()  # type: ignore[no-any-return]

    def __del__(self) -> None:
        # The attribute is missing if the arguments were refused.
        look = getattr(self, "_look", None)
        if look is not None and look.pending:
            look.leave_soon()
