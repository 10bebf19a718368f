"""Handles without an event loop: what `.remote()` gives in a plain task.

A plain function that runs as a task has no loop, so it waits by `aiogpu.get`. asyncio
stays out of this file: importing it would cost such a task more than it does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

from aiogpu.api.options import check_seconds
from aiogpu.engines import nested
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Failed
from aiogpu.wire.payload import load_result
from aiogpu.worker.context import current

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.engines.nested import Family
    from aiogpu.runtime.call import Site

T = TypeVar("T")


class BlockingHandle(Generic[T]):
    """A child's result to be, in a plain function; see `get`.

    To type checkers `.remote()` gives a `Handle` everywhere.

    Attributes:
        task_name: name of the task.
        child: its number among the children of the task that has started it.
        family: all of these.
    """

    __slots__ = (
        "_countdown",
        "_error",
        "_payload",
        "_state",
        "_trace",
        "_value",
        "child",
        "family",
        "task_name",
    )

    def __init__(self, task_name: str, family: Family) -> None:
        self.task_name = task_name
        self.family = family
        self.child = 0
        self._state = "pending"
        self._payload: bytes | None = None
        self._value: T | None = None
        self._error: Exception | None = None
        self._trace: TracebackType | None = None
        self._countdown: _Countdown | None = None

    def __repr__(self) -> str:
        return f"<BlockingHandle {self.task_name} {self._state}>"

    def __bool__(self) -> NoReturn:
        raise MisuseError(
            f"a handle is not its result and has no truth value; write "
            f"aiogpu.get({self.task_name}.remote(...))."
        )

    def __await__(self) -> Generator[Any, None, T]:
        raise MisuseError(
            f"the handle of {self.task_name} was made in a plain function, where no "
            f"event loop runs; wait by aiogpu.get(handle)."
        )

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"the handle of {self.task_name} cannot be pickled in this version; "
            f"aiogpu.get() it and pass the value."
        )

    def done(self) -> bool:
        """Whether the task has ended or was cancelled."""
        return self._state != "pending"

    def cancelled(self) -> bool:
        """Whether `cancel` has stopped it."""
        return self._state == "cancelled"

    def failed(self) -> bool:
        """Whether it has ended, or was cancelled, without a result."""
        return self._state in ("failed", "cancelled")

    def cancel(self) -> bool:
        """Stop the work; False if it had ended before."""
        if self.done():
            return False
        self.family.withdraw(self.child)
        self._state = "cancelled"
        return True

    def receive(self, payload: bytes) -> None:
        """Take the pickled result; called by the engine."""
        self._state, self._payload = "finished", payload

    def reject(self, failed: Failed) -> None:
        """Take what the child's worker says of its failure; called by the engine."""
        self.fail(unpack_failure(failed, self.task_name))

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by the engine."""
        self._state = "failed"
        self._error, self._trace = error, error.__traceback__
        if self._countdown is not None:
            self._countdown.has_failed = True

    def result(self) -> T:
        """The result of a child that has ended; see `get` for waiting.

        Raises:
            TaskCancelledError: it was cancelled.
            DeserializationError: it cannot be unpickled in this process.
            MisuseError: it has not ended.
        """
        if not self.done():
            raise MisuseError(f"{self.task_name} has not ended; aiogpu.get() waits.")
        if self.cancelled():
            raise TaskCancelledError(f"{self.task_name} was cancelled.")
        if self._payload is not None:
            self._decode(self._payload)
        if self._error is not None:
            # Else each raise would add its frames to those of the last.
            raise self._error.with_traceback(self._trace)
        return self._value  # type: ignore[return-value]

    def _decode(self, payload: bytes) -> None:
        self._payload = None
        try:
            self._value = load_result(payload)
        except DeserializationError as error:
            self.fail(error)


def submit_child(site: Site, payload: bytes) -> Any:
    """Start a child of the task that runs; gives the kind of handle that fits.

    Raises:
        MisuseError: no task runs, but what one has left behind.
    """
    if not current.task:
        raise MisuseError(
            f"{site.spec.name}.remote() was called after the task had ended, by a "
            f"thread that it has left behind."
        )
    if is_loop_running():
        import asyncio

        from aiogpu.api.nested import session_of_task

        return session_of_task(asyncio.get_running_loop()).submit(site, payload)
    handle: BlockingHandle[Any] = BlockingHandle(site.spec.name, nested.children())
    handle.child = nested.submit(site, payload, handle)
    return handle


def submit_to(host: nested.Host, site: Site, payload: bytes) -> Any:
    """The same where tasks run in their program's process."""
    if is_loop_running():
        import asyncio

        from aiogpu.api.nested import ChildHandle

        loop = asyncio.get_running_loop()
        awaited: ChildHandle[Any] = ChildHandle(site.spec.name, host.waits, loop)
        awaited.task_id = host.submit(site, payload, awaited)
        return awaited
    handle: BlockingHandle[Any] = BlockingHandle(site.spec.name, host)
    handle.child = host.submit(site, payload, handle)
    return handle


