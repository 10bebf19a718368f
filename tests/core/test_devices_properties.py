"""The index of the devices, and their links, against a look at every single device.

Whatever is taken and given back, in whatever order: the choice is the one that a
search of them all would make.
"""

from itertools import combinations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiogpu.core.model.request import Device, DeviceSelector, Request
from aiogpu.core.model.units import BY_SHARE, UNIT
from aiogpu.core.resources.devices import DeviceSet, Share
from tests.support.sampling import examples

COMMON = st.sampled_from([1_000, 2_500, 3_333, 5_000, 7_000])


AMOUNTS = st.one_of(
    COMMON, st.integers(1, UNIT - 1), st.integers(1, 5).map(lambda n: n * UNIT)
)


TYPES = st.sampled_from([None, "A100", "T4"])


SIZES = st.sampled_from([0, 40, 80, 80])


MEMORY = st.sampled_from([0, 0, 0, BY_SHARE, 1, 10, 33, 50, 80])


MASKS = st.one_of(st.just(0), st.integers(0, (1 << 70) - 1))


def search(
    machine: "IndexMachine", amount: int, request: Request, barred: int
) -> tuple[Share, ...] | None:
    """What `choose` must answer, found by looking at one device after another."""
    devices, memory = machine.devices, request.gpu_memory
    usable = [
        index
        for index, device in enumerate(devices.devices)
        if request.accelerator_type in (None, device.type)
        and not barred >> index & 1
        and (request.where is None or request.where.fits(device))
        and machine.has_room(index, amount, memory)
    ]
    if amount >= UNIT:
        wanted = amount // UNIT
        whole = tuple((index, UNIT) for index in usable[:wanted])
        return whole if len(whole) == wanted else None
    if not usable:
        return None
    # The fullest first: by parts, and of whole ones those with somebody's memory.
    levels = {
        index: (devices.free[index], not machine.named(index))
        if amount
        else machine.free_memory(index)
        for index in usable
    }
    best = (max if request.spread else min)(levels.values())
    return (
        (
            min(i for i in usable if levels[i] == best or _is_tie(levels[i], best)),
            amount,
        ),
    )


def _is_tie(level, best) -> bool:
    """Below the whole, only what is free counts."""
    return isinstance(level, tuple) and level[0] == best[0] < UNIT


class IndexMachine(RuleBasedStateMachine):
    """Devices of which shares and memory are taken and given back."""

    @initialize(cards=st.lists(st.tuples(TYPES, SIZES), max_size=70))
    def begin(self, cards):
        devices = [Device(i, kind, memory=m) for i, (kind, m) in enumerate(cards)]
        self.devices = DeviceSet("GPU", devices)
        self.held: list[tuple[tuple[Share, ...], int]] = []

    def on(self, index: int) -> list[tuple[int, int]]:
        """The shares of a device that are held, each with the bytes that it named."""
        return [
            (part, memory if part < UNIT else 0)
            for shares, memory in self.held
            for taken, part in shares
            if taken == index
        ]

    def named(self, index: int) -> int:
        return sum(max(memory, 0) for _, memory in self.on(index))

    def free_memory(self, index: int, more: int = 0) -> int:
        """What is left if a share of so many parts is taken that names nothing."""
        capacity = self.devices.devices[index].memory
        implied = sum(part for part, memory in self.on(index) if memory <= 0)
        return capacity - capacity * (implied + more) // UNIT - self.named(index)

    def has_room(self, index: int, amount: int, memory: int) -> bool:
        free, capacity = self.devices.free[index], self.devices.devices[index].memory
        if free < min(amount, UNIT) or (memory and capacity < max(memory, 1)):
            return False
        if amount >= UNIT:
            return not self.named(index)
        if memory > 0:
            return self.free_memory(index) >= memory
        return self.free_memory(index, amount) >= 0

    @rule(
        amount=AMOUNTS,
        kind=TYPES,
        spread=st.booleans(),
        barred=MASKS,
        memory=MEMORY,
        where=st.sampled_from([None, None, DeviceSelector(50), DeviceSelector(90)]),
    )
    def take(self, amount, kind, spread, barred, memory, where):
        request = Request.of(
            *({}, {"GPU": amount}, kind), spread=spread, where=where, gpu_memory=memory
        )
        self.take_one(amount, request, barred)

    @rule(spread=st.booleans(), barred=MASKS, memory=st.sampled_from([1, 10, 50]))
    def take_memory(self, spread, barred, memory):
        self.take_one(0, Request.of({}, {}, spread=spread, gpu_memory=memory), barred)

    def take_one(self, amount, request, barred):
        shares = self.devices.choose(amount, request, barred)
        assert shares == search(self, amount, request, barred)
        if shares is not None:
            self.devices.take(shares, request.gpu_memory)
            self.held.append((shares, request.gpu_memory))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        place = data.draw(st.integers(0, len(self.held) - 1))
        self.devices.give_back(*self.held.pop(place))

    @invariant()
    def what_is_free_is_what_nobody_holds(self):
        free = [UNIT] * len(self.devices.devices)
        for shares, _ in self.held:
            for index, amount in shares:
                free[index] -= amount
        assert self.devices.free == free
        assert all(0 <= level <= UNIT for level in free)

    @invariant()
    def no_memory_is_given_twice(self):
        for index, device in enumerate(self.devices.devices):
            left = self.free_memory(index)
            assert 0 <= left <= device.memory
            assert self.devices.memory_reserved(index) == device.memory - left

    @invariant()
    def the_index_says_what_is_free(self):
        self.devices.check()
        untouched = [i for i, level in enumerate(self.devices.free) if level == UNIT]
        assert self.devices.free_mask == sum(1 << index for index in untouched)


TestIndex = IndexMachine.TestCase


TestIndex.settings = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=examples(100),
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def boxes(draw):
    """Some devices, their links, and which of them are taken."""
    count = draw(st.integers(2, 8))
    pairs = list(combinations(range(count), 2))
    linked = set(draw(st.lists(st.sampled_from(pairs), unique=True)))
    taken = draw(st.sets(st.integers(0, count - 1), max_size=count - 2))
    return count, linked, taken


def joined(chosen, linked) -> int:
    """How many pairs of them are linked."""
    return sum(pair in linked for pair in combinations(sorted(chosen), 2))


@settings(max_examples=examples(200), derandomize=True, database=None, deadline=None)
@given(boxes(), st.integers(2, 8))
def test_the_best_joined_set_is_chosen(box, wanted):
    count, linked, taken = box
    devices = DeviceSet(
        "GPU",
        [
            Device(
                index,
                uuid=f"GPU-{index}",
                links=frozenset(f"GPU-{b}" for a, b in linked if a == index),
            )
            for index in range(count)
        ],
    )
    devices.take([(index, UNIT) for index in taken])
    shares = devices.choose(wanted * UNIT, Request.of({}, {"GPU": wanted * UNIT}))
    free = [index for index in range(count) if index not in taken]
    best = min(
        combinations(free, wanted),
        key=lambda chosen: (-joined(chosen, linked), chosen),
        default=None,
    )
    assert shares == (best and tuple((index, UNIT) for index in best))
