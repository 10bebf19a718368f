"""The programs that share a node: what each holds and may hold, and what it has had.

Kept only once a second program has joined: who has a node alone pays nothing for it.
What a program has had is its *tag*, a virtual time as in start-time fair queuing
(Goyal, Vin and Cheng, 1996): the part of the node that each of its tasks held, times
the seconds, over the program's weight. Who begins to wait starts at the tag of whoever
began last, so that nobody is owed for the time in which he wanted nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from aiogpu.core.ids import OWN, ClientId
from aiogpu.core.lease import Lease
from aiogpu.core.ledger import Ledger
from aiogpu.core.limits import Limits, capacity_of
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources import Request, number, spoken, written
from aiogpu.core.stake import LEAST, Portion, Stake
from aiogpu.core.wording import in_words
from aiogpu.errors import InfeasibleError, LimitError, OptionError

if TYPE_CHECKING:
    from aiogpu.core.effects import Effect
    from aiogpu.core.node import Node
    from aiogpu.core.ready import Bucket

    Placed = Iterator[tuple[TaskRecord, Lease]]

KNOWN: Final = 4096
"""Requests whose portions are remembered."""


@dataclass(slots=True, eq=False)
class Client:
    """One program.

    Attributes:
        weight: what it gets for each that another of weight 1 gets.
        limits: what it may have, as it was said.
        most: what it may hold of each limited resource, in parts.
        held: what it holds, in parts; CPUs that are lent are not among that.
        tag: what it has had, by weight.
        since: when it last began a task, or first wanted to.
        unfinished: its tasks that have not ended.
        is_waiting: whether any of them waits in the queue.
        has_left: whether it is forgotten once they have.
    """

    id: ClientId
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    most: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    tag: float = 0.0
    since: float = 0.0
    unfinished: int = 0
    is_waiting: bool = False
    has_left: bool = False


class Clients:
    """All programs that have joined, and the node's own.

    Attributes:
        now: when the latest event was.
        begun: the tag of who began a task last, or a later one.
        place: takes tasks from the queue in the order of turns; see `fairness`.
        may_go_on: whether a worker may go on with a lease, whoever waits.
    """

    def __init__(self, ledger: Ledger, now: float) -> None:
        self.now = now
        self.begun = 0.0
        self.place: Callable[[Node, float, list[Effect]], Placed]
        self.may_go_on: Callable[[Node, Lease, Bucket], bool]
        self._ledger = ledger
        self._capacity = capacity_of(ledger)
        self._portions: dict[Request, Portion] = {}
        self._by_id: dict[ClientId, Client] = {OWN: Client(OWN)}

    def __repr__(self) -> str:
        return f"<Clients {sorted(self._by_id)}>"

    def __iter__(self) -> Iterator[Client]:
        return iter(self._by_id.values())

    def join(self, id_: ClientId, weight: float, limits: Limits) -> None:
        """A program joins, or gets another weight and other limits.

        Raises:
            OptionError: a weight that is none, or limits that mean nothing here.
        """
        if not 0 < weight < inf:
            raise OptionError(
                f"weight={weight!r} is none; give a finite number above 0: who has 2 "
                f"gets twice what another with 1 gets."
            )
        most = limits.on(self._ledger)
        client = self.of(id_)
        client.weight, client.limits, client.most = weight, limits, most
        client.has_left = False

    def leave(self, id_: ClientId) -> None:
        """A program has left: forget it once its last task has ended."""
        client = self._by_id.get(id_)
        if client is not None:
            client.has_left = True
            self.forget(client)

    def of(self, id_: ClientId) -> Client:
        """What is known of a program; one that has not said that it joins has."""
        client = self._by_id.get(id_)
        if client is None:
            client = self._by_id[id_] = Client(id_)
        return client

    def portion_of(self, request: Request) -> Portion:
        """What a request is of the node."""
        portion = self._portions.get(request)
        if portion is None:
            if len(self._portions) >= KNOWN:
                self._portions.clear()
            portion = self._portions[request] = Portion(request, self._capacity)
        return portion

    def amounts_of(self, request: Request) -> list[tuple[str, int]]:
        """What a request asks for of each resource, in parts."""
        return [(name, parts) for name, parts, _ in self.portion_of(request).amounts]

    def allows(self, id_: ClientId, request: Request) -> bool:
        """Whether a request is within what a program may hold, if it holds no more."""
        most = self.of(id_).most
        return all(
            parts <= most.get(name, parts) for name, parts in self.amounts_of(request)
        )

    def admit(self, id_: ClientId, request: Request) -> None:
        """Let a program submit one more task, or say why it may not.

        Raises:
            LimitError: it has as many unfinished ones as it may.
            InfeasibleError: the task alone is more than the program may hold.
        """
        client = self._by_id.get(id_)
        if client is None:
            return
        most = client.limits.max_waiting
        if most is not None and client.unfinished >= most:
            raise LimitError(
                f"this program has {client.unfinished} tasks that have not ended, and "
                f"its node lets it have {most} (max_waiting). Await some of them "
                f"before it submits more, or join the node with a higher limit."
            )
        for name, parts in self.amounts_of(request) if client.most else ():
            if parts > client.most.get(name, parts):
                may = _told(name, client.most[name])
                raise InfeasibleError(
                    f"the task asks for {_told(name, parts)} {spoken(name)}, and its "
                    f"node lets this program hold {may} at once: it would wait for "
                    f"ever. Ask for less, or join the node with a higher limit."
                )

    def bars(self, record: TaskRecord) -> bool:
        """Whether a task must wait since its program holds all that it may."""
        client = self.of(record.client)
        if not client.most:
            return False
        return any(
            client.held.get(name, 0) + parts > client.most.get(name, inf)
            for name, parts, _ in self.portion_of(record.spec.shape.request).amounts
        )

    def exceeds(self, client: Client) -> bool:
        """Whether a program holds more than it may: a task took its CPUs again."""
        return any(
            client.held.get(name, 0) > parts for name, parts in client.most.items()
        )

    def why_barred(self, record: TaskRecord) -> str:
        """In words what its program holds of what it may, of what a task waits for.

        Empty if it does not wait for that.
        """
        client = self.of(record.client)
        return in_words(
            [
                f"{_told(name, client.held.get(name, 0))} of at most "
                f"{_told(name, client.most[name])} {spoken(name)}"
                for name, parts in self.amounts_of(record.spec.shape.request)
                if client.held.get(name, 0) + parts > client.most.get(name, inf)
            ]
        )

    def why_limited(self, record: TaskRecord) -> str:
        """For the end of a sentence: that the limit of its program is part of why."""
        told = self.why_barred(record)
        return f"; this program holds {told} that its node lets it have" if told else ""

    def share_of(self, client: Client, request: Request) -> tuple[float, float]:
        """The part that a program holds of what a request asks for, by weight.

        Returns:
            Of the resource of which it is the greatest: as it is now, and as it would
            be if the request were granted.
        """
        held, now, then = client.held, 0.0, 0.0
        portion = self.portion_of(request)
        if not held:
            return 0.0, portion.cost / client.weight
        for name, parts, one in portion.amounts:
            has = held.get(name, 0)
            now = max(now, has * one)
            then = max(then, (has + parts) * one)
        return now / client.weight, max(then, now + LEAST) / client.weight

    def held_by(self, client: Client) -> float:
        """The greatest part that a program holds of any resource."""
        shares = (n / max(self._capacity[name], 1) for name, n in client.held.items())
        return max(shares, default=0.0)

    def share_without(self, client: Client, request: Request) -> tuple[float, float]:
        """The same, if it had not been granted one lease that it has been."""
        held, now, then = client.held, 0.0, 0.0
        for name, parts, one in self.portion_of(request).amounts:
            has = held.get(name, 0)
            now = max(now, (has - parts) * one)
            then = max(then, has * one)
        return now / client.weight, max(then, now + LEAST) / client.weight

    def enter(self, record: TaskRecord, now: float) -> None:
        """A task was submitted."""
        self.now = now
        client = self.of(record.client)
        client.unfinished += 1
        if not client.is_waiting:
            self.note_wish(client)

    def exit(self, record: TaskRecord) -> None:
        """A task has ended."""
        client = self.of(record.client)
        client.unfinished -= 1
        self.forget(client)

    def forget(self, client: Client) -> None:
        """Forget a program that has left, if nothing of it is left."""
        is_over = client.has_left and not client.unfinished and not client.held
        # One may have come anew, while a process of before was ending.
        if is_over and self._by_id.get(client.id) is client:
            del self._by_id[client.id]

    def note_wish(self, client: Client) -> None:
        """A program that did not wants a task run: from now on it is owed its part."""
        client.since = self.now
        client.tag = max(client.tag, self.begun)

    def note_rest(self, id_: ClientId) -> None:
        """Nothing of a program waits any more; it may be forgotten already."""
        client = self._by_id.get(id_)
        if client is not None:
            client.is_waiting = False

    def begin(self, record: TaskRecord, lease: Lease) -> None:
        """A task has a lease: what it holds counts for its program."""
        client, spec = self.of(record.client), record.spec
        self.note_turn(client)
        lease.stake = Stake(self, client, lease.request, spec.is_endless)

    def take_over(self, record: TaskRecord, lease: Lease) -> None:
        """A task has the lease of one that was before it on its worker.

        That may be another program's, if it was sent there before any had joined.
        """
        stake = lease.stake
        if stake is not None and stake.client.id != record.client:
            stake.end()
            self.begin(record, lease)

    def note_turn(self, client: Client) -> None:
        """A program has had its turn."""
        client.since = self.now
        self.begun = max(self.begun, client.tag)


def _told(name: str, parts: int) -> str:
    return written(name, number(parts))
