"""The index of the devices against a plain search of them all.

Whatever is taken and given back, in whatever order: the choice is the one that a
look at every single device would make.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiogpu.core.devices import Device, DeviceSet, Share
from aiogpu.core.resources import UNIT, Request

COMMON = st.sampled_from([1_000, 2_500, 3_333, 5_000, 7_000])
AMOUNTS = st.one_of(
    COMMON, st.integers(1, UNIT - 1), st.integers(1, 5).map(lambda n: n * UNIT)
)
TYPES = st.sampled_from([None, "A100", "T4"])
MASKS = st.one_of(st.just(0), st.integers(0, (1 << 70) - 1))


def search(
    devices: DeviceSet, amount: int, kind: str | None, *, spread: bool, barred: int
) -> tuple[Share, ...] | None:
    """What `choose` must answer, found by looking at one device after another."""
    free = devices.free
    usable = [
        index
        for index, device in enumerate(devices.devices)
        if kind in (None, device.type) and not barred >> index & 1
    ]
    if amount >= UNIT:
        whole = [(index, UNIT) for index in usable if free[index] == UNIT]
        wanted = amount // UNIT
        return tuple(whole[:wanted]) if len(whole) >= wanted else None
    room = [index for index in usable if free[index] >= amount]
    if not room:
        return None
    sign = -1 if spread else 1
    return ((min(room, key=lambda index: (sign * free[index], index)), amount),)


class IndexMachine(RuleBasedStateMachine):
    """Devices of which shares are taken and given back."""

    @initialize(types=st.lists(TYPES, max_size=70))
    def begin(self, types):
        devices = [Device(index, kind) for index, kind in enumerate(types)]
        self.devices = DeviceSet("GPU", devices)
        self.held: list[tuple[Share, ...]] = []

    @rule(amount=AMOUNTS, kind=TYPES, spread=st.booleans(), barred=MASKS)
    def take(self, amount, kind, spread, barred):
        request = Request.of({}, {"GPU": amount}, kind, spread=spread)
        shares = self.devices.choose(amount, request, barred)
        options = {"spread": spread, "barred": barred}
        assert shares == search(self.devices, amount, kind, **options)
        if shares is not None:
            self.devices.take(shares)
            self.held.append(shares)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        place = data.draw(st.integers(0, len(self.held) - 1))
        self.devices.give_back(self.held.pop(place))

    @invariant()
    def what_is_free_is_what_nobody_holds(self):
        free = [UNIT] * len(self.devices.devices)
        for shares in self.held:
            for index, amount in shares:
                free[index] -= amount
        assert self.devices.free == free
        assert all(0 <= level <= UNIT for level in free)

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
    max_examples=100,
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
)
