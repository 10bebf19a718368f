"""Handles without an event loop: what `.remote()` gives in a plain task.

A plain function that runs as a task has no loop, so it waits by `aiogpu.get`. asyncio
stays out of this file: importing it would cost such a task more than it does.
"""

from __future__ import annotations

import sys
import time
from _thread import get_ident
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

from aiogpu.api.options import check_seconds
from aiogpu.engines import nested
from aiogpu.engines.base import error_inside_task
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Failed
from aiogpu.wire.payload import load_result
from aiogpu.worker.context import passing

if TYPE_CHECKING:
    from types import TracebackType

    from aiogpu.api.handle import Handle
    from aiogpu.engines.family import Family, Host
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
        "__weakref__",
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
        self.child = 0
        self.family = family
        self._state = "pending"
        self._payload: bytes | None = None
        self._value: T | None = None
        self._error: Exception | None = None
        self._trace: TracebackType | None = None

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

    def cancel(self) -> bool:
        """Stop the work; False if it had ended before."""
        if self.done():
            return False
        nested.current_family().withdraw(self.child)
        self._state = "cancelled"
        return True

    def why(self) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {self.task_name}")

    def receive(self, payload: bytes) -> None:
        """Take the pickled result; called by the engine."""
        self._state, self._payload = "finished", payload

    def reject(self, failed: Failed) -> None:
        """Take what the child's worker says of its failure; called by the engine."""
        self._refuse(unpack_failure(failed, self.task_name))

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by an engine of this process."""
        self._refuse(error)
        self.family.upsets += 1

    def abandon(self) -> None:
        """Learn that the task has ended first; called by the engine."""
        self._refuse(abandoned(self.task_name))

    def _refuse(self, error: Exception) -> None:
        self._error, self._trace = error, error.__traceback__
        self._state = "failed"

    @property
    def has_failed(self) -> bool:
        """Whether there will be no result."""
        return self._state in ("failed", "cancelled")

    def result(self) -> T:
        """The result of a child that has ended; see `get` for waiting.

        Raises:
            TaskCancelledError: it was cancelled.
            MisuseError: it has not ended.
            DeserializationError: its result cannot be unpickled in this process.
        """
        if not self.done():
            raise MisuseError(f"{self.task_name} has not ended; aiogpu.get() waits.")
        if self.cancelled():
            raise TaskCancelledError(f"{self.task_name} was cancelled.")
        if self._error is not None:
            # Else each raise would add its frames to those of the last.
            raise self._error.with_traceback(self._trace)
        if self._payload is not None:
            payload, self._payload = self._payload, None
            try:
                self._value = load_result(payload)
            except DeserializationError as error:
                self._state, self._error = "failed", error
                raise
        return self._value  # type: ignore[return-value]


def abandoned(task_name: str) -> TaskCancelledError:
    """The error of a child that ends with the task that has started it."""
    return TaskCancelledError(
        f"{task_name} was stopped, since the task that had started it has ended."
    )


def submit_child(site: Site, payload: bytes) -> Any:
    """Start a child of the task that runs; gives the kind of handle that fits.

    Raises:
        MisuseError: no task runs, but what one has left behind.
    """
    if is_loop_running():
        import asyncio

        from aiogpu.api.nested import session_of_task

        return session_of_task(asyncio.get_running_loop()).submit(site, payload)
    handle: BlockingHandle[Any] = BlockingHandle(site.spec.name, nested.family())
    handle.child = nested.submit(site, payload, handle)
    return handle


def submit_to(host: Host, site: Site, payload: bytes) -> Any:
    """The same where tasks run in their program's process."""
    start = partial(host.submit, site, payload)
    return handle_by(host, site.spec.name, start)


def handle_by(host: Host, name: str, start: Callable[[Any], int]) -> Any:
    """The kind of handle that fits, of what was started for it.

    Args:
        host: of the task whose code asks.
        name: what the handle is called.
        start: is given who waits for the end; gives a number.
    """
    handle: Any
    if is_loop_running():
        import asyncio

        from aiogpu.api.nested import ChildHandle

        loop = asyncio.get_running_loop()
        handle = ChildHandle(name, host, loop, host.waits)
    else:
        handle = BlockingHandle(name, host)
    receiver = handle
    if passing:
        from aiogpu.api.actor_link import carrying

        receiver = carrying(handle)
    number = start(receiver)
    if isinstance(handle, BlockingHandle):
        handle.child = number
    else:
        handle.task_id = number
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
        Exception: what one of them has raised, as soon as it has; the others go on.
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
    in_time = _wait(handles, deadline)
    for one in handles:
        if one.has_failed:
            one.result()
    if not in_time:
        raise TaskTimeoutError(_late(handles, timeout))
    results = [one.result() for one in handles]
    return results if isinstance(handle, list | tuple) else results[0]


def _wait(handles: list[BlockingHandle[Any]], deadline: float | None) -> bool:
    """Until all have ended or one has failed; False if time is up before."""
    pending = [one for one in handles if not one.done()]
    if not pending or any(one.has_failed for one in handles):
        return True
    family, waiter = nested.current_family(), get_ident()
    for one in pending:
        if one.family is not family:
            raise MisuseError(
                f"the handle of {one.task_name} belongs to another task; aiogpu.get() "
                f"waits for what the running task has started."
            )
    family.note_wait(waiter, tuple(one.child for one in pending))
    try:
        return family.wait_until(_Countdown(family, pending).is_over, deadline)
    finally:
        if all(one.done() for one in handles):
            family.end_wait(waiter)
        else:
            # The driver cannot know that nobody waits any more.
            family.note_wait(waiter, ())


class _Countdown:
    """Whether a wait is over, at no more than one look at each handle."""

    def __init__(self, family: Family, pending: list[BlockingHandle[Any]]) -> None:
        self._family = family
        self._pending = list(pending)
        self._upsets = -1

    def is_over(self) -> bool:
        pending, upsets = self._pending, self._family.upsets
        while pending and pending[-1]._state != "pending":
            if pending.pop().has_failed:
                # Another thread may have found that it cannot be unpickled.
                return True
        if upsets != self._upsets:
            self._upsets = upsets
            return not pending or any(one.has_failed for one in pending)
        return not pending


def is_loop_running() -> bool:
    """Whether an event loop runs in this thread; imports nothing to find out."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _late(handles: list[BlockingHandle[Any]], timeout: float | None) -> str:
    late = [one.task_name for one in handles if not one.done()]
    if not late:
        # Where tasks run in this thread, one may have ended too late.
        return f"{handles[-1].task_name} ended after the {timeout:g} s of aiogpu.get()."
    return (
        f"{len(late)} of {len(handles)} tasks did not end within the {timeout:g} s of "
        f"aiogpu.get(), {late[0]} for one; they go on."
    )


def _wrong(given: object) -> str:
    kind = type(given).__name__
    if kind in ("Stream", "BlockingStream"):
        return (
            f"aiogpu.get() was given {given!r}; iterate it, its items come one by one."
        )
    if kind in ("Handle", "ChildHandle"):
        return (
            "aiogpu.get() waits in plain tasks, for what they have started; this "
            "handle belongs to an event loop: await it there."
        )
    return (
        f"aiogpu.get() was given {given!r}; give it what .remote() has returned in "
        f"this task, or a list of such."
    )
