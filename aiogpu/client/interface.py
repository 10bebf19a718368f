"""The Protocol `Client`: what code can ask of its node, of whatever kind.

`Receiver` is told how a request ends. The protocols below it are slices of the client:
tasks, waits, and values that another process keeps. Light to import.
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
"""How a request ends: the pickled result, what a worker says of its failure, or an
error of aiogpu."""


class Receiver(Protocol):
    """Waits for the end of a request: a task, a call, a value, a lease.

    A handle is one, and the user's future at once. A future of the engine's own would
    cost a microsecond and a turn of the loop for each call.
    """

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome; called at most once."""
        ...


class ItemReceiver(Receiver, Protocol):
    """Waits for a stream: its items come first, then its outcome."""

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items, in order."""
        ...


class Waits(Protocol):
    """Hears who waits on an event loop, and for which task."""

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task now."""
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
        """The value to which a handle is being unpickled."""
        ...


class Shareable(Protocol):
    """The handle of a child, as it is given to others.

    Attributes:
        task_name: name of the task.
        part: which of several results of the child it is; -1 for all of it.
    """

    task_name: str
    part: int

    @property
    def task_id(self) -> int:
        """The task's number among the children."""
        ...

    @property
    def raw(self) -> bytes | None:
        """The value pickled, if it is there."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The error of the task; None if it has a result or has not ended."""
        ...

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        ...


class SharedValues(Protocol):
    """The values that this process shares with others."""

    def share(self, handle: Shareable, /) -> Reference:
        """Return what others refer to who are given a handle."""
        ...

    def promise(self) -> Reference:
        """Share a result before its task is started."""
        ...

    def keep(self, promised: Any, handle: Shareable, /) -> None:
        """The task of what was promised is started."""
        ...

    def fail(self, promised: Any, error: BaseException, /) -> None:
        """The task of what was promised is never started."""
        ...

    def drop(self, child: int, loan: Any, /) -> None:
        """Cancel one of a child's several results; the others may still come."""
        ...

    def put(self, payload: bytes, /) -> Reference:
        """Have a value kept."""
        ...


class ValueStore(Protocol):
    """The values that other processes keep, as this process reaches them."""

    @property
    def loans(self) -> BorrowedValues:
        """The loans of this process."""
        ...

    @property
    def shares(self) -> SharedValues:
        """The values that this process shares with others."""
        ...

    def fetch(self, value: int, receiver: Any) -> int:
        """Ask for a value; gives the question's number."""
        ...

    def cancel(self, question: int, /) -> None:
        """Withdraw a question for a value."""
        ...

    def discard(self, value: int) -> None:
        """Discard a value: cancel the task that makes it."""
        ...


class Client(Protocol):
    """The node of a task, as the task's own code sees it.

    Attributes:
        upsets: how many of the task's requests have ended without a result so far.
    """

    upsets: int

    @property
    def waits(self) -> Waits | None:
        """The observer of waits on the event loop of this thread; None without one."""
        ...

    @property
    def remote_values(self) -> ValueStore | None:
        """The store of values in other processes; None if all are in this one."""
        ...

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; gives its number."""
        ...

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number."""
        ...

    def demand(self, number: int, limit: int, /) -> None:
        """Let a child that is a stream yield so many items in all."""
        ...

    def withdraw(self, number: int, /) -> object:
        """Cancel a child whose result is not wanted."""
        ...

    def withdraw_soon(self, child: int) -> None:
        """Withdraw from a finalizer, which may run at any point."""
        ...

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """Note that a thread or loop of the task waits for these, or for none.

        Args:
            waiter: the thread's number, or the loop.
            children: numbers of what it waits for.
            is_bound: whether it does nothing else before all of them have ended or
                one has failed, however long that takes.
        """
        ...

    def end_wait(self, waiter: object) -> None:
        """All that it waited for has ended."""
        ...

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until something is done; False if time is up before."""
        ...


class InlineClient(Client, Protocol):
    """The client of a task that runs in its program's process."""

    @property
    def program(self) -> AbstractEventLoop:
        """The loop of the program that has opened the node."""
        ...

    def serve_loop(self) -> None:
        """Have the event loop that runs here begin tasks and actors."""
        ...


class ActorClient(Client, Protocol):
    """The client of a process that runs tasks for a program.

    The program's own actors are reached through `engines.base.ActorsPort`.
    """

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload of what is more than a plain pickle.

        Raises:
            SerializationError: it is too large.
            ObjectMemoryError: there is no room for it.
        """
        ...

    def make(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> Reference:
        """Have an actor made; return what keeps it alive."""
        ...

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Ask which actor has a name; gives the question's number.

        The answer is its id, the name and the pickled interface of its class. Whoever
        gets it calls `own`.
        """
        ...

    def own(self, actor: int) -> Reference:
        """Return what keeps an actor alive that was found."""
        ...

    def actor(self, actor: int, name: str) -> Reference:
        """Return what keeps an actor alive whose handle is being unpickled."""
        ...

    def pass_on(self, hold: Reference) -> None:
        """A handle to the actor of a hold is being pickled."""
        ...

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `wire.messages.Stop` for how."""
        ...

    def report(self, payload: bytes) -> None:
        """Send a report of the running task or call; see `aiogpu.report`.

        Raises:
            MisuseError: there is none to which this code belongs.
        """
        ...
