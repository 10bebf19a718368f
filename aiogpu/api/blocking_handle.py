"""Handles without an event loop: what `.remote()` gives in a plain task.

A plain function that runs as a task has no loop, so it waits by `aiogpu.get`. asyncio
stays out of this file: importing it would cost such a task more than it does. Handles
that have come to a worker are asked for their value when it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from aiogpu.api.usage_errors import NotItsResult
from aiogpu.client.current import client_of_task, error_inside_task, is_loop_running
from aiogpu.errors import DeserializationError, MisuseError, TaskCancelledError
from aiogpu.serialization.exceptions import STOPPED, unpack_failure
from aiogpu.serialization.serializer import load_result
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from types import TracebackType

    from aiogpu.client.interface import Client, ValueStore
    from aiogpu.runtime.objects.values import Value
    from aiogpu.serialization.references import Reference


T = TypeVar("T")


class BlockingOwner(Protocol):
    """Whoever stops the work for a handle, in place of its client."""

    def cancel(self, child: int, /) -> None:
        """Nobody wants the result any more."""
        ...


class BlockingHandle(NotItsResult, Generic[T]):
    """A child's result to be, in a plain function; see `get`.

    To type checkers `.remote()` gives a `Handle` everywhere.

    Attributes:
        task_name: name of the task.
        part: which of several results of it this is; -1 for all of it.
        child: its number among the children of the task that has started it.
        client: of that task.
        owner: stops the work; None for the client itself.
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
        "client",
        "on_end",
        "owner",
        "part",
        "raw",
        "shared",
        "task_name",
    )

    def __init__(self, task_name: str, client: Client) -> None:
        self.task_name = task_name
        self.child = 0
        self.client = client
        self.owner: BlockingOwner | None = None
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

    def _how_to_wait(self) -> str:
        return f"aiogpu.get({self.task_name}.remote(...))"

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
        from aiogpu.serialization.references import add_handle, open_handle

        return open_handle, (add_handle(self.task_name, self.share), self.task_name)

    def share(self) -> Reference:
        """What others refer to who are given this handle; it is a holder as well."""
        if self.shared is None:
            self.shared = share(self)
        return self.shared

    def done(self) -> bool:
        """Return whether the task has ended or was cancelled."""
        return self._state != "pending"

    def cancelled(self) -> bool:
        """Return whether `cancel` has stopped it."""
        return self._state == "cancelled"

    def cancel(self) -> bool:
        """Stop the work; False if it had ended before."""
        if self.done():
            return False
        if self.owner is not None:
            self.owner.cancel(self.child)
        else:
            client_of_task().withdraw(self.child)
        self._end("cancelled")
        if self.shared is not None:
            self._tell("fail", TaskCancelledError(f"{self.task_name} was cancelled."))
            shares = shares_of(self) if self.part >= 0 else None
            if shares is not None:
                # Its call may go on for the others.
                shares.drop(self.child, self.shared)
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
        self.client.upsets += 1
        if failed.kind == STOPPED:
            self._end("cancelled")  # somebody has done so who was given it
            return
        self._refuse(unpack_failure(failed, self.task_name))

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by an engine of this process."""
        self._refuse(error)
        self.client.upsets += 1

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
        """Return why there is no result, None if there is one."""
        return self._error

    @property
    def has_failed(self) -> bool:
        """True if there will be no result."""
        return self._state in ("failed", "cancelled")

    def result(self) -> T:
        """The result of a child that has ended; see `get` for waiting.

        Raises:
            TaskCancelledError: it was cancelled.
            MisuseError: it has not ended.
            DeserializationError: its result cannot be unpickled in this process.
        """
        try:
            if not self.done():
                raise MisuseError(
                    f"{self.task_name} has not ended; aiogpu.get() waits."
                )
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
        finally:
            # An error's traceback keeps this frame, and with it the error, and all
            # that the caller's frames hold, actors say, until the collector runs.
            del self


def share(handle: BlockingHandle[Any]) -> Reference:
    """Return what others refer to who are given a handle of plain code."""
    shares = shares_of(handle)
    if shares is not None:
        return shares.share(handle)  # type: ignore[no-any-return]
    from aiogpu.runtime.objects.values import value_of

    return value_of(handle)


def shares_of(handle: BlockingHandle[Any]) -> Any:
    """What keeps values that are given to others; None where all are this process's."""
    far = handle.client.far
    return None if far is None else far.shares


class Borrowed:
    """Owns a handle that has come from elsewhere, and asks for its value when needed.

    Attributes:
        loan: of that value.
    """

    def __init__(self, far: ValueStore, loan: Reference) -> None:
        self._far = far
        self.loan = loan

    def on_loop(self, name: str) -> Any:
        """The same handle for the event loop that runs."""
        from aiogpu.serialization.references import open_handle

        return open_handle(self.loan.id, name)

    def fetch(self, handle: BlockingHandle[Any]) -> None:
        """Ask for the value, unless it is there or was asked for."""
        if not handle.child and not handle.done():
            handle.child = self._far.link.fetch(self.loan.id, handle)

    def cancel(self, _child: int) -> None:
        """Stop whoever makes the value."""
        self._far.link.discard(self.loan.id)


def abandoned(task_name: str) -> TaskCancelledError:
    """The error of a child that ends with the task that has started it."""
    return TaskCancelledError(
        f"{task_name} was stopped, since the task that had started it has ended."
    )
