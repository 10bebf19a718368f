"""Where shares go: the rules of Ray's page on fractional accelerators."""

import pytest

from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import UNIT, device_quantity
from aiogpu.core.resources.devices import DeviceSet


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


@pytest.mark.parametrize(
    ("free", "asked", "got"),
    [
        ((1, 1, 1), [0.25] * 4, [[0], [1], [2], [0]]),
        ((1, 1, 1), [0.7, 0.5, 0.2, 0.3, 0.5], [[0], [1], [2], [2], [1]]),
        ((0.3, 0.6, 0.5), [0.5, 0.5, 0.5], [[1], [2], []]),
        ((0.5, 1, 1), [2, 0.5], [[1, 2], [0]]),
        ((0.9, 1), [1, 0.9, 0.1], [[1], [0], []]),
        ((0.3, 0.3), [0.5], [[]]),
        ((), [0.5, 1], [[], []]),
    ],
)
def test_spreading_goes_to_the_emptiest_device(free, asked, got):
    """[B24]"""
    devices = gpus(*free)
    assert [place(devices, amount, spread=True) for amount in asked] == got


@pytest.mark.parametrize("spread", [False, True])
def test_barred_devices_are_not_used(spread):
    devices = gpus(1, 1, 1, types="A100 A100 T4")
    assert place(devices, 0.5, barred=0b001, spread=spread) == [1]
    assert place(devices, 0.5, barred=0b010, spread=spread) == [0]
    assert place(devices, 0.5, "A100", barred=0b011, spread=spread) == []
    assert place(devices, 1, barred=0b100, spread=spread) == []
    assert place(devices, 1, "T4", barred=0b011, spread=spread) == [2]


@pytest.mark.parametrize(("share", "times"), [(0.1, 10), (1 / 3, 3), (0.25, 4)])
def test_equal_shares_fill_one_device_to_the_last(share, times):
    devices = gpus(1)
    assert [place(devices, share) for _ in range(times + 1)] == [[0]] * times + [[]]


def test_the_lowest_device_that_came_free_is_used_first():
    devices = gpus(0, 0, 0)
    devices.give_back([(2, UNIT)])
    devices.give_back([(1, UNIT)])
    assert place(devices, 1) == [1]
    assert place(devices, 0.5) == [2]


def test_choosing_takes_nothing():
    devices = gpus(1)
    half = Request.of({}, {"GPU": 5_000})
    assert devices.choose(5_000, half) == devices.choose(5_000, half) == ((0, 5_000),)
    assert devices.free == [UNIT]


def test_only_devices_of_the_type_that_is_asked_for():
    devices = gpus(1, 1, 1, 1, types="T4 A100 T4 A100")
    assert place(devices, 0.5, "A100") == [1]
    assert place(devices, 1, "A100") == [3]
    assert place(devices, 1, "A100") == []
    assert place(devices, 0.6, "A100") == []
    assert place(devices, 2, "T4") == [0, 2]


def test_masks_name_the_devices_of_a_type_and_those_that_are_free():
    devices = gpus(1, 0.5, 1, 0, types="T4 A100 T4 A100")
    assert devices.mask_of_type("T4") == 0b0101
    assert devices.mask_of_type("H200") == 0
    assert devices.mask_of_type(None) == 0b1111
    assert devices.free_mask == 0b0101
    devices.give_back([(3, UNIT)])
    assert place(devices, 1) == [0]
    assert devices.free_mask == 0b1100
    assert gpus().free_mask == gpus().mask_of_type(None) == 0


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


def test_a_set_shows_what_is_free():
    assert repr(gpus(1, 0.25)) == "<DeviceSet GPU: 1.25/2>"
