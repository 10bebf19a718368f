"""Accounts of the clients that share a node: their limits and their usage.

This module keeps the accounts; `core.scheduler.placement` chooses the next client.
Nothing here costs anything until a second client has joined.

A client's virtual time measures how much of the node it has used, as in start-time fair
queuing (Goyal, Vin and Cheng, 1996). Each task adds: the part of the node that the task
held, times the seconds, divided by the client's weight. A client that begins to wait
starts at least at the virtual time of the client that began a task last. So an idle
client earns no credit.

The order between clients is computed on demand, because every lease changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

from aiogpu.core.model.ids import OWN, ClientId
from aiogpu.core.model.request import BundleRef, PlacementGroupSpec, Request
from aiogpu.core.model.text import in_words
from aiogpu.core.model.units import (
    CPU,
    GPU,
    GPU_MEMORY,
    UNIT,
    display_name,
    format_amount,
    number,
    quantity,
)
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.errors import InfeasibleError, LimitError, OptionError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program; nothing is limited by default.

    Attributes:
        max_waiting: the most unfinished tasks, running ones included; further tasks
            are refused. None for no limit.
        max_share: the most that the program may hold of a resource, as a part of the
            node's capacity, above 0 and up to 1: `{"CPU": 0.5}`; further tasks wait.
            Of GPU memory, only explicit requests count.

    Raises:
        OptionError: a value is out of range.
    """

    max_waiting: int | None = None
    max_share: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = self.max_waiting
        is_count = isinstance(most, int) and not isinstance(most, bool)
        if most is not None and not (is_count and 0 < most < 1 << 31):
            raise OptionError(
                f"max_waiting={most!r} is not a number of tasks; give an int from 1 to "
                f"{(1 << 31) - 1:_}, or None for no limit."
            )
        for name, share in self.max_share.items():
            option = f"max_share[{name!r}]"
            if not 0 < quantity(option, share) <= UNIT:
                raise OptionError(
                    f"{option}={share!r} is not a part of the node; give a number "
                    f"above 0 and up to 1."
                )

    def on(self, ledger: Ledger) -> dict[str, int]:
        """Return the limits as amounts of a node's resources, in parts.

        Raises:
            OptionError: the node lacks a limited resource.
        """
        capacity = capacity_of(ledger)
        for name in self.max_share:
            if name not in capacity:
                known = ", ".join(sorted(capacity))
                raise OptionError(
                    f"{name!r} cannot be limited: this node has only {known}."
                )
        return {
            name: capacity[name] * quantity(name, share) // UNIT
            for name, share in self.max_share.items()
        }


def capacity_of(ledger: Ledger) -> dict[str, int]:
    """Return a node's resources in parts, by name; devices of a kind are summed."""
    capacity = dict(ledger.capacity)
    for kind, devices in ledger.device_sets.items():
        capacity[kind] = len(devices.devices) * UNIT
        if memory := sum(devices.capacity):
            capacity[GPU_MEMORY] = memory * UNIT
    return capacity


LONGEST: Final = 60.0
"""The most seconds for which a task is charged, or a client must give way."""

LEAST: Final = 1e-6
"""The smallest charge of a task, as a part of the node: a task occupies a process."""


class DominantShare:
    """The share of a node that a request takes.

    Attributes:
        amounts: for each resource, its name, the parts that the request asks for, and
            1 divided by the node's capacity in parts.
        cost: the largest fraction of any one resource that the request takes.
        cost_lent: the same, not counting CPUs.
    """

    __slots__ = ("amounts", "cost", "cost_lent")

    def __init__(self, request: Request, capacity: Mapping[str, int]) -> None:
        self.amounts = tuple(
            (name, parts, 1 / max(capacity.get(name, 0), 1))
            for name, parts in _amounts(request)
        )
        parts_of = {name: parts * factor for name, parts, factor in self.amounts}
        self.cost = max(LEAST, *parts_of.values(), LEAST)
        parts_of.pop(CPU, None)
        self.cost_lent = max(LEAST, *parts_of.values(), LEAST)


