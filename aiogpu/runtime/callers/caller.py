"""A caller over a socket: a worker that runs a task, or a joined program.

`Child` waits for a task or a call on behalf of a caller. `check_claims` checks the
numbers that a program assigns: a number used twice would replace an earlier child,
which would then outlive the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import OWN, ClientId, TaskId
from aiogpu.core.model.request import Environment
from aiogpu.core.queue.fair_share import Limits
from aiogpu.errors import AiogpuError, TaskCancelledError, WorkerDiedError
from aiogpu.runtime.objects.store import Borrower
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.payload import result_part
from aiogpu.wire import messages as wire
from aiogpu.wire.codec import LARGE
from aiogpu.wire.messages import ProtocolError

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Outcome, Receiver
    from aiogpu.runtime.actors.actor import Actor
    from aiogpu.runtime.objects.values import Value


@dataclass(slots=True, eq=False)
class Caller(Borrower):
    """A connection that starts tasks and borrows values.

    The caller chooses the numbers of its functions, children and requests.

    Attributes:
        client: the program that owns the tasks started without a parent.
        program: the variables of its `Program`; empty for the node's own.
        declared: the declared functions, by number.
        children: ids of the child tasks that have not ended, by number.
        actor_calls: actor and call number of each unanswered call, by number.
        waits_elsewhere: the calls of actors and the values that a worker's task waits
            for and that have not been answered, by number.
        bound: the children and calls for which the main thread waits; see
            `wire.messages.Wait`.
        fetched: the requested values that have not been sent, by number.
        actor: the actor that runs in this worker, None for none.
    """

    client: ClientId = field(default=OWN, kw_only=True)
    program: Environment = field(default=(), kw_only=True)
    declared: dict[int, FunctionSpec | wire.Failed] = field(
        default_factory=dict, kw_only=True
    )
    children: dict[int, int] = field(default_factory=dict, kw_only=True)
    actor_calls: dict[int, tuple[int, int]] = field(default_factory=dict, kw_only=True)
    waits_elsewhere: set[int] = field(default_factory=set, kw_only=True)
    bound: tuple[int, ...] = field(default=(), kw_only=True)
    fetched: dict[int, Value] = field(default_factory=dict, kw_only=True)
    actor: Actor | None = field(default=None, kw_only=True)

    def return_loans(self) -> None:
        """Return all loans of a caller that has ended."""
        if self.borrowers is None or self.store is None:
            return
        if self.client:
            # All its tasks are cancelled, and cancelled tasks are not settled.
            error: AiogpuError = TaskCancelledError(
                "the task was stopped, since the program that had started it has ended."
            )
        else:
            error = WorkerDiedError(
                f"the result is lost: the worker (pid {self.pid}) that had started the "
                f"task ended before it had passed on the result. Do not end a process "
                f"whose task returns handles before the task has returned.",
                self.pid,
            )
        self.store.forget(self.borrowers, error, is_all=bool(self.client))


UNREAD: Final = 1 << 18
"""Reports are dropped while a caller has more than this many unread bytes."""


class Child:
    """The receiver of a child task; passes the outcome to the caller.

    Attributes:
        caller: the parent's worker, or a client.
        number: the caller's number for the child.
        lost: the number of reports dropped since the last report that was passed on.
        values: values that settle with the result or a part of it, each with the
            number of the part; None for none.
    """

    __slots__ = ("caller", "lost", "number", "values")

    def __init__(self, caller: Caller, number: int) -> None:
        self.caller = caller
        self.lost = 0
        self.values: list[tuple[Value, int]] | None = None
        self.number = number

    def settle(self, outcome: Outcome) -> None:
        """Pass on the outcome."""
        caller, number = self.caller, self.number
        if type(outcome) is bytes:
            answer: wire.Message = wire.ChildDone(number, outcome)
        elif isinstance(outcome, bytes):
            answer = wire.ChildDone(number, caller.borrow(outcome))
        else:
            if isinstance(outcome, Exception):
                outcome = pack_own_error(outcome)
            answer = self._failure(outcome)
        if self.values is not None:
            self._settle_values(outcome)
        caller.children.pop(number, None)
        if caller.fetched:
            caller.fetched.pop(number, None)
        if caller.peer is not None:
            caller.peer.post(answer)

    def _settle_values(self, outcome: Outcome) -> None:
        for value, part in self.values or ():
            try:
                if isinstance(outcome, bytes):
                    value.settle(result_part(outcome, part))
                else:
                    value.settle(outcome)
            except IndexError:
                value.settle(ProtocolError(f"a result has no part {part}"))

    def _failure(self, failed: wire.Failed) -> wire.ChildFailed:
        if self.number in self.caller.bound:
            self.caller.bound = ()  # the failure ends the wait
        if failed.payload is not None:
            failed = failed._replace(payload=self.caller.borrow(failed.payload))
        return wire.ChildFailed(self.number, *failed.why)

    def receive_report(self, lost: int, payload: bytes) -> None:
        """Pass on a report, unless the caller reads too slowly."""
        peer = self.caller.peer
        if peer is None or peer.unsent > UNREAD:
            self.lost += lost + 1
        else:
            peer.post(wire.ChildReport(self.number, self.lost + lost, payload))
            self.lost = 0

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Pass on items of the child's stream."""
        if self.caller.peer is not None:
            lent = tuple(map(self.caller.borrow, payloads))
            self.caller.peer.post(wire.ChildItems(self.number, lent))


