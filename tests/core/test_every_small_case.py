"""Every sequence of takes and returns on few GPUs, against a model as plain as can be.

No case is drawn: up to the bound all are tried, in whatever order, so that what a
smaller one shows is shown by the smallest. The model follows the rules of
`docs/tasks.md` and of decision 0024, by trying every set of devices. It shares nothing
with the core but the words of a request.
"""

from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import combinations, product

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import BY_SHARE, GPU, device_quantity
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import why_infeasible
from tests.core.builders import World, submit

WHOLE = 10_000


@dataclass(frozen=True)
class Card:
    """A GPU: its type, and its bytes of memory, 0 if unknown."""

    type: str = "A100"
    memory: int = 0


@dataclass(frozen=True)
class Ask:
    """The options of a task: `num_gpus`, and others.

    Attributes:
        gpus: as a decimal text, so that it is exact.
        memory: bytes by name; None where it says "share".
    """

    gpus: str
    type: str | None = None
    spread: bool = False
    memory: int | None = 0

    @property
    def parts(self) -> int:
        """The parts of 1/10 000, truncated."""
        return int(Decimal(self.gpus) * WHOLE)

    @property
    def count(self) -> int:
        """The number of devices."""
        return max(self.parts // WHOLE, 1)

    @property
    def part(self) -> int:
        """The parts of each device."""
        return min(self.parts, WHOLE)

    @property
    def names(self) -> int:
        """The explicit bytes of each device; 0 for whole devices."""
        return 0 if self.part == WHOLE or self.memory is None else self.memory


@dataclass
class NaiveNode:
    """A naive model: GPUs, each with its holders."""

    cards: list[Card]
    held: list[list[Ask]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [[] for _ in self.cards]

    def free(self, at: int) -> int:
        """Return the free parts of a device."""
        return WHOLE - sum(ask.part for ask in self.held[at])

    def free_bytes(self, at: int, *more: Ask) -> int:
        """Return the bytes reserved neither explicitly nor by a share."""
        on = [*self.held[at], *more]
        named = sum(ask.names for ask in on)
        implied = sum(ask.part for ask in on if not ask.names)
        memory = self.cards[at].memory
        return memory - memory * implied // WHOLE - named

    def has_room(self, at: int, ask: Ask) -> bool:
        """Return True if a device has room for a task now."""
        card = self.cards[at]
        if ask.type not in (None, card.type):
            return False
        if ask.memory is None and not card.memory:
            return False
        if ask.memory and card.memory < ask.memory:
            return False
        if ask.part == WHOLE:
            return not self.held[at]
        return self.free(at) >= ask.part and self.free_bytes(at, ask) >= 0

    def choose(self, ask: Ask) -> tuple[int, ...] | None:
        """Return the best set of devices, or None."""
        sets = [
            chosen
            for chosen in combinations(range(len(self.cards)), ask.count)
            if all(self.has_room(at, ask) for at in chosen)
        ]
        return min(sets, key=lambda chosen: self.rank(chosen, ask), default=None)

    def rank(self, chosen: tuple[int, ...], ask: Ask) -> tuple[object, ...]:
        """Sort key: the fullest or the emptiest, then the lowest ids."""
        at = chosen[0]
        if ask.part == WHOLE:
            return chosen
        if not ask.part:
            fullness = (self.free_bytes(at),)
        else:
            # A device with explicit memory is not free as a whole, so not quite empty.
            is_bare = self.free(at) == WHOLE and not self.held[at]
            fullness = (self.free(at), is_bare)
        if ask.spread:
            fullness = tuple(-each for each in fullness)
        return *fullness, at

    def is_feasible(self, ask: Ask) -> bool:
        """Return True if an empty node could grant it."""
        return NaiveNode(self.cards).choose(ask) is not None


THIRD = str(1 / 3)


PLAIN = [
    *(Ask(gpus) for gpus in (THIRD, "0.5", "0.7", "1", "2")),
    *(Ask(gpus, spread=True) for gpus in (THIRD, "0.5")),
]


TYPED = [
    *(Ask("0.5", kind) for kind in (None, "A100", "T4")),
    *(Ask("1", kind) for kind in ("A100", "T4")),
    Ask("2", "A100"),
    Ask("0.7", "T4", spread=True),
]


BY_BYTES = [
    Ask("0.5"),
    Ask("0.5", memory=4),
    Ask("0.25", memory=None),
    Ask("0", memory=4),
    Ask("0", memory=6, spread=True),
    Ask("0.25", memory=3, spread=True),
    Ask("1", memory=8),
    Ask("1"),
]


BOXES = {
    "plain": (PLAIN, [[Card()] * count for count in (1, 2, 3)]),
    "typed": (TYPED, [[Card(), Card("T4")], [Card("T4"), Card(), Card()]]),
    "by bytes": (
        BY_BYTES,
        [
            [Card(memory=10)],
            [Card(memory=10), Card(memory=7)],
            [Card(), Card(memory=9)],
        ],
    ),
}


WIDE = {
    "plain": (PLAIN, [[Card()] * 4]),
    "typed": (TYPED, [[Card(), Card("T4"), Card(), Card("T4")]]),
    "by bytes": (BY_BYTES, [[Card(memory=10), Card(memory=7), Card(memory=10)]]),
    "all": (
        [*PLAIN[1:4], *TYPED[1:3], *BY_BYTES[1:5]],
        [[Card(memory=10), Card("T4", memory=7), Card(memory=10)]],
    ),
}


def request_of(ask: Ask) -> Request:
    """Make the request for the core."""
    devices = {GPU: device_quantity("num_gpus", float(ask.gpus))}
    memory = BY_SHARE if ask.memory is None else ask.memory
    asked = Request.of({}, devices, spread=ask.spread, gpu_memory=memory)
    # The custom resource of a type does not matter here.
    return replace(asked, accelerator_type=ask.type)


@dataclass
class Both:
    """The ledger and the naive model, with the same operations."""

    ledger: Ledger
    naive: NaiveNode
    asks: list[tuple[Ask, Request]]
    seen: int = 0

    @classmethod
    def of(cls, cards: list[Card], asks: list[Ask]) -> "Both":
        devices = [
            Device(index, card.type, memory=card.memory)
            for index, card in enumerate(cards)
        ]
        ledger = Ledger({}, [DeviceSet(GPU, devices)])
        requests = [(ask, request_of(ask)) for ask in asks]
        return cls(ledger, NaiveNode(cards), requests)

    def explore(self, depth: int, held: list[tuple[Ask, Lease]]) -> None:
        """Try all next steps recursively, and undo each."""
        self.seen += 1
        free = self.ledger.device_sets[GPU].free
        assert list(free) == [self.naive.free(at) for at in range(len(free))]
        if not depth:
            self.ledger.check()
            return
        for ask, request in self.asks:
            expected = self.naive.choose(ask)
            lease = self.ledger.take(request)
            got = lease and tuple(index for index, _ in lease.shares[0])
            assert got == expected, (ask, self.naive.held)
            if lease is not None:
                self.put(ask, lease)
                self.explore(depth - 1, [*held, (ask, lease)])
                self.give_back(ask, lease)
        for place, (ask, lease) in enumerate(held):
            self.give_back(ask, lease)
            self.explore(depth - 1, held[:place] + held[place + 1 :])
            self.take_again(ask, lease)

    def put(self, ask: Ask, lease: Lease) -> None:
        for index, part in lease.shares[0]:
            assert part == ask.part
            self.naive.held[index].append(ask)

    def give_back(self, ask: Ask, lease: Lease) -> None:
        self.ledger.give_back(lease)
        for index, _ in lease.shares[0]:
            self.naive.held[index].remove(ask)

    def take_again(self, ask: Ask, lease: Lease) -> None:
        """Undo `give_back`."""
        self.ledger.leases[lease.id] = lease
        memory = lease.request.gpu_memory
        self.ledger.device_sets[GPU].take(lease.shares[0], memory)
        self.put(ask, lease)


def compare(asks: list[Ask], cards: list[Card], depth: int) -> int:
    both = Both.of(cards, asks)
    both.explore(depth, [])
    return both.seen


@pytest.mark.parametrize("kind", BOXES)
def test_every_sequence_of_four_steps(kind):
    asks, boxes = BOXES[kind]
    for cards in boxes:
        assert compare(asks, cards, depth=4) > 400


@pytest.mark.slow
@pytest.mark.parametrize("kind", WIDE)
def test_every_sequence_of_five_steps_on_more_cards(kind):
    asks, boxes = WIDE[kind]
    for cards in boxes:
        assert compare(asks, cards, depth=5) > 10_000


def test_infeasible_requests_are_found():
    """On every box of up to three cards."""
    kinds = [Card(), Card("T4"), Card(memory=10), Card("T4", memory=4)]
    asks = [*PLAIN, *TYPED, *BY_BYTES, Ask("3"), Ask("1", "H100"), Ask("0", memory=11)]
    for count in (1, 2, 3):
        for cards in product(kinds, repeat=count):
            both = Both.of(list(cards), asks)
            for ask, request in both.asks:
                may = both.naive.is_feasible(ask)
                assert (why_infeasible(both.ledger, request) is None) == may, ask


@pytest.mark.parametrize("amount", [0.5, 1])
@pytest.mark.parametrize("strategy", ["pack", "spread"])
def test_wide_task_waits_only_for_tasks_before_it(amount, strategy):
    """Under an endless stream, for every order in which tasks end."""
    orders: list[tuple[str, ...]] = [()]
    tried = 0
    while orders:
        order = orders.pop()
        w = World(cpus=16, gpus=2, config=SchedulerConfig(reserve_after=0.0))
        submit(
            w,
            [f"before{n}" for n in range(2 * int(1 / amount))],
            num_gpus=amount,
            strategy=strategy,
        )
        before = w.running
        w.submit("wide", num_gpus=2)
        submit(w, [f"after{n}" for n in range(8)], num_gpus=amount, strategy=strategy)
        for name in order:
            w.finish(name)
        assert ("wide" in w.running) == (set(order) == before), order
        if "wide" not in w.running:
            orders += [(*order, name) for name in sorted(w.running)]
        tried += 1
    assert tried > len(before)
