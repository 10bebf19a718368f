"""The Protocol `Client`: the requests that code can make to a node of any kind.

A `Receiver` gets the outcome of a request. The other protocols are parts of a client:
tasks, waits, and values in other processes. Light to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.serialization.references import PickledValue, Reference


Outcome = bytes | Failed | Exception
"""The outcome of a request: the pickled result, a worker's report of a failure, or an
error of aiogpu."""


class Receiver(Protocol):
    """Waits for the outcome of a request: a task, a call, a value, a lease.

    A handle is a receiver and the user's future in one object. A separate future in the
    engine would cost a microsecond and a turn of the loop for each call.
    """

    def settle(self, outcome: Outcome) -> None:
        """Receive the outcome; called at most once."""
        ...


class ItemReceiver(Receiver, Protocol):
    """Waits for a stream: its items come first, then its outcome."""

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Receive pickled items, in order."""
        ...


class Waits(Protocol):
    """Records for which tasks code on an event loop waits."""

    def begin_wait(self, task: int) -> None:
        """Note that code waits for a task."""
        ...

    def end_wait(self, task: int) -> None:
        """Note that a wait has ended before its task."""
        ...

    def settle(self, task: int) -> None:
        """Note that a task has ended."""
        ...


class BorrowedValues(Protocol):
    """The loans of this process."""

    def loan(self, identity: int, /) -> Reference:
        """Return the loan of a value while a handle to it is unpickled."""
        ...


class Shareable(Protocol):
    """The handle of a child task that is passed to other processes.

    Attributes:
        task_name: name of the task.
        part: index among several results of the child; -1 for the whole result.
    """

    task_name: str
    part: int

    @property
    def task_id(self) -> int:
        """The number of the child task."""
        ...

    @property
    def raw(self) -> bytes | None:
        """The pickled value; None if there is no result yet."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The error of the task; None if it has a result or still runs."""
        ...

    def cancelled(self) -> bool:
        """Return whether the task was cancelled."""
        ...


class SharedValues(Protocol):
    """The values that this process shares with others."""

    def share(self, handle: Shareable, /) -> Reference:
        """Return the reference that stands for a handle in other processes."""
        ...

    def promise(self) -> Reference:
        """Return a reference to a result before its task is started."""
        ...

    def keep(self, promised: Any, handle: Shareable, /) -> None:
        """Fulfil a promise by a task that was started."""
        ...

    def fail(self, promised: Any, error: BaseException, /) -> None:
        """Fail a promise, since its task is never started."""
        ...

    def drop(self, child: int, loan: Any, /) -> None:
        """Cancel one of a child's several results; the others stay expected."""
        ...

    def put(self, payload: bytes, /) -> Reference:
        """Store a value."""
        ...


class ValueStore(Protocol):
    """Access to values in other processes."""

    @property
    def loans(self) -> BorrowedValues:
        """The loans of this process."""
        ...

    @property
    def shares(self) -> SharedValues:
        """The values that this process shares with others."""
        ...

    def fetch(self, value: int, receiver: Any) -> int:
        """Request a value; return the number of the request."""
        ...

    def cancel(self, question: int, /) -> None:
        """Withdraw a request for a value."""
        ...

    def discard(self, value: int) -> None:
        """Discard a value: cancel the task that produces it."""
        ...


class Client(Protocol):
    """The node, as seen from the code of a task."""

    @property
    def waits(self) -> Waits | None:
        """The waits on the event loop of this thread; None without a loop."""
        ...

    @property
    def remote_values(self) -> ValueStore | None:
        """The store of values in other processes; None if all are in this process."""
        ...

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child task; return its number."""
        ...

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; return the number of the call."""
        ...

    def report(self, payload: bytes) -> None:
        """Send a report of the running task or call; see `aiogpu.report`.

        Raises:
            MisuseError: this code belongs to no running task or call.
        """
        ...

    def demand(self, number: int, limit: int, /) -> None:
        """Set the number of items that a stream may yield in all."""
        ...

    def withdraw(self, number: int, /) -> object:
        """Cancel a child whose result is not needed."""
        ...

    def withdraw_soon(self, child: int) -> None:
        """Cancel a child from a finalizer, which may run at any point."""
        ...

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """Note the children for which a thread or loop of the task waits, or none.

        Args:
            waiter: the thread's number, or the loop.
            children: numbers of the children.
            is_bound: the waiter does nothing else until all children have ended or one
                has failed, for any time.
        """
        ...

    def end_wait(self, waiter: object) -> None:
        """Note that a wait is over because its children have ended."""
        ...

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until `is_done()`; False if the deadline passes first."""
        ...


class InlineClient(Client, Protocol):
    """The client of a task that runs in its program's process."""

    @property
    def program(self) -> AbstractEventLoop:
        """The loop of the program that opened the node."""
        ...


class ActorClient(Client, Protocol):
    """The client of a process that runs tasks for a program.

    The program's own actors are reached through `engines.base.ActorsPort`.
    """

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value.

        Raises:
            SerializationError: the value is too large.
            ObjectMemoryError: there is not enough memory for it.
        """
        ...

    def make(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> Reference:
        """Create an actor; return the reference that keeps it alive."""
        ...

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Look an actor up by its name; return the number of the request.

        The answer is the actor's id, its name and the pickled interface of its class.
        The receiver then calls `own`.
        """
        ...

    def own(self, actor: int) -> Reference:
        """Return the reference that keeps alive an actor found by name."""
        ...

    def actor(self, actor: int, name: str) -> Reference:
        """Return the reference that keeps alive an actor whose handle is unpickled."""
        ...

    def pass_on(self, hold: Reference) -> None:
        """Add an actor's reference to the value that is being pickled."""
        ...

    def stop(self, actor: int, how: str) -> None:
        """End an actor; `how` is explained at `wire.messages.Stop`."""
        ...
