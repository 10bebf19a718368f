"""Placement groups in the ledger: all bundles or none, each with its own ledger."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogpu.core.model.request import (
    ANY,
    SPREAD,
    STRICT_PACK,
    STRICT_SPREAD,
    BundleRef,
    Device,
)
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.resources.placement_group import (
    Layout,
    candidates,
    room_for,
    take_group,
    take_grouped,
    why_infeasible,
)
from tests.core.builders import GIB, bundle, placement_group_of, request_of

pytestmark = pytest.mark.usefixtures("few")


def ledger_of(gpus=2, cpus=4, types=(), memory=0, **scalars) -> Ledger:
    devices = [
        Device(i, types[i] if types else None, memory=memory) for i in range(gpus)
    ]
    amounts = {"CPU": cpus * UNIT, **{name: n * UNIT for name, n in scalars.items()}}
    return Ledger(
        amounts | {f"accelerator_type:{type_}": UNIT for type_ in types},
        [DeviceSet("GPU", devices)],
    )


def take(ledger, *bundles, strategy="PACK"):
    lease = take_grouped(
        ledger, placement_group_of(*bundles, strategy=strategy).request()
    )
    ledger.check()
    return lease


def take_in(ledger, index=ANY, key="gang", **amounts):
    options = {
        name: amounts.pop(name)
        for name in ("accelerator_type", "gpu_memory")
        if name in amounts
    }
    request = request_of(amounts, **options)
    lease = take_grouped(
        ledger, replace(request, placement_group=BundleRef(key, key, index))
    )
    ledger.check()
    return lease


def where(lease):
    """Return the devices of each bundle of a lease."""
    return [
        sorted({at for kind in part.masks for at in _in(part.masks[kind])})
        for part in lease.parts
    ]


def _in(mask):
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def within(key, index=ANY, **amounts):
    """Make the request of a member."""
    return replace(request_of(amounts), placement_group=BundleRef(key, key, index))


def test_group_takes_all_bundles_or_nothing():
    ledger = ledger_of(gpus=2)
    assert take_in(ledger, GPU=0.5) is None, "there is no group yet"
    assert ledger.homes(within("gang", GPU=0.5)) == ()
    lease = ledger.take(request_of({"GPU": 0.1}))
    assert take(ledger, {"GPU": 1}, {"GPU": 1}) is None
    assert ledger.available()["GPU"] == pytest.approx(1.9)
    ledger.give_back(lease)
    lease = take(ledger, {"GPU": 1, "CPU": 2}, {"GPU": 0.5})
    assert where(lease) == [[0], [1]]
    assert ledger.available() == {"CPU": 2.0, "GPU": 0.5}
    ledger.give_back(lease)
    assert ledger.available() == {"CPU": 4.0, "GPU": 2.0}
    assert not ledger.placement_groups
    ledger.check()


@pytest.mark.parametrize(
    ("strategy", "taken", "bundles", "devices"),
    [
        ("PACK", [], [0.5, 0.5], [[0], [0]]),
        (STRICT_PACK, [], [0.5, 0.5], [[0], [0]]),
        (SPREAD, [], [0.3] * 3, [[0], [1], [0]]),
        (SPREAD, [0.6], [0.2, 0.2], [[1], [0]]),
        (STRICT_SPREAD, [], [1], [[0]]),
        ("PACK", [0.9, 0.5], [0.1, 0.5], [[0], [1]]),
    ],
    ids=str,
)
def test_bundles_are_placed_by_strategy(strategy, taken, bundles, devices):
    """The largest bundle goes first; SPREAD uses different devices while possible."""
    ledger = ledger_of()
    for amount in taken:
        ledger.take(request_of({"GPU": amount}))
    lease = take(ledger, *({"GPU": amount} for amount in bundles), strategy=strategy)
    assert where(lease) == devices


def test_layout_backtracks_when_the_best_fit_fails():
    ledger = ledger_of(gpus=2)
    shares = ledger.device_sets["GPU"]
    shares.take([(0, 1000), (1, 4000)])
    # Best fit puts 0.5 and 0.4 on different devices, with no room for two of 0.3.
    lease = take_grouped(
        ledger,
        placement_group_of(*({"GPU": n} for n in (0.5, 0.4, 0.3, 0.3))).request(),
    )
    assert where(lease) == [[0], [0], [1], [1]]


def test_member_takes_from_its_bundle_or_the_first_with_room():
    ledger = ledger_of()
    take(ledger, {"GPU": 0.5}, {"GPU": 0.5, "CPU": 1})
    lease = take_in(ledger, 1, GPU=0.25, CPU=1)
    assert lease.shares == take_in(ledger, 1, GPU=0.25).shares == (((0, 2500),),)
    assert take_in(ledger, 1, GPU=0.1) is None
    assert take_in(ledger, 1, CPU=0.5) is None
    assert ledger.available() == {"CPU": 3.0, "GPU": 1.0}
    ledger.give_back(lease)
    assert take_in(ledger, GPU=0.5).home.index == 0
    assert take_in(ledger, GPU=0.25).home.index == 1
    assert take_in(ledger, GPU=0.25) is None


def test_members_of_a_typed_bundle_run_on_devices_of_the_type():
    ledger = ledger_of(gpus=2, types=("T4", "A100"))
    lease = take(ledger, {"GPU": 1, "type": "A100"}, {"GPU": 1})
    assert where(lease) == [[1], [0]]
    assert take_in(ledger, 0, GPU=1, accelerator_type="A100") is not None
    request = replace(
        request_of({"GPU": 1}, "A100"),
        placement_group=BundleRef("gang", "gang", 1),
    )
    assert take_grouped(ledger, request) is None
    reason = why_infeasible(ledger, request)
    assert "no bundle that it may use could hold it" in reason
    assert "1: {GPU: 1} on GPU 0 of type T4" in reason
    assert not candidates(ledger, request)


@pytest.mark.parametrize(
    ("bundles", "strategy", "reason"),
    [
        ([{"GPU": 1}] * 2, STRICT_SPREAD, "on a machine of its own"),
        ([{"GPU": 1}, {"GPU": 3}], "PACK", "for bundle 1, {GPU: 3}, it lacks GPU 3"),
        ([{"GPU": 1}] * 3, "PACK", "do not all fit at once"),
        ([{"GPU": 0.6}] * 3, "SPREAD", "do not all fit at once"),
        ([{"CPU": 3}] * 2, "PACK", "do not all fit at once"),
        ([{"GPU": 1, "CPU": 1}, {"GPU": 0.5}], "PACK", None),
    ],
)
def test_infeasible_groups_are_explained(bundles, strategy, reason):
    told = why_infeasible(
        ledger_of(), placement_group_of(*bundles, strategy=strategy).request()
    )
    assert told is None if reason is None else reason in told


def test_room_for_counts_members_of_a_group():
    ledger = ledger_of()
    within = BundleRef("gang", "gang")
    quarter = replace(request_of({"GPU": 0.25, "CPU": 1}), placement_group=within)
    assert room_for(ledger, quarter) == 1
    placement_group = take(ledger, {"GPU": 1, "CPU": 2}, {"GPU": 0.5})
    assert room_for(ledger, placement_group.request) == 1
    assert room_for(ledger, quarter) == 2
    assert room_for(ledger, quarter, are_lent=True) == 4
    cpu = replace(request_of({"CPU": 1}), placement_group=within)
    assert room_for(ledger, cpu) == 2
    assert room_for(ledger, cpu, are_lent=True) is None
    outside = request_of({"GPU": 0.25, "CPU": 1})
    assert room_for(ledger, outside) == ledger.room_for(outside)


@pytest.mark.parametrize(
    ("of", "request_", "fits"),
    [
        ({"GPU": 0.5, "CPU": 2}, request_of({"GPU": 0.5}), True),
        ({"GPU": 0.5, "CPU": 2}, request_of({"GPU": 0.25, "CPU": 1}, "A100"), True),
        ({"GPU": 0.5, "CPU": 2}, request_of({"GPU": 1}), False),
        ({"GPU": 0.5, "CPU": 2}, request_of({"CPU": 3}), False),
        ({"GPU": 0.5, "CPU": 2}, request_of({"license": 1}), False),
        ({"CPU": 1}, request_of({"CPU": 1, "GPU": 0.1}), False),
        (
            {"GPU": 0.5, "gpu_memory": 6},
            request_of({"GPU": 0.25}, gpu_memory=6),
            True,
        ),
        (
            {"GPU": 0.5, "gpu_memory": 6},
            request_of({"GPU": 0.25}, gpu_memory=7),
            False,
        ),
    ],
    ids=str,
)
def test_could_hold_compares_a_bundle_with_a_request(of, request_, fits):
    assert bundle(of).could_hold(request_) == fits


def test_groups_and_members_are_printed():
    placement_group = placement_group_of({"GPU": 0.5, "CPU": 2}, {"CPU": 1})
    assert str(placement_group) == "[{CPU: 2, GPU: 0.5}, {CPU: 1}]"
    told = str(placement_group.request())
    assert told == "{CPU: 3, GPU: 0.5} in [{CPU: 2, GPU: 0.5}, {CPU: 1}]"
    member = replace(request_of({"CPU": 1}), placement_group=BundleRef("k", "mine", 1))
    assert str(member) == "{CPU: 1} in bundle 1 of mine"
    assert str(BundleRef("k", "mine")) == "any bundle of mine"
    assert placement_group.holding(ANY, request_of({"CPU": 1})) == [0, 1]
    assert placement_group.holding(1, request_of({"CPU": 2})) == []


def test_layout_search_is_bounded():
    ledger = ledger_of(gpus=6, memory=0)
    shares = ledger.device_sets["GPU"]
    shares.take([(at, 50 * at) for at in range(6)])
    # All bundles but the last fit, in very many ways.
    wanted = [0.31] * 18 + [0.3]
    layout = Layout(ledger, placement_group_of(*({"GPU": n} for n in wanted)), {}, None)
    before = list(shares.free)
    assert layout.find() is None
    assert shares.free == before


def test_group_leaves_reserved_resources_alone():
    ledger = ledger_of(gpus=2)
    placement_group = placement_group_of({"GPU": 0.5}, {"CPU": 1}, strategy=SPREAD)
    request = placement_group.request()
    assert take_group(ledger, placement_group, request, {"GPU": 0b11}) is None
    assert take_group(ledger, placement_group, request, {}, {"CPU": 4 * UNIT}) is None
    two = placement_group_of({"CPU": 1}, {"CPU": 1})
    assert take_group(ledger, two, two.request(), {}, {"CPU": 3 * UNIT}) is None
    lease = take_group(
        ledger, placement_group, request, {"GPU": 0b01}, {"CPU": 3 * UNIT}
    )
    assert where(lease) == [[1], []]


AMOUNTS = st.sampled_from([0.2, 0.3, 0.5, 0.6, 1])


TAKEN = st.lists(st.sampled_from([0.1, 0.2, 0.5, 0.7, 1]), max_size=3)


def fits_by_force(free, amounts):
    """Search all layouts for one in which every amount fits."""
    parts = [round(amount * UNIT) for amount in amounts]
    for choice in product(range(len(free)), repeat=len(parts)):
        remaining = list(free)
        for at, amount in zip(choice, parts, strict=True):
            remaining[at] -= amount
        if min(remaining) >= 0:
            return True
    return False


@given(
    gpus=st.integers(1, 3),
    taken=TAKEN,
    wanted=st.lists(AMOUNTS, min_size=1, max_size=5),
    strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK"]),
)
def test_group_is_granted_whenever_a_layout_exists(gpus, taken, wanted, strategy):
    ledger = ledger_of(gpus=gpus)
    for amount in taken:
        ledger.take(request_of({"GPU": amount}))
    free = list(ledger.device_sets["GPU"].free)
    lease = take(ledger, *({"GPU": n} for n in wanted), strategy=strategy)
    assert (lease is not None) == fits_by_force(free, wanted), (free, wanted)
    if lease is None:
        assert ledger.device_sets["GPU"].free == free
        return
    for part, amount in zip(lease.parts, wanted, strict=True):
        member = take_in(ledger, part.index, GPU=amount)
        assert member is not None
        assert take_in(ledger, part.index, GPU=0.0001) is None
        ledger.give_back(member)
    ledger.give_back(lease)
    assert ledger.device_sets["GPU"].free == free
    ledger.check()


@given(st.lists(AMOUNTS, min_size=1, max_size=6))
def test_feasible_means_granted_by_an_idle_node(wanted):
    placement_group = placement_group_of(*({"GPU": amount} for amount in wanted))
    ledger = ledger_of(gpus=3)
    is_feasible = why_infeasible(ledger, placement_group.request()) is None
    assert is_feasible == fits_by_force([UNIT] * 3, wanted)
    assert is_feasible == (take_grouped(ledger, placement_group.request()) is not None)


def test_bundles_reserve_gpu_memory():
    ledger = ledger_of(gpus=1, memory=16 * GIB)
    share = {"GPU": 0.5, "gpu_memory": 6 * GIB}
    alone = {"gpu_memory": 5 * GIB}
    lease = take(ledger, share, alone)
    assert ledger.available()["gpu_memory"] == 5 * GIB
    assert sorted(ledger.reserved(lease)) == [("GPU", 0, 5 * GIB), ("GPU", 0, 6 * GIB)]
    assert take(ledger, alone | {"gpu_memory": 6 * GIB}) is None
    half = take_in(ledger, 0, GPU=0.25)
    assert ledger.reserved(half) == (("GPU", 0, 3 * GIB),)
    assert take_in(ledger, 0, gpu_memory=4 * GIB) is None
    named = take_in(ledger, 0, GPU=0.25, gpu_memory=2 * GIB)
    bare = take_in(ledger, 1, gpu_memory=5 * GIB)
    assert ledger.reserved(bare) == (("GPU", 0, 5 * GIB),)
    assert take_in(ledger, 1, gpu_memory=1) is None
    for request in (half, named, bare):
        ledger.give_back(request)
        ledger.check()
    ledger.give_back(lease)
    ledger.check()
    assert ledger.available()["gpu_memory"] == 16 * GIB
