"""`get`, `wait` and `as_completed`.

`wait` and `as_completed` return handles and unpickle no result. Cancelling them cancels
no work: while they wait for a handle its work goes on, even if all tasks that awaited
the handle were cancelled. Plain tasks use this module too, so asyncio is imported late.
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

from aiogpu.api.options import check_duration, whole_number
from aiogpu.api.results.base import HandleBase, cut_frames
from aiogpu.api.results.blocking import (
    BlockingHandle,
    await_end,
    block,
    blocks_loop,
    check_client,
    fetch,
)
from aiogpu.api.results.items import StreamBase
from aiogpu.api.usage_errors import NotPassedOn, options_of, refuse, waited_for
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
"""Seconds that a plain task reads arrived messages if its timeout is 0."""


@overload
def get(handle: Handle[T], /, *, timeout: float | None = None) -> T: ...


@overload
def get(handle: Sequence[Handle[T]], /, *, timeout: float | None = None) -> list[T]: ...


def get(handle: Any, /, *, timeout: float | None = None, **unknown: Any) -> Any:
    """Wait for results in a plain task; its CPUs are free meanwhile.

    Args:
        handle: a handle that `.remote()` returned in this task, or a list of handles.
        timeout: seconds for all handles together; None waits without limit.
        **unknown: none; misspelt options are refused.

    Returns:
        The result, or a list of results in the order of the handles.

    Raises:
        OptionError: an option is unknown or invalid.
        MisuseError: an event loop is running in this thread; await the handle instead.
        Exception: the error of the first task that fails; the other tasks go on.
        TaskTimeoutError: the time is up; the tasks go on.
        DeadlockError: the wait could never end.
    """
    if unknown:
        refuse(unknown, {"timeout": timeout}, "get()")
    if is_loop_running():
        raise blocks_loop("aiogpu.get()")
    are_several = isinstance(handle, list | tuple)
    handles = list(handle) if are_several else [handle]
    del handle
    try:
        for item in handles:
            if not isinstance(item, BlockingHandle):
                raise MisuseError(_not_for_get(item))
        await_end(handles, timeout)
        results = [item.result() for item in handles]
    except BaseException as error:
        cut_frames(error)
        raise
    finally:
        item = None
        del handles  # see `BlockingHandle.result`
    return results if are_several else results[0]


def _not_for_get(given: object) -> str:
    if isinstance(given, StreamBase):
        return (
            f"aiogpu.get() takes handles, not {given!r}; iterate the stream, whose "
            f"items come one by one."
        )
    if isinstance(given, HandleBase):
        return (
            "aiogpu.get() is for plain tasks; this handle belongs to an event loop: "
            "write `await handle` there."
        )
    return (
        f"aiogpu.get() takes a handle that .remote() returned in this task, or a list "
        f"of handles, not {given!r}."
    )


class WaitResult(Protocol[T]):
    """The result of `wait`: `ready, pending = await aiogpu.wait(handles)`.

    In a plain task, which has no event loop, `wait` returns the two lists themselves.
    """

    def __await__(
        self,
    ) -> Generator[Any, None, tuple[list[Handle[T]], list[Handle[T]]]]:
        """Wait on an event loop."""

    def __iter__(self) -> Iterator[list[Handle[T]]]:
        """Iterate over the two lists, ready and pending handles."""


@options_of("wait()")
def wait(
    handles: Collection[Handle[T]],
    /,
    *,
    num_returns: int = 1,
    timeout: float | None = None,
) -> WaitResult[T]:
    """Wait until `num_returns` of the handles are done; return these and the others.

    `ready, pending = await aiogpu.wait(handles)`; in a plain task without `await`, and
    its CPUs are free meanwhile. No result is fetched or unpickled, no error is raised,
    and cancelling the wait cancels no work.

    Args:
        handles: handles that `.remote()` returned, each once. If there are none, both
            lists are empty.
        num_returns: number of handles to wait for, from 1 to the number of handles;
            default 1.
        timeout: seconds, 0 or more; None waits without limit.

    Returns:
        Two lists, each in the order of `handles`: `num_returns` handles that are done,
        or fewer if the time is up; and all others, of which some may be done as well.

    Raises:
        MisuseError: `handles` contains another object, or a handle of another loop or
            task.
        OptionError: `num_returns` or `timeout` is invalid.
        NoLoopError: called neither on an event loop nor in a plain task.
    """
    checked = _checked("wait", handles)
    whole_number("num_returns", num_returns, 1, "a whole number of handles, 1 or more")
    if num_returns > len(checked) > 0:
        raise OptionError(
            f"num_returns={num_returns} is more than the number of handles, "
            f"{len(checked)}, that aiogpu.wait() was given."
        )
    if timeout is not None:
        what = "a number of seconds, 0 or more, or None to wait without limit"
        check_duration("timeout", timeout, what)
    if is_loop_running():
        return Waiting(_wait_on_loop(checked, num_returns, timeout))
    watch, deadline = Watch(checked), None
    if timeout is not None:
        deadline = time.monotonic() + (timeout or GLANCE)
    try:
        watch.until(num_returns, list(watch.pending), deadline)
    finally:
        watch.stop()
    return _split(checked, num_returns)  # type: ignore[return-value]


def as_completed(handles: Collection[Handle[T]], /) -> Completions[T]:
    """Return an iterator that yields handles as they end.

    `async for handle in aiogpu.as_completed(handles)`; in a plain task without `async`,
    and its CPUs are free while it waits. No result is fetched or unpickled, no error is
    raised, and leaving the loop cancels no work.

    Args:
        handles: handles that `.remote()` returned, each once.

    Raises:
        MisuseError: `handles` contains another object, or a handle of another loop or
            task.
        NoLoopError: called neither on an event loop nor in a plain task.
    """
    return Completions(_checked("as_completed", handles))


def _split(handles: list[Any], count: int) -> Lists:
    """Return at most `count` handles that are done, and all others."""
    ready: list[Any] = []
    pending: list[Any] = []
    for handle in handles:
        is_ready = len(ready) < count and handle.done()
        (ready if is_ready else pending).append(handle)
    return ready, pending


# Checks of handles.


def _checked(name: str, argument: Any) -> list[Any]:
    """Return the handles as a list, after checking that the caller can wait for them.

    Raises:
        MisuseError: an item is not a handle, belongs to another loop or task, or occurs
            twice.
        NoLoopError: called neither on an event loop nor in a plain task.
    """
    what = f"aiogpu.{name}()"
    if hasattr(argument, "task_name"):
        raise MisuseError(
            f"{what} takes a list of handles, not the single handle of "
            f"{argument.task_name}; write `await handle`, or pass a list."
        )
    if isinstance(argument, str | bytes) or not hasattr(argument, "__iter__"):
        raise MisuseError(
            f"{what} takes a list of handles that .remote() returned, not {argument!r}."
        )
    handles = list(argument)
    for handle in handles:
        if not hasattr(handle, "task_name"):
            raise MisuseError(
                f"{what} was given a list that contains {handle!r}, which is not a "
                f"handle; pass handles that .remote() returned. For other futures use "
                f"asyncio.wait()."
            )
    (_check_on_loop if is_loop_running() else _check_in_task)(what, handles)
    if len(set(handles)) < len(handles):
        twice = next(handle for handle in handles if handles.count(handle) > 1)
        raise MisuseError(
            f"{what} was given {twice!r} more than once; pass each handle once."
        )
    return handles


def _check_on_loop(what: str, handles: list[Any]) -> None:
    import asyncio

    from aiogpu.api.results.handle import Handle

    loop = asyncio.get_running_loop()
    for handle in handles:
        if not isinstance(handle, Handle):
            raise MisuseError(
                f"the handle of {handle.task_name} was made in a plain function, "
                f"without an event loop; call {what} there as well."
            )
        if handle.get_loop() is not loop:
            raise MisuseError(
                f"the handle of {handle.task_name} belongs to another event loop; "
                f"call {what} where .remote() was called."
            )


def _check_in_task(what: str, handles: list[Any]) -> None:
    for handle in handles:
        if not isinstance(handle, BlockingHandle):
            raise NoLoopError(
                f"no event loop is running in this thread, and the handle of "
                f"{handle.task_name} belongs to one; call {what} on that loop."
            )
    fetch(handles)
    try:
        client = client_of_task()
    except NodeError:
        from aiogpu.api.session import no_loop

        raise no_loop(what) from None
    check_client(what, handles, client)


class Watch:
    """Watches handles and notes which have ended.

    Does not refer to the user's iterator. In plain code a handle may end in any thread.

    Attributes:
        ended: handles that have ended and were not yet returned.
        pending: handles that have not ended.
        loop: the event loop of the handles; None in plain code.
        waiter: set to wake the waiting asyncio task; None if no task waits.
    """

    def __init__(self, handles: list[Any]) -> None:
        self.ended: deque[Any] = deque()
        self.pending: dict[Any, None] = dict.fromkeys(handles)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[None] | None = None
        if is_loop_running():
            from asyncio import get_running_loop

            self.loop = get_running_loop()
        self._count = 1
        self._in_turn = handles[::-1]
        for handle in handles:
            if not handle.done():
                # `add_done_callback` would tell the node that the task waits, even
                # while it does not.
                handle.watch(self._note)
            if handle.done():
                self._note(handle)

    def _note(self, handle: Any) -> None:
        if self.pending.pop(handle, handle) is None:
            self.ended.append(handle)
        if len(self.ended) >= self._count:
            self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def first(self) -> list[Any]:
        """Return the first handle that has not ended, if any.

        The node must only know that the task waits; one handle is enough. If there is
        none, the callback that says so may be to come.
        """
        in_turn = self._in_turn
        while in_turn and in_turn[-1].done():
            in_turn.pop()
        return in_turn[-1:]

    def until(
        self, count: int, awaited: list[Any], deadline: float | None = None
    ) -> None:
        """Wait in plain code until `count` handles have ended or the time is up.

        `awaited` are the handles of which the node is told.
        """
        if len(self.ended) < count and awaited:
            block(
                client_of_task(),
                tuple(handle.task_id for handle in awaited),
                lambda: len(self.ended) >= count,
                lambda: all(handle.done() for handle in awaited),
                deadline,
            )

    async def wait(
        self, count: int, awaited: list[Any], timeout: float | None = None
    ) -> None:
        """Wait on the event loop; see `until`."""
        if len(self.ended) >= count or not self.pending:
            return
        from aiogpu.api.results.handle import check_loop

        loop = self.loop
        assert loop is not None, self
        check_loop(loop, "the next handle of as_completed()")
        timer = None if timeout is None else loop.call_later(timeout, self._wake)
        self._count, self.waiter = count, loop.create_future()
        told = [handle for handle in awaited if handle.client.has_waits]
        for handle in told:
            handle.client.begin_wait(handle)
        try:
            await self.waiter
        finally:
            self.waiter = None
            for handle in told:
                handle.client.end_wait(handle)
            if timer is not None:
                timer.cancel()

    def stop(self) -> None:
        """Stop watching."""
        for handle in list(self.pending):
            handle.unwatch(self._note)

    def stop_soon(self) -> None:
        """Stop watching, from any thread."""
        if self.loop is None:
            self.stop()
        else:
            with suppress(RuntimeError):  # the loop is closed: no callback will run
                self.loop.call_soon_threadsafe(self.stop)


# On an event loop.


class Waiting(Coroutine[Any, Any, Lists]):
    """The coroutine of `wait`. Unpacking it raises, and says that `await` is missing.

    Ray's `wait` is called without `await`.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Lists]) -> None:
        self._coroutine = coroutine

    def __iter__(self) -> NoReturn:
        self.close()
        raise MisuseError(
            "aiogpu.wait() must be awaited on an event loop: write `ready, pending = "
            "await aiogpu.wait(handles)`."
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
    watch = Watch(handles)
    try:
        if timeout == 0:
            from asyncio import sleep

            await sleep(0)  # lets the loop read messages that have arrived
        else:
            await watch.wait(count, list(watch.pending), timeout)
    finally:
        watch.stop()
    return _split(handles, count)


_wait_on_loop.__qualname__ = "wait"  # for Python's warnings


class Completions(NotPassedOn, Generic[T]):
    """The result of `as_completed`: an async iterator, in plain tasks an iterator.

    Its length is the number of all handles. Its truth value is always True.
    """

    _PASS_INSTEAD = "pass its handles"

    def __init__(self, handles: list[Any]) -> None:
        self._total = len(handles)
        self._watch = Watch(handles)

    def __repr__(self) -> str:
        watch = self._watch
        return (
            f"<as_completed: {len(watch.pending) + len(watch.ended)} handles to come>"
        )

    def __len__(self) -> int:
        """Return the number of all handles, including those already yielded."""
        return self._total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Handle[T]]:
        if self._watch.loop is not None:
            raise MisuseError(
                "a plain `for` would block the event loop; write `async for handle in "
                "aiogpu.as_completed(handles)`."
            )
        return self

    def __next__(self) -> Handle[T]:
        watch = self._watch
        watch.until(1, watch.first())
        if not watch.ended:
            raise StopIteration
        return watch.ended.popleft()  # type: ignore[no-any-return]

    def __aiter__(self) -> AsyncIterator[Handle[T]]:
        if self._watch.loop is None:
            raise MisuseError(
                "these handles were made in a plain function, without an event loop; "
                "write `for handle in aiogpu.as_completed(handles)`."
            )
        return self

    async def __anext__(self) -> Handle[T]:
        watch = self._watch
        if watch.waiter is not None:
            raise waited_for("handle of this as_completed()")
        while not watch.ended:
            if not watch.pending:
                raise StopAsyncIteration
            await watch.wait(1, watch.first())
        return watch.ended.popleft()  # type: ignore[no-any-return]

    def __del__(self) -> None:
        # There is no attribute if the constructor refused the arguments.
        watch = getattr(self, "_watch", None)
        if watch is not None and watch.pending:
            watch.stop_soon()
