"""What a request is of a node, and what a program has had of it by one lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Final

from aiogpu.core.gang import Gang, Within
from aiogpu.core.resources import CPU, GPU, GPU_MEMORY, UNIT, Request

if TYPE_CHECKING:
    from aiogpu.core.clients import Client, Clients

LONGEST: Final = 60.0
"""Seconds that a task counts at most, and for which a turn can be put off."""
LEAST: Final = 1e-6
"""The part of a node that a task counts at least: it has a process."""


class Portion:
    """What a request is of a node.

    Attributes:
        amounts: of each resource that it asks for, in parts, and one over what there
            is of it.
        cost: the greatest part that it is of any of them.
        cost_lent: the same without its CPUs.
    """

    __slots__ = ("amounts", "cost", "cost_lent")

    def __init__(self, request: Request, capacity: Mapping[str, int]) -> None:
        self.amounts = tuple(
            (name, parts, 1 / max(capacity.get(name, 0), 1))
            for name, parts in _amounts(request)
        )
        parts_of = {name: parts * one for name, parts, one in self.amounts}
        self.cost = max(LEAST, *parts_of.values(), LEAST)
        parts_of.pop(CPU, None)
        self.cost_lent = max(LEAST, *parts_of.values(), LEAST)


def _amounts(request: Request) -> list[tuple[str, int]]:
    if isinstance(request.gang, Within):
        return []  # its gang has it already
    if isinstance(request.gang, Gang):
        held: Counter[str] = Counter()
        for bundle in request.gang.bundles:
            held.update(dict(_amounts(bundle.request())))
        return list(held.items())
    found = [*request.scalars, *request.devices]
    if request.gpu_memory > 0:
        count = max(dict(request.devices).get(GPU, 0) // UNIT, 1)
        found.append((GPU_MEMORY, request.gpu_memory * count * UNIT))
    return [(name, parts) for name, parts in found if parts]


class Stake:
    """A lease on the account of the program whose task has it.

    Attributes:
        client: the program.
        portion: what was asked for.
        cost: what a second of it counts; 0 of what is held without end.
        turn_since: when it was last the program's turn to have it.
    """

    __slots__ = (
        *(
            "_clients",
            "_cost_lent",
            "_full_cost",
            "_held",
            "_left",
            "_since",
            "turn_since",
        ),
        *("client", "cost", "portion"),
    )

    def __init__(
        self, clients: Clients, client: Client, request: Request, is_endless: bool
    ) -> None:
        self._clients = clients
        self.client = client
        self.portion = portion = clients.portion_of(request)
        self._since = self.turn_since = clients.now
        self._left = LONGEST
        self.cost = self._full_cost = 0.0 if is_endless else portion.cost
        self._cost_lent = 0.0 if is_endless else portion.cost_lent
        self._held = [(name, parts) for name, parts, _ in portion.amounts]
        for name, parts in self._held:
            self._move(name, parts)

    def charge(self) -> None:
        """Count what was had until now."""
        now, client = self._clients.now, self.client
        seconds = min(now - self._since, self._left)
        client.tag += self.cost * seconds / client.weight
        self._since = now
        self._left -= seconds

    def note_task(self) -> float:
        """It is held for another task from now on; gives the age of its slice."""
        self.charge()
        self._left = LONGEST
        return self._since - self.turn_since

    def begin_slice(self) -> None:
        """The program has its turn anew."""
        self.turn_since = self._since

    def end(self) -> None:
        """Nothing is held any more."""
        self.charge()
        for name, parts in self._held:
            self._move(name, -parts)
        self._clients.forget(self.client)

    def lend(self) -> None:
        """The CPUs are others' for a while."""
        self.charge()
        self.cost = self._cost_lent
        self._move(CPU, -self._cpus())

    def resume(self) -> None:
        """The CPUs are held again."""
        self.charge()
        self.cost = self._full_cost
        self._move(CPU, self._cpus())

    def keep_devices(self, kinds: Container[str]) -> None:
        """All but devices is given back; nobody is charged for the rest."""
        self.charge()
        self.cost = 0.0
        for name, parts in self._held:
            if name not in kinds and name != GPU_MEMORY:
                self._move(name, -parts)
        self._held = [
            each for each in self._held if each[0] in kinds or each[0] == GPU_MEMORY
        ]

    def _cpus(self) -> int:
        return dict(self._held).get(CPU, 0)

    def _move(self, name: str, parts: int) -> None:
        held = self.client.held
        left = held.get(name, 0) + parts
        if left:
            held[name] = left
        else:
            held.pop(name, None)