@overload
def get(handle: Handle[T], /, *, timeout: float | None = None) -> T: ...


@overload
def get(handle: Sequence[Handle[T]], /, *, timeout: float | None = None) -> list[T]: ...


def get(handle: Any, /, *, timeout: float | None = None) -> Any:
    """Wait in a plain task for what it has started; its CPUs are free meanwhile.

    Args:
        handle: what `.remote()` gave in this task, or a list of such.
        timeout: seconds; None waits as long as it takes.

    Returns:
        The result, or a list of results in the order of the handles.

    Raises:
        MisuseError: an event loop runs here: await the handle instead.
        TaskTimeoutError: time was up; what was waited for goes on.
        DeadlockError: the wait could never end.
    """
    if is_loop_running():
        raise MisuseError(
            "aiogpu.get() would block the event loop that runs here; write `await "
            "handle`, or `await asyncio.gather(*handles)`."
        )
    deadline = None
    if timeout is not None:
        deadline = time.monotonic() + check_seconds("timeout", timeout)
    handles = list(handle) if isinstance(handle, list | tuple) else [handle]
    for one in handles:
        if not isinstance(one, BlockingHandle):
            raise MisuseError(_wrong(one))
    _raise_failure(handles)
    if not _wait(handles, deadline):
        raise TaskTimeoutError(_late(handles, timeout))
    _raise_failure(handles)
    results = [one.result() for one in handles]
    return results if isinstance(handle, list | tuple) else results[0]


def _raise_failure(handles: list[BlockingHandle[Any]]) -> None:
    """Raise what the first that has none gives for a result; others may still run."""
    for one in handles:
        if one.failed():
            one.result()


def _wait(handles: list[BlockingHandle[Any]], deadline: float | None) -> bool:
    """Until all have ended or one has failed; False if time is up before."""
    pending = [one for one in handles if not one.done()]
    if not pending:
        return True
    family = nested.family()
    for one in pending:
        if one.family is not family or not family.holds(one.child):
            raise MisuseError(
                f"the handle of {one.task_name} belongs to another task; aiogpu.get() "
                f"waits for what the running task has started."
            )
    family.note_wait(tuple(one.child for one in pending))
    countdown = _Countdown(pending)
    in_time = False
    try:
        in_time = family.wait_until(countdown.is_over, deadline)
    finally:
        if not in_time or not all(one.done() for one in pending):
            # The driver cannot know that nobody waits any more.
            family.note_wait(())
    return in_time


class _Countdown:
    """Asks each handle once that it is over, however many there are."""

    def __init__(self, pending: list[BlockingHandle[Any]]) -> None:
        self._left = list(pending)
        self.has_failed = False
        for one in pending:
            one._countdown = self

    def is_over(self) -> bool:
        left = self._left
        while left and left[-1].done():
            left.pop()
        return not left or self.has_failed


def is_loop_running() -> bool:
    """Whether an event loop runs in this thread; imports nothing to find out."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _late(handles: list[BlockingHandle[Any]], timeout: float | None) -> str:
    left = [one.task_name for one in handles if not one.done()]
    if not left:
        # Where tasks run in this thread, one may have ended too late.
        return f"{handles[-1].task_name} ended after the {timeout:g} s of aiogpu.get()."
    return (
        f"{len(left)} of {len(handles)} tasks did not end within the {timeout:g} s of "
        f"aiogpu.get(); they go on, {left[0]} and all."
    )


def _wrong(given: object) -> str:
    kind = type(given).__name__
    if kind in ("Handle", "ChildHandle"):
        return (
            "aiogpu.get() waits in plain tasks, for what they have started; this "
            "handle belongs to an event loop: await it there."
        )
    return (
        f"aiogpu.get() was given {given!r}; give it what .remote() has returned in "
        f"this task, or a list of such."
    )