def pass_on_all(
    receivers: Sequence[Receiver | None], payloads: Sequence[bytes]
) -> bool:
    """Pass on plain results in one write, if all are for the same caller.

    Returns:
        False if the caller must settle each receiver alone; then none was settled.
    """
    first = receivers[0]
    if type(first) is not Child or first.caller.fetched:
        return False
    caller, answers = first.caller, []
    for child, payload in zip(receivers, payloads, strict=True):
        if type(child) is not Child or child.caller is not caller:
            return False
        if child.values is not None or len(payload) >= LARGE:
            return False
        answers.append(wire.ChildDone(child.number, payload))
    for number, _ in answers:
        caller.children.pop(number, None)
    if caller.peer is not None:
        caller.peer.post_all(answers)
    return True


class Question(Child):
    """The receiver of a caller's call of an actor or of a requested value."""

    __slots__ = ("_on_end",)

    def __init__(
        self, caller: Caller, number: int, on_end: Callable[[Caller, int], object]
    ) -> None:
        super().__init__(caller, number)
        self._on_end = on_end

    def settle(self, outcome: Outcome) -> None:
        """Pass on the outcome."""
        super().settle(outcome)
        self._on_end(self.caller, self.number)


@dataclass(slots=True, eq=False)
class Client(Caller):
    """One program that has joined.

    Attributes:
        name: the name shown to users.
        shows: the program is sent the output of its tasks.
        only_looks: the program runs no tasks and is not listed.
        is_joined: its `Join` was accepted.
        pending_join: arguments of `Scheduler.join` for a program that only looks; the
            program joins the scheduler with its first lease. None otherwise.
        pidfd: signals the end of the process, even if a fork keeps the connection
            open; -1 for none.
        is_slow: it has not read everything that it was sent.
        is_behind: it has so many unread bytes that none of its tasks are started.
        leases: numbers of the children that are leases, requested or granted.
        last: the highest number that it has assigned.
        departing: after a `Depart`, the tasks whose code has not stopped.
    """

    name: str = ""
    shows: bool = True
    only_looks: bool = False
    is_joined: bool = False
    is_slow: bool = False
    is_behind: bool = False
    pending_join: tuple[ClientId, float, Limits] | None = None
    pidfd: int = -1
    last: int = 0
    departing: set[TaskId] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)


class LeaseChild(Child):
    """The receiver of a program's lease; see `LeaseReceiver`.

    A granted lease belongs to the program until the program returns it or ends.
    """

    __slots__ = ()

    caller: Client

    @property
    def pid(self) -> int:
        """Process id of the program."""
        return self.caller.pid

    def settle(self, outcome: Outcome) -> None:
        """Pass on that the lease is granted, refused, or lost with its node."""
        task = self.caller.children.get(self.number)
        super().settle(outcome)
        if not isinstance(outcome, bytes):
            self.caller.leases.discard(self.number)
        elif task is not None:
            # A granted lease stays a child until the program returns it.
            self.caller.children[self.number] = task


_ASKING: Final = frozenset(
    {wire.Submit, wire.Ask, wire.Find, wire.Fetch, wire.TakeLease, wire.Inquire}
)


_OF_VALUES: Final = frozenset({wire.Put, wire.PutFailed, wire.Share})


def check_claims(client: Client, message: wire.Message) -> None:
    """Check the numbers and ids that a message assigns.

    Raises:
        ProtocolError: a number was used before, or an id belongs to another program.
    """
    kind = type(message)
    if kind in _ASKING:
        _count(client, message.child)  # type: ignore[union-attr]
    elif kind in _OF_VALUES:
        _number(client, message.value)  # type: ignore[union-attr]
    elif kind is wire.Make:
        # Not counted: a program may have chosen the id long before, while it joined.
        _number(client, message.actor)  # type: ignore[union-attr]


def count_fresh(client: Client, submits: Sequence[wire.Submit]) -> int:
    """Return how many leading requests have new numbers, and note these numbers."""
    last = client.last
    for place, submit in enumerate(submits):
        if submit.child <= last:
            client.last = last
            return place
        last = submit.child
    client.last = last
    return len(submits)


def _count(client: Client, number: int) -> None:
    """Note a number; numbers must increase, so that none is used twice."""
    if number <= client.last:
        raise ProtocolError(
            f"the number {number} was sent after {client.last}; numbers must increase"
        )
    client.last = number


def _number(client: Client, identity: int) -> int:
    """Return the number that a client has turned into an id."""
    number = -identity - (client.id << wire.NUMBER_BITS)
    if not 0 < number < 1 << wire.NUMBER_BITS:
        raise ProtocolError(f"the id {identity} is outside of the program's range")
    return number
