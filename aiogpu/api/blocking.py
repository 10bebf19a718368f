"""Handles without an event loop: what `.remote()` gives in a plain task.

A plain function that runs as a task has no loop, so it waits by `aiogpu.get`. asyncio
stays out of this file: importing it would cost such a task more than it does.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

from aiogpu.api.options import check_seconds
from aiogpu.engines import nested
from aiogpu.engines.base import error_inside_task
from aiogpu.engines.family import is_loop_running
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Failed
from aiogpu.wire.payload import load_result
from aiogpu.wire.sharing import Discard
from aiogpu.worker.context import current, passing

if TYPE_CHECKING:
    from types import TracebackType

    from aiogpu.api.handle import Handle
    from aiogpu.api.several import Several
    from aiogpu.engines.family import Family, Host
    from aiogpu.runtime.call import Site
    from aiogpu.runtime.values import Value
    from aiogpu.wire.outgoing import Reference
    from aiogpu.worker.loans import Loan

T = TypeVar("T")


class BlockingHandle(Generic[T]):
    """A child's result to be, in a plain function; see `get`.

    To type checkers `.remote()` gives a `Handle` everywhere.

    Attributes:
        task_name: name of the task.
        part: which of several results of it this is; -1 for all of it.
        child: its number among the children of the task that has started it.
        family: all of these.
        owner: stops the work; None for the family itself.
        shared: what others refer to who were given it, None for nobody.
        raw: the value pickled, if it is there.
        on_end: are called with it when it has ended or was cancelled.
    """

    __aiogpu_handle__ = True
    __slots__ = (
        "__weakref__",
        "_error",
        "_payload",
        "_state",
        "_trace",
        "_value",
        "child",
        "family",
        "on_end",
        "owner",
        "part",
        "raw",
        "shared",
        "task_name",
    )

    def __init__(self, task_name: str, family: Family) -> None:
        self.task_name = task_name
        self.child = 0
        self.family = family
        self.owner: Several | Borrowed | None = None
        self.shared: Reference | None = None
        self.part = -1
        self.raw: bytes | None = None
        self.on_end: tuple[Callable[[BlockingHandle[Any]], object], ...] = ()
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
        on_loop = getattr(self.owner, "on_loop", None)
        if on_loop is not None and is_loop_running():
            # It came before the loop ran.
            return on_loop(self.task_name).__await__()  # type: ignore[no-any-return]
        raise MisuseError(
            f"the handle of {self.task_name} was made in a plain function, where no "
            f"event loop runs; wait by aiogpu.get(handle)."
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # Late: only a handle within something that is sent comes here.
        from aiogpu.api.borrow import borrow
        from aiogpu.wire.outgoing import refer

        return borrow, (refer(self.task_name, self.share), self.task_name)

    def share(self) -> Reference:
        """What others refer to who are given this handle; it is a holder as well."""
        if self.shared is None:
            self.shared = share(self)
        return self.shared

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
        if self.owner is not None:
            self.owner.cancel(self.child)
        else:
            nested.current_family().withdraw(self.child)
        self._end("cancelled")
        if self.shared is not None:
            self._tell("fail", TaskCancelledError(f"{self.task_name} was cancelled."))
        return True

    def why(self) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {self.task_name}")

    def receive(self, payload: bytes) -> None:
        """Take the pickled result; called by the engine."""
        self._payload = self.raw = payload
        if self.shared is not None:
            self._tell("receive", payload)
        self._end("finished")

    def reject(self, failed: Failed) -> None:
        """Take what the child's worker says of its failure; called by the engine."""
        if self.shared is not None:
            self._tell("reject", failed)
        self._refuse(unpack_failure(failed, self.task_name))

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by an engine of this process."""
        self._refuse(error)
        self.family.upsets += 1

    def abandon(self) -> None:
        """Learn that the task has ended first; called by the engine."""
        self._refuse(abandoned(self.task_name))

    def _refuse(self, error: Exception) -> None:
        if self.shared is not None:
            self._tell("fail", error)
        self._error, self._trace = error, error.__traceback__
        self._end("failed")

    def _end(self, state: str) -> None:
        self._state = state
        for tell in self.on_end:
            tell(self)

    def stand_for(self, value: Value) -> None:
        """It has come from elsewhere: others know it by that value already."""
        self.shared = value
        self.child = value.task

    def _tell(self, how: str, told: object) -> None:
        """In the program's own process others may wait for it as well."""
        tell = getattr(self.shared, how, None)
        if tell is not None:
            tell(told)

    @property
    def error(self) -> Exception | None:
        """Why there will be no result, None if there is one or may be."""
        return self._error

    def exception(self) -> Exception | None:
        """Why there is no result, None if there is one."""
        return self._error

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


def share(handle: BlockingHandle[Any]) -> Reference:
    """What others refer to who are given a handle of plain code."""
    if current.loans is not None:
        return nested.family().shares.share(handle)
    from aiogpu.api.borrow import value_of

    return value_of(handle)


class Borrowed:
    """Owns a handle that has come from elsewhere, and asks for its value when needed.

    Attributes:
        loan: of that value.
    """

    def __init__(self, loan: Loan) -> None:
        self.loan = loan

    def on_loop(self, name: str) -> Any:
        """The same handle for the event loop that runs."""
        from aiogpu.api.borrow_far import borrow_far

        return borrow_far(self.loan, name)

    def fetch(self, handle: BlockingHandle[Any]) -> None:
        """Ask for the value."""
        handle.child = nested.family().fetch(self.loan.id, handle)

    def cancel(self, _child: int) -> None:
        """Stop whoever makes the value."""
        nested.family().tell(Discard(self.loan.id))


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
    receiver = handle = handle_for(host, name)
    if passing:
        from aiogpu.api.actor_link import carrying

        receiver = carrying(handle)
    number = start(receiver)
    if isinstance(handle, BlockingHandle):
        handle.child = number
    else:
        handle.task_id = number
    return handle


def handle_for(host: Host, name: str, owner: Any = None) -> Any:
    """The kind of handle that fits, for a host's code.

    `owner` stops the work and is asked about it; None for the host.
    """
    if is_loop_running():
        import asyncio

        from aiogpu.api.nested import ChildHandle

        loop = asyncio.get_running_loop()
        return ChildHandle(name, owner or host, loop, host.waits)
    handle: BlockingHandle[Any] = BlockingHandle(name, host)
    handle.owner = owner
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
    if type(handle).__name__ == "Putting":
        return handle.handle
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
    for one in handles:
        if not one.child and isinstance(one.owner, Borrowed):
            one.owner.fetch(one)
    pending = [one for one in handles if not one.done()]
    if not pending or any(one.has_failed for one in handles):
        return True
    family, waiter = nested.current_family(), get_ident()
    for one in pending:
        if hasattr(one.owner, "on_loop"):
            one.family = family  # it may have come to another task of this process
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
    if kind in ("Handle", "ChildHandle"):
        return (
            "aiogpu.get() waits in plain tasks, for what they have started; this "
            "handle belongs to an event loop: await it there."
        )
    return (
        f"aiogpu.get() was given {given!r}; give it what .remote() has returned in "
        f"this task, or a list of such."
    )
