"""`wait` and `as_completed`: which of several handles have ended.

Both only look. They hand back the handles themselves, whose results nobody unpickles
before they are asked for, and stop nothing, also when they are themselves cancelled.
asyncio stays out of this file, for plain tasks; `api.wait_on_loop` has what a loop
needs.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from aiogpu.api.blocking_handle import BlockingHandle, Borrowed
from aiogpu.api.options import LONGEST_TIME
from aiogpu.api.usage_errors import no_handle, options_of, parted
from aiogpu.client.current import client_of_task, is_loop_running
from aiogpu.errors import MisuseError, NodeError, NoLoopError, OptionError

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle


T = TypeVar("T")


GLANCE: Final = 0.001
"""Seconds that a plain task looks for what has come, where it does not want to wait."""


class Parted(Protocol[T]):
    """What `wait` gives: `ready, pending = await aiogpu.wait(handles)`.

    In a plain task, which has no event loop, it is the two lists themselves.
    """

    def __await__(
        self,
    ) -> Generator[Any, None, tuple[list[Handle[T]], list[Handle[T]]]]:
        """Wait on an event loop."""
        ...

    def __iter__(self) -> Iterator[list[Handle[T]]]:
        """The lists of the ready and of the pending ones."""
        ...


class Completions(Protocol[T]):
    """What `as_completed` gives: an async iterator, in plain tasks a plain one."""

    def __aiter__(self) -> AsyncIterator[Handle[T]]:
        """Each handle, when it has ended."""
        ...

    def __iter__(self) -> Iterator[Handle[T]]:
        """Each handle, when it has ended."""
        ...

    def __len__(self) -> int:
        """Return how many handles there are in all, those that were given included."""
        ...


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
    _check_count(num_returns, len(found))
    if timeout is not None:
        _check_timeout(timeout)
    if is_loop_running():
        from aiogpu.api.wait_on_loop import wait_on_loop

        return wait_on_loop(found, num_returns, timeout)
    return _wait_here(found, num_returns, timeout)  # type: ignore[return-value]


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
    found = _checked("as_completed", handles)
    if is_loop_running():
        from aiogpu.api.wait_on_loop import CompletionsOnLoop

        return CompletionsOnLoop(found)
    return _CompletionsHere(found)  # type: ignore[return-value]


class _Look:
    """Notes which handles of plain code have ended; any thread may tell.

    Attributes:
        ended: those of which nobody was told yet.
    """

    def __init__(self, handles: list[BlockingHandle[Any]]) -> None:
        self.ended: deque[BlockingHandle[Any]] = deque()
        self._pending: dict[BlockingHandle[Any], None] = dict.fromkeys(handles)
        self._in_turn = handles[::-1]
        for handle in handles:
            if not handle.done():
                handle.on_end += (self._note,)
            if handle.done():
                self._note(handle)

    def _note(self, handle: BlockingHandle[Any]) -> None:
        if self._pending.pop(handle, handle) is None:
            self.ended.append(handle)

    def pending(self) -> list[BlockingHandle[Any]]:
        """Those that have not ended."""
        return list(self._pending)

    def first(self) -> BlockingHandle[Any] | None:
        """The first that has not ended; None if all have."""
        in_turn = self._in_turn
        while in_turn and in_turn[-1].done():
            in_turn.pop()
        return in_turn[-1] if in_turn else None

    def leave(self) -> None:
        """Look no more."""
        for handle in list(self._pending):
            handle.on_end = tuple(one for one in handle.on_end if one != self._note)


def _wait_here(
    handles: list[Any], count: int, timeout: float | None
) -> tuple[list[Any], list[Any]]:
    deadline = None
    if timeout is not None:
        deadline = time.monotonic() + (timeout or GLANCE)
    look = _Look(handles)
    try:
        if handles and len(look.ended) < count:
            _block(look.pending(), lambda: len(look.ended) >= count, deadline)
    finally:
        look.leave()
    return parted(handles, count)


class _CompletionsHere:
    """The handles of plain code, each when it has ended."""

    def __init__(self, handles: list[BlockingHandle[Any]]) -> None:
        self._total = len(handles)
        self._look = _Look(handles)

    def __len__(self) -> int:
        """Return how many handles there are in all, those that were given included."""
        return self._total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> _CompletionsHere:
        return self

    def __next__(self) -> BlockingHandle[Any]:
        look = self._look
        if not look.ended:
            first = look.first()
            if first is not None:
                # It stands for all: its task waits for one of them, and that is all
                # that the node must know.
                _block([first], lambda: len(look.ended) > 0, None)
        if not look.ended:
            raise StopIteration
        return look.ended.popleft()

    def __aiter__(self) -> _CompletionsHere:
        raise MisuseError(
            "these handles were made in a plain function, where no event loop runs; "
            "write `for handle in aiogpu.as_completed(handles)`."
        )

    def __del__(self) -> None:
        # It is missing where the arguments were refused.
        if hasattr(self, "_look"):
            self._look.leave()


def _block(
    handles: list[BlockingHandle[Any]],
    is_over: Callable[[], bool],
    deadline: float | None,
) -> None:
    """Wait in plain code until something is so, or time is up."""
    client, waiter = client_of_task(), get_ident()
    client.note_wait(waiter, tuple(one.child for one in handles))
    try:
        client.wait_until(is_over, deadline)
    finally:
        if all(one.done() for one in handles):
            client.end_wait(waiter)
        else:
            # The driver cannot know that nobody waits any more.
            client.note_wait(waiter, ())


def _checked(name: str, given: Any) -> list[Any]:
    """Handles that can be waited for here, as a list.

    Raises:
        MisuseError: they are none, or belong elsewhere, or one is there twice.
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
    if is_loop_running():
        from aiogpu.api.wait_on_loop import check_on_loop

        check_on_loop(what, handles)
    else:
        _check_here(what, handles)
    if len(set(handles)) < len(handles):
        twice = next(one for one in handles if handles.count(one) > 1)
        raise MisuseError(
            f"{what} was given {twice!r} more than once; give it each handle once."
        )
    return handles


def _check_here(what: str, handles: list[Any]) -> None:
    for one in handles:
        if not isinstance(one, BlockingHandle):
            if hasattr(one, "task_name"):
                raise NoLoopError(
                    f"{what} was called where no event loop runs; the handle of "
                    f"{one.task_name} belongs to one: call it there."
                )
            raise no_handle(what, one)
        if isinstance(one.owner, Borrowed):
            # Nobody tells how it ends to whoever does not want its value.
            one.owner.fetch(one)
    try:
        client = client_of_task()
    except NodeError:
        from aiogpu.api.session import no_loop

        raise no_loop(what) from None
    for one in handles:
        if one.client is not client:
            raise MisuseError(
                f"the handle of {one.task_name} belongs to another task; {what} waits "
                f"for what the running task has started."
            )


def _check_count(count: object, most: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionError(
            f"num_returns={count!r} must be a whole number of handles, 1 or more."
        )
    if count > most > 0:
        raise OptionError(
            f"num_returns={count} is more than the {most} handles that "
            f"aiogpu.wait() was given."
        )


def _check_timeout(timeout: object) -> None:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 0 <= timeout <= LONGEST_TIME:  # type: ignore[operator]
        raise OptionError(
            f"timeout={timeout!r} must be a number of seconds, 0 or more, or None to "
            f"wait as long as it takes. The most is {LONGEST_TIME:_}."
        )