def _amounts(request: Request) -> list[tuple[str, int]]:
    if isinstance(request.placement_group, BundleRef):
        return []  # charged to the placement group's own request
    if isinstance(request.placement_group, PlacementGroupSpec):
        total: Counter[str] = Counter()
        for bundle in request.placement_group.bundles:
            total.update(dict(_amounts(bundle)))
        return list(total.items())
    amounts = [*request.scalars, *request.devices]
    if request.gpu_memory > 0:
        count = max(dict(request.devices).get(GPU, 0) // UNIT, 1)
        amounts.append((GPU_MEMORY, request.gpu_memory * count * UNIT))
    return [(name, parts) for name, parts in amounts if parts]


class LeaseUsage:
    """Charges a program for one lease that a task of the program holds.

    Attributes:
        client: the program.
        portion: the share of the node that the lease takes.
        cost: the charge for one second; 0 for a lease that is held without end.
        turn_since: when the program last got its turn to hold the lease.
    """

    def __init__(
        self, clients: Accounts, client: Account, request: Request, is_endless: bool
    ) -> None:
        self._clients = clients
        self.client = client
        self.portion = portion = clients.portion_of(request)
        self._since = self.turn_since = clients.clock.now
        self._left = LONGEST
        self.cost = self._full_cost = 0.0 if is_endless else portion.cost
        self._cost_lent = 0.0 if is_endless else portion.cost_lent
        self._held = {name: parts for name, parts, _ in portion.amounts}
        for name, parts in self._held.items():
            self._move(name, parts)

    def charge(self) -> None:
        """Charge for the time until now."""
        now, client = self._clients.clock.now, self.client
        seconds = min(now - self._since, self._left)
        client.virtual_time += self.cost * seconds / client.weight
        self._since = now
        self._left -= seconds

    def note_task(self) -> float:
        """Note that the next task holds the lease; return the age of the time slice."""
        self.charge()
        self._left = LONGEST
        return self._since - self.turn_since

    def begin_slice(self) -> None:
        """Begin a new turn of the program."""
        self.turn_since = self._since

    def end(self) -> None:
        """Note that the lease has ended."""
        self.charge()
        for name, parts in self._held.items():
            self._move(name, -parts)
        self._clients.forget(self.client)

    def lend(self) -> None:
        """Note that the lease's CPUs were returned while its task waits."""
        self.charge()
        self.cost = self._cost_lent
        self._move(CPU, -self._held.get(CPU, 0))

    def resume(self) -> None:
        """Note that the CPUs are held again."""
        self.charge()
        self.cost = self._full_cost
        self._move(CPU, self._held.get(CPU, 0))

    def keep_devices(self, kinds: Container[str]) -> None:
        """Note that only the devices are still held; they are not charged."""
        self.charge()
        self.cost = 0.0
        for name in list(self._held):
            if name not in kinds and name != GPU_MEMORY:
                self._move(name, -self._held.pop(name))

    def _move(self, name: str, parts: int) -> None:
        held = self.client.held
        amount = held.get(name, 0) + parts
        if amount:
            held[name] = amount
        else:
            held.pop(name, None)


def usage_of(lease: Lease) -> LeaseUsage | None:
    """Return the account of a lease; None if the node is not shared."""
    usage = lease.usage
    assert usage is None or isinstance(usage, LeaseUsage), usage
    return usage


CACHED: Final = 4096
"""Requests whose shares are cached."""


@dataclass(slots=True, eq=False)
class Account:
    """The account of one program.

    Attributes:
        weight: the program's share relative to a program of weight 1.
        limits: the limits, as the program or the node declared them.
        most: the most that the program may hold of each limited resource, in parts.
        held: the amounts that it holds now, in parts, without lent CPUs.
        virtual_time: its usage, divided by its weight.
        since: when it last began a task, or began to wait for its first.
        unfinished: the number of its unfinished tasks.
        has_left: forget the program once all its tasks have ended.
        is_behind: the program does not read its results; none of its tasks start.
        stops_since: when its stop was announced, or None.
    """

    id: ClientId
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    most: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    virtual_time: float = 0.0
    since: float = 0.0
    unfinished: int = 0
    has_left: bool = False
    is_behind: bool = False
    stops_since: float | None = None


class Clock(Protocol):
    """Holds the time of the latest event."""

    now: float


class Accounts:
    """The accounts of all programs: those that have joined, and the node's own.

    Attributes:
        clock: the time of the latest event.
        begun: the highest virtual time at which a program has begun a task.
    """

    def __init__(self, clock: Clock, ledger: Ledger) -> None:
        self.clock = clock
        self.begun = 0.0
        self._ledger = ledger
        self._capacity = capacity_of(ledger)
        self._portions: dict[Request, DominantShare] = {}
        self._by_id: dict[ClientId, Account] = {OWN: Account(OWN)}

    def __repr__(self) -> str:
        return f"<Accounts {sorted(self._by_id)}>"

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_id.values())

    def join(self, id_: ClientId, weight: float, limits: Limits) -> None:
        """Add a program, or change its weight and limits.

        Raises:
            OptionError: the weight is out of range, or the node lacks a limited
                resource.
        """
        if not 0 < weight < inf:
            raise OptionError(
                f"weight={weight!r} is not a weight; give a finite number above 0: a "
                f"program of weight 2 gets twice the share of one of weight 1."
            )
        most = limits.on(self._ledger)
        client = self.of(id_)
        client.weight, client.limits, client.most = weight, limits, most
        client.has_left = False

    def set_behind(self, id_: ClientId, is_behind: bool) -> None:
        """Note that a program does not read its messages, or has caught up."""
        client = self._by_id.get(id_)
        if client is not None:
            client.is_behind = is_behind

    def leave(self, id_: ClientId) -> None:
        """Forget a program once its last task has ended."""
        client = self._by_id.get(id_)
        if client is not None:
            client.has_left, client.is_behind = True, False
            self.forget(client)

    def of(self, id_: ClientId) -> Account:
        """Return the record of a program; make one if there is none."""
        client = self._by_id.get(id_)
        if client is None:
            client = self._by_id[id_] = Account(id_)
        return client

    def find(self, id_: ClientId) -> Account | None:
        """Return the record of a program; None if there is none."""
        return self._by_id.get(id_)

    def portion_of(self, request: Request) -> DominantShare:
        """Return the share of the node that a request takes."""
        portion = self._portions.get(request)
        if portion is None:
            if len(self._portions) >= CACHED:
                self._portions.clear()
            portion = self._portions[request] = DominantShare(request, self._capacity)
        return portion

    def amounts_of(self, request: Request) -> list[tuple[str, int]]:
        """Return the amounts of a request by resource, in parts."""
        return [(name, parts) for name, parts, _ in self.portion_of(request).amounts]

    def beyond(
        self, client: Account, request: Request, held: Mapping[str, int]
    ) -> Iterator[tuple[str, int]]:
        """Yield the resources, with parts, by which a request exceeds the limits."""
        most = client.most
        for name, parts in self.amounts_of(request) if most else ():
            if held.get(name, 0) + parts > most.get(name, inf):
                yield name, parts

    def allows(self, id_: ClientId, request: Request) -> bool:
        """Return True if a request alone is within a program's limits."""
        return not any(self.beyond(self.of(id_), request, {}))

    def admit(self, id_: ClientId, request: Request) -> None:
        """Check that a program may submit one more task.

        Raises:
            LimitError: the program has reached its limit of unfinished tasks.
            InfeasibleError: the task asks for more than the program may hold, by each
                of its requests.
        """
        client = self._by_id.get(id_)
        if client is None:
            return
        most = client.limits.max_waiting
        if most is not None and client.unfinished >= most:
            raise LimitError(
                f"this program has {client.unfinished} unfinished tasks; its limit on "
                f"this node is {most} (max_waiting). Await some of them before "
                f"submitting more, or join the node with a higher limit."
            )
        excesses: list[str] = []
        for choice in (request, *request.alternatives):
            name, parts = next(self.beyond(client, choice, {}), ("", 0))
            if not name:
                return
            excesses.append(
                f"{_amount(name, parts)} {display_name(name)}, but this program may "
                f"hold only {_amount(name, client.most[name])}"
            )
        raise InfeasibleError(
            f"the task asks for {', or for '.join(excesses)} at once on this node: the "
            f"task would wait for ever. Ask for less, or join the node with a higher "
            f"limit."
        )

    def bars(self, record: TaskRecord) -> bool:
        """Return True if a task must wait because of a limit of its program."""
        client = self.of(record.client)
        if client.is_behind or not client.most:
            return client.is_behind
        return any(self.beyond(client, record.spec.shape.request, client.held))

    def exceeds(self, client: Account) -> bool:
        """Return True if a program may start no further task, even on a lease it has.

        It exceeds its limits because a task took its CPUs back, or it is behind.
        """
        return client.is_behind or any(
            client.held.get(name, 0) > parts for name, parts in client.most.items()
        )

    def why_barred(self, record: TaskRecord) -> str:
        """Describe the limits of its program for which a task waits; empty if none.

        For example "2 of at most 2 GPU".
        """
        client = self.of(record.client)
        return in_words(
            [
                f"{_amount(name, client.held.get(name, 0))} of at most "
                f"{_amount(name, client.most[name])} {display_name(name)}"
                for name, _ in self.beyond(
                    client, record.spec.shape.request, client.held
                )
            ]
        )

    def why_limited(self, record: TaskRecord) -> str:
        """Return a clause about the limits for which a task waits; empty if none."""
        limits = self.why_barred(record)
        return f"; this program already holds {limits}" if limits else ""

    def share_of(
        self, client: Account, request: Request, *, has_it: bool = False
    ) -> tuple[float, float]:
        """Return a program's dominant share, before and after it gets a request.

        Only the resources that the request asks for count. The shares are divided by
        the program's weight.

        Args:
            client: the program.
            request: the request.
            has_it: the program already holds a lease for this request; the lease
                counts as not granted.

        Returns:
            The largest share of any of the resources: now, and if the request were
            granted.
        """
        held, now, then = client.held, 0.0, 0.0
        portion = self.portion_of(request)
        if not held:
            return 0.0, portion.cost / client.weight
        for name, parts, factor in portion.amounts:
            before = held.get(name, 0) - parts * has_it
            now = max(now, before * factor)
            then = max(then, (before + parts) * factor)
        return now / client.weight, max(then, now + LEAST) / client.weight

    def held_by(self, client: Account) -> float:
        """Return the largest part that a program holds of any resource."""
        shares = (n / max(self._capacity[name], 1) for name, n in client.held.items())
        return max(shares, default=0.0)

    def enter(self, record: TaskRecord, *, is_waiting: bool) -> None:
        """Note a new task; `is_waiting`: other tasks of its program wait already."""
        client = self.of(record.client)
        client.unfinished += 1
        if not is_waiting:
            self.note_wish(client)

    def exit(self, record: TaskRecord) -> None:
        """Note that a task has ended."""
        client = self.of(record.client)
        client.unfinished -= 1
        self.forget(client)

    def forget(self, client: Account) -> None:
        """Forget a program that has left, if it has no tasks and no leases."""
        is_over = client.has_left and not client.unfinished and not client.held
        # A new account may exist under this id, while an old process was ending.
        if is_over and self._by_id.get(client.id) is client:
            del self._by_id[client.id]

    def note_wish(self, client: Account) -> None:
        """Note that an idle program begins to wait; it is owed its share from now."""
        client.since = self.clock.now
        client.virtual_time = max(client.virtual_time, self.begun)

    def begin(self, record: TaskRecord, lease: Lease) -> None:
        """Charge the lease of a task that starts to the task's program."""
        client, spec = self.of(record.client), record.spec
        self.note_turn(client)
        lease.usage = LeaseUsage(self, client, lease.request, spec.is_endless)

    def note_turn(self, client: Account) -> None:
        """Note that a program starts a task."""
        client.since = self.clock.now
        self.begun = max(self.begun, client.virtual_time)


def _amount(name: str, parts: int) -> str:
    return format_amount(name, number(parts))
