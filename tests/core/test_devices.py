"""The choice of devices for a share: packing, memory, links, MIG instances.

That the choice is right in every other case is held by `test_every_small_case` and
by the machine at the end.
"""

from itertools import combinations

import pytest
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
from aiogpu.core.model.units import BY_SHARE, GPU, UNIT, device_quantity
from aiogpu.core.resources.devices import DeviceSet, Share
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.resources.topology import TRIED, Topology
from tests.core.builders import A100, GIB, H100, box
from tests.support.sampling import examples


def gpus(*free: float, types: str = "") -> DeviceSet:
    """Make devices with these free shares."""
    kinds = types.split() or [None] * len(free)
    devices = DeviceSet("GPU", [Device(i, kinds[i]) for i in range(len(free))])
    for index, share in enumerate(free):
        devices.take([(index, UNIT - device_quantity("free", share))])
    return devices


def place(
    devices: DeviceSet,
    amount: float,
    kind: str | None = None,
    spread: bool = False,
    barred: int = 0,
) -> list[int]:
    """Take an amount; return the indices of its devices."""
    parts = device_quantity("num_gpus", amount)
    request = Request.of({}, {"GPU": parts}, kind, spread=spread)
    shares = devices.choose(parts, request, barred)
    devices.take(shares or ())
    return [index for index, _ in shares or ()]


@pytest.mark.parametrize(
    ("free", "asked", "got"),
    [
        ((1, 1, 1), [0.5, 0.5, 0.5, 0.3, 0.3], [[0], [0], [1], [1], [2]]),
        ((1, 1, 1), [0.7, 0.5, 0.2, 0.3, 0.5], [[0], [1], [0], [1], [2]]),
        ((0, 1, 0), [0.25, 0.75], [[1], [1]]),
        ((1, 0.5, 1), [2, 0.5], [[0, 2], [1]]),
        ((1, 1, 1), [0.6, 0.6, 0.6, 0.5], [[0], [1], [2], []]),
        ((1, 1, 1), [0.6, 0.6, 0.6, 1], [[0], [1], [2], []]),
        ((0.3, 0.3), [0.5], [[]]),
        ((1, 1), [3], [[]]),
        ((1, 1, 1), [1, 1, 1, 1], [[0], [1], [2], []]),
        ((), [0.5, 1], [[], []]),
    ],
)
def test_packing_matches_ray(free, asked, got):
    devices = gpus(*free)
    assert [place(devices, amount) for amount in asked] == got


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("level", [0, 5_000, UNIT])
def test_check_detects_a_wrong_index_entry(index, level):
    devices = gpus(0, 0.5, 1)
    devices.check()
    is_so = devices.free[index] == level
    devices.free[index] = level
    if is_so:
        devices.check()
    else:
        with pytest.raises(AssertionError):
            devices.check()


def test_device_set_shows_free_shares_and_lacks_unknown_types():
    devices = gpus(1, 0.25, types="T4 A100")
    assert repr(devices) == "<DeviceSet GPU: 1.25/2>"
    assert [devices.mask_of_type(kind) for kind in ("T4", "H200", None)] == [1, 0, 3]
    assert place(devices, 0.5, "H200") == []


@pytest.mark.parametrize("spoil", ["named", "capacity", "mask", "apart"])
def test_check_detects_memory_reserved_twice(spoil):
    devices = DeviceSet("GPU", [Device(0, memory=80)])
    request = Request.of({}, {"GPU": 2_500}, gpu_memory=40)
    node = Ledger({}, [devices])
    node.take(request)
    node.check()
    if spoil == "named":
        devices.named[0] += 1
    elif spoil == "capacity":
        devices.capacity = (10,)
    elif spoil == "mask":
        devices.named_mask = 0
    else:
        devices._apart[0] = 5_000
    with pytest.raises(AssertionError):
        devices.check() if spoil != "named" else node.check()


def test_devices_by_size_are_cached_within_a_limit():
    devices = DeviceSet(GPU, [Device(0, memory=80 * GIB), Device(1, memory=300)])
    for size in (*range(1, 400), 300, 301):
        request = Request.of({}, {GPU: 5_000}, gpu_memory=size)
        assert devices.usable(5_000, request) == (0b11 if size <= 300 else 0b01)


