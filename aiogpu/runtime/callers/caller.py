"""A caller over a socket: a worker for its task, or a joined program.

`Child` waits for a task or a call on behalf of a caller. A program's numbers are
checked (`check_claims`): a number given twice would take the place of the one before,
and what went by that would be nobody's when the program goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import OWN, ClientId, TaskId
from aiogpu.core.queue.fair_share import Limits
from aiogpu.errors import (
    AiogpuError,
    ProtocolError,
    TaskCancelledError,
    WorkerDiedError,
)
from aiogpu.runtime.objects.store import Borrower
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.payload import result_part
from aiogpu.wire import messages as wire
from aiogpu.wire.codec import LARGE

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Outcome, Receiver
    from aiogpu.runtime.actors.actor import Actor
    from aiogpu.runtime.objects.values import Value


@dataclass(slots=True, eq=False)
class Caller(Borrower):
    """One connection by which tasks are started and values are lent.

    Attributes:
        client: whose its tasks are that nobody else has started.
        program: what the workers of its tasks begin with; "" for the node's own.
        declared: what the tasks that it starts are, by its own numbers.
        children: those of them that have not ended, by its own numbers.
        asked: its unanswered calls of actors and their numbers, by its own.
        waits_for: for which of both a worker's task waits.
        waits_elsewhere: those of them that are no tasks of its own and have not come:
            calls of actors, and values.
        bound: for which of these its main thread waits; see `wire.messages.Wait`.
        fetched: values that it has asked for and that have not come.
        actor: what it is, None for what is no actor.
    """

    client: ClientId = field(default=OWN, kw_only=True)
    program: str = field(default="", kw_only=True)
    declared: dict[int, FunctionSpec | wire.Failed] = field(
        default_factory=dict, kw_only=True
    )
    children: dict[int, int] = field(default_factory=dict, kw_only=True)
    asked: dict[int, tuple[int, int]] = field(default_factory=dict, kw_only=True)
    waits_for: tuple[int, ...] = field(default=(), kw_only=True)
    waits_elsewhere: set[int] = field(default_factory=set, kw_only=True)
    bound: tuple[int, ...] = field(default=(), kw_only=True)
    fetched: dict[int, Value] = field(default_factory=dict, kw_only=True)
    actor: Actor | None = field(default=None, kw_only=True)

    def return_loans(self) -> None:
        """Return all loans: the caller has ended."""
        if self.borrowers is None or self.store is None:
            return
        if self.client:
            # All its tasks are cancelled, and of a cancelled task nobody is told.
            error: AiogpuError = TaskCancelledError(
                "the task was stopped, since the program that had started it has ended."
            )
        else:
            error = WorkerDiedError(
                f"the result is lost: the worker (pid {self.pid}) that had started the "
                f"task ended before it had passed on what it was told. Let tasks that "
                f"hand on handles end by themselves.",
                self.pid,
            )
        self.store.forget(self.borrowers, error, is_all=bool(self.client))


UNREAD: Final = 1 << 18
"""Bytes that a caller has not read, beyond which reports are not passed on."""


class Child:
    """Waits for a child in its parent's stead, and passes on how it ends.

    Attributes:
        caller: the parent's worker, or a client.
        number: of the child, by which the caller knows it.
        lost: reports that were not passed on since the last one.
        values: tell others the same, or that part of it; None for nobody.
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
        """Pass on items of its stream."""
        if self.caller.peer is not None:
            lent = tuple(map(self.caller.borrow, payloads))
            self.caller.peer.post(wire.ChildItems(self.number, lent))


def pass_on_all(
    receivers: Sequence[Receiver | None], payloads: Sequence[bytes]
) -> bool:
    """Pass on plain results that one caller waits for, all at once.

    Returns:
        False where each is to be told by itself; then nobody was.
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
    """A call of an actor or a fetch of a value, on behalf of a caller."""

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
        name: how people know it.
        shows: whether it is sent what its tasks print.
        only_looks: whether it runs nothing, and is listed nowhere.
        is_joined: whether it has said what its workers begin with.
        wish: what the core is told of it with its first lease, if it looks so far.
        pidfd: tells its end, whoever else has its connection open; -1 for none.
        is_slow: it has not read what it was sent.
        is_behind: so much that nothing more of it is started.
        leases: numbers of those children that are leases, asked for or granted, and
            not given back.
        last: the highest number that it has given to anything.
        departing: tasks whose code has not stopped, since it says that it leaves.
    """

    name: str = ""
    shows: bool = True
    only_looks: bool = False
    is_joined: bool = False
    is_slow: bool = False
    is_behind: bool = False
    wish: tuple[ClientId, float, Limits] | None = None
    pidfd: int = -1
    last: int = 0
    departing: set[TaskId] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)


class LeaseChild(Child):
    """Tells a program of a lease that it has asked for; see `LeaseReceiver`.

    The lease is the program's once it is granted, until it gives it back or ends.
    """

    __slots__ = ()

    caller: Client

    @property
    def pid(self) -> int:
        """The program's process."""
        return self.caller.pid

    def settle(self, outcome: Outcome) -> None:
        """The lease is granted, is refused, or has gone with its node."""
        task = self.caller.children.get(self.number)
        super().settle(outcome)
        if not isinstance(outcome, bytes):
            self.caller.leases.discard(self.number)
        elif task is not None:
            # It stays a child until it is given back.
            self.caller.children[self.number] = task


_ASKING: Final = frozenset(
    {wire.Submit, wire.Ask, wire.Find, wire.Fetch, wire.TakeLease, wire.Inquire}
)


_OF_VALUES: Final = frozenset({wire.Put, wire.PutFailed, wire.Share})


def check_claims(client: Client, message: wire.Message) -> None:
    """Check the numbers and ids that a message gives to what it begins.

    Raises:
        ProtocolError: one was given before, or is another's.
    """
    kind = type(message)
    if kind in _ASKING:
        _count(client, message.child)  # type: ignore[union-attr]
    elif kind in _OF_VALUES:
        _number(client, message.value)  # type: ignore[union-attr]
    elif kind is wire.Make:
        _count(client, _number(client, message.actor))  # type: ignore[union-attr]


def count_fresh(client: Client, submits: Sequence[wire.Submit]) -> int:
    """Count the leading requests with their own numbers, and assign those."""
    last = client.last
    for place, submit in enumerate(submits):
        if submit.child <= last:
            client.last = last
            return place
        last = submit.child
    client.last = last
    return len(submits)


def _count(client: Client, number: int) -> None:
    """Numbers go up, so that none comes twice."""
    if number <= client.last:
        raise ProtocolError(f"the number {number} after {client.last}")
    client.last = number


def _number(client: Client, identity: int) -> int:
    """By which a client knows what it has given an id."""
    number = -identity - (client.id << wire.NUMBER_BITS)
    if not 0 < number < 1 << wire.NUMBER_BITS:
        raise ProtocolError(f"the id {identity}, which is not one of its own")
    return number
