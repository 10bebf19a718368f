"""Which devices a share goes to: packing, memory, links, MIG instances.

That the choice is right in every other case is held by `test_every_small_case` and
`test_devices_properties`.
"""

import pytest

from aiogpu.core.model.request import Device, DeviceSelector, Request
from aiogpu.core.model.units import GPU, UNIT, device_quantity
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.resources.topology import TRIED, Topology
from tests.core.builders import A100, GIB, H100, box


def gpus(*free: float, types: str = "") -> DeviceSet:
    """Devices of which these shares are free."""
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
    """Take an amount; the indices of the devices that it came from."""
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
def test_packing_as_observed_on_ray(free, asked, got):
    devices = gpus(*free)
    assert [place(devices, amount) for amount in asked] == got


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("level", [0, 5_000, UNIT])
def test_check_notices_a_device_that_is_filed_wrongly(index, level):
    devices = gpus(0, 0.5, 1)
    devices.check()
    is_so = devices.free[index] == level
    devices.free[index] = level
    if is_so:
        devices.check()
    else:
        with pytest.raises(AssertionError):
            devices.check()


def test_a_set_shows_what_is_free_and_finds_no_device_of_a_type_that_it_lacks():
    devices = gpus(1, 0.25, types="T4 A100")
    assert repr(devices) == "<DeviceSet GPU: 1.25/2>"
    assert [devices.mask_of_type(kind) for kind in ("T4", "H200", None)] == [1, 0, 3]
    assert place(devices, 0.5, "H200") == []


@pytest.mark.parametrize("spoil", ["named", "capacity", "mask", "apart"])
def test_check_notices_memory_that_is_given_twice(spoil):
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


def test_which_devices_are_large_enough_is_remembered_for_some_sizes():
    devices = DeviceSet(GPU, [Device(0, memory=80 * GIB), Device(1, memory=300)])
    for size in (*range(1, 400), 300, 301):
        request = Request.of({}, {GPU: 5_000}, gpu_memory=size)
        assert devices.usable(5_000, request) == (0b11 if size <= 300 else 0b01)


def test_which_devices_fulfil_a_condition_is_looked_up_once():
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
    """Take so many whole devices."""
    shares = devices.choose(
        count * UNIT, Request.of({}, {"GPU": count * UNIT}), **options
    )
    devices.take(shares or ())
    return [index for index, _ in shares or ()]


def test_of_what_is_left_the_best_joined_are_taken():
    devices = DeviceSet("GPU", box(6, (0, 3), (1, 4), (2, 5)))
    devices.take([(0, UNIT)])
    assert placed(devices, 3) == [1, 2, 4]
    assert placed(devices, 2) == [3, 5]


def test_one_end_that_knows_of_a_link_is_enough():
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


def test_a_warm_set_goes_before_links():
    devices = DeviceSet("GPU", box(4, (2, 3)))
    assert placed(devices, 2, warm=(0, (mask(0, 1),))) == [0, 1]
    assert placed(devices, 2, warm=(0, (mask(1, 2),))) == [2, 3]


def test_what_is_joined_wholly_is_not_searched(monkeypatch):
    pairs = [(a, b) for a in range(8) for b in range(a)]
    assert not Topology(box(8, *pairs)).matter
    links = Topology(box(9, *pairs))
    assert links.matter
    monkeypatch.setattr("aiogpu.core.resources.topology.combinations", None)
    assert links.best(mask(*range(8)), 4) == mask(0, 1, 2, 3)
    assert links.best(mask(*range(1, 5)), 4) == mask(1, 2, 3, 4)


def test_in_a_large_box_the_lowest_are_taken(monkeypatch):
    links = Topology(box(24, (0, 23)))
    monkeypatch.setattr("aiogpu.core.resources.topology.combinations", None)
    assert links.best(mask(*range(24)), 8) == mask(*range(8))
    assert TRIED >= 70  # four of eight