def test_devices_by_condition_are_cached():
    devices = DeviceSet("GPU", [A100, H100])
    asked = []

    class Counted(DeviceSelector):
        def fits(self, device):
            asked.append(device.id)
            return super().fits(device)

    request = Request.of({}, {"GPU": UNIT}, where=Counted(least_memory=GIB))
    for _ in range(5):
        devices.choose(UNIT, request)
    assert asked == [0, 1]
    for least in range(2, 600):
        devices.choose(UNIT, Request.of({}, {"GPU": UNIT}, where=DeviceSelector(least)))
    assert len(devices._where) <= 256


def mask(*indices: int) -> int:
    return sum(1 << index for index in indices)


def placed(devices: DeviceSet, count: int, **options) -> list[int]:
    """Take whole devices; return their indices."""
    shares = devices.choose(
        count * UNIT, Request.of({}, {"GPU": count * UNIT}), **options
    )
    devices.take(shares or ())
    return [index for index, _ in shares or ()]


def test_choose_prefers_the_best_linked_free_devices():
    devices = DeviceSet("GPU", box(6, (0, 3), (1, 4), (2, 5)))
    devices.take([(0, UNIT)])
    assert placed(devices, 3) == [1, 2, 4]
    assert placed(devices, 2) == [3, 5]


def test_link_reported_by_one_end_counts():
    devices = [
        Device(0, uuid="GPU-0"),
        Device(1, uuid="GPU-1"),
        Device(2, uuid="GPU-2", links=frozenset({"GPU-0", "GPU-2", "GPU-7"})),
    ]
    links = Topology(devices)
    assert links.matter
    assert links.count(mask(0, 2)) == 1
    assert links.count(mask(0, 1, 2)) == 1
    assert placed(DeviceSet("GPU", devices), 2) == [0, 2]


def test_warm_set_goes_before_links():
    devices = DeviceSet("GPU", box(4, (2, 3)))
    assert placed(devices, 2, warm=(0, (mask(0, 1),))) == [0, 1]
    assert placed(devices, 2, warm=(0, (mask(1, 2),))) == [2, 3]


def test_fully_linked_devices_are_not_searched(monkeypatch):
    pairs = [(a, b) for a in range(8) for b in range(a)]
    assert not Topology(box(8, *pairs)).matter
    links = Topology(box(9, *pairs))
    assert links.matter
    monkeypatch.setattr("aiogpu.core.resources.topology.combinations", None)
    assert links.best(mask(*range(8)), 4) == mask(0, 1, 2, 3)
    assert links.best(mask(*range(1, 5)), 4) == mask(1, 2, 3, 4)


def test_lowest_devices_are_taken_from_a_large_machine(monkeypatch):
    links = Topology(box(24, (0, 23)))
    monkeypatch.setattr("aiogpu.core.resources.topology.combinations", None)
    assert links.best(mask(*range(24)), 8) == mask(*range(8))
    assert TRIED >= 70  # four of eight


# The index of devices, and their links, against a linear search.

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
    """Return the expected result of `choose`, by a linear search."""
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
    # The fullest device first: by parts, then by reserved memory.
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
    """Only the free share counts for a share of a device."""
    return isinstance(level, tuple) and level[0] == best[0] < UNIT


class IndexMachine(RuleBasedStateMachine):
    """Takes and returns shares and memory at random."""

    @initialize(cards=st.lists(st.tuples(TYPES, SIZES), max_size=70))
    def begin(self, cards):
        devices = [Device(i, kind, memory=m) for i, (kind, m) in enumerate(cards)]
        self.devices = DeviceSet("GPU", devices)
        self.held: list[tuple[tuple[Share, ...], int]] = []

    def on(self, index: int) -> list[tuple[int, int]]:
        """Return the held shares of a device, each with its explicit bytes."""
        return [
            (part, memory if part < UNIT else 0)
            for shares, memory in self.held
            for taken, part in shares
            if taken == index
        ]

    def named(self, index: int) -> int:
        return sum(max(memory, 0) for _, memory in self.on(index))

    def free_memory(self, index: int, more: int = 0) -> int:
        """Return the free bytes after a further share without explicit bytes."""
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
    """Draw devices, their links, and a mask of taken ones."""
    count = draw(st.integers(2, 8))
    pairs = list(combinations(range(count), 2))
    linked = set(draw(st.lists(st.sampled_from(pairs), unique=True)))
    taken = draw(st.sets(st.integers(0, count - 1), max_size=count - 2))
    return count, linked, taken


def joined(chosen, linked) -> int:
    """Count the linked pairs."""
    return sum(pair in linked for pair in combinations(sorted(chosen), 2))


@settings(max_examples=examples(200), derandomize=True, database=None, deadline=None)
@given(boxes(), st.integers(2, 8))
def test_best_linked_set_is_chosen(box, wanted):
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
