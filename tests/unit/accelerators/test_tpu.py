"""Google's answers, with the kernel's files in a directory of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiogpu.accelerators import GOOGLE_TPU_V4, GOOGLE_TPU_V5LITEPOD, GOOGLE_TPU_V7X
from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.tpu import Tpu
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError, OptionError


@pytest.fixture
def box(tmp_path: Path) -> Tpu:
    """Four chips, and the directory that NVIDIA's driver makes."""
    (tmp_path / "dev/accel").mkdir(parents=True)
    for number in range(4):
        (tmp_path / f"dev/accel{number}").touch()
    return Tpu(str(tmp_path))


def test_it_gives_the_answers() -> None:
    vendor: Accelerator = Tpu()
    assert (vendor.kind, vendor.option) == ("TPU", "resources['TPU']")
    assert vendor.variable == "TPU_VISIBLE_CHIPS"
    assert repr(vendor) == "<Tpu TPU>"
    assert not vendor.watch().knows(Device(0))


def test_a_process_has_one_two_four_or_eight_chips() -> None:
    quantities = {0: 0, 1: 10_000, 2.0: 20_000, 4: 40_000, 8: 80_000}
    assert {value: Tpu().quantity(value) for value in quantities} == quantities


@pytest.mark.parametrize("value", [3, 0.5, 16, 1.5, 2.00001])
def test_no_other_number_is_one(value: float) -> None:
    with pytest.raises(OptionError, match=rf"={value} is no number.* 1, 2, 4 or 8"):
        Tpu().quantity(value)


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("v4-16", GOOGLE_TPU_V4),
        ("v5litepod-8", GOOGLE_TPU_V5LITEPOD),
        ("tpu7x-8", GOOGLE_TPU_V7X),
        ("v4", None),
        ("A100-40G", None),
        ("v-8", None),
        ("", None),
        (None, None),
    ],
)
def test_the_type_is_that_of_the_slice(name: str | None, type_: str | None) -> None:
    assert Tpu().type_of(name) == type_


def test_chips_are_files(box: Tpu) -> None:
    found = box.devices({"TPU_ACCELERATOR_TYPE": "v4-8"}, None)
    assert found == tuple(Device(chip, type=GOOGLE_TPU_V4) for chip in range(4))
    assert [device.id for device in box.devices({"TPU_VISIBLE_CHIPS": "2,3"}, 1)] == [2]


def test_chips_by_vfio_are_told_from_others(tmp_path: Path) -> None:
    for group, vendor in ((0, "0x1ae0"), (7, "0x1AE0"), (96, "0x15b3")):
        place = tmp_path / f"sys/kernel/iommu_groups/{group}/devices/0000:00:0{group}.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(vendor)
    vfio = tmp_path / "dev/vfio"
    vfio.mkdir(parents=True)
    for name in ("0", "7", "96", "97", "vfio"):
        (vfio / name).touch()
    assert [device.id for device in Tpu(str(tmp_path)).devices({}, None)] == [0, 1]


def test_a_machine_without_has_none(tmp_path: Path) -> None:
    assert Tpu(str(tmp_path)).devices({}, None) == ()
    environ = {"TPU_ACCELERATOR_TYPE": "v4-8"}
    logical = Tpu(str(tmp_path)).devices(environ, 1)
    assert logical == (Device(0, type=GOOGLE_TPU_V4),)


def test_what_the_variable_may_not_say(box: Tpu) -> None:
    with pytest.raises(DeviceError, match="there is no device '9'"):
        box.devices({"TPU_VISIBLE_CHIPS": "9"}, None)
    assert box.devices({"TPU_VISIBLE_CHIPS": "?"}, 0) == ()


def test_chips_are_assigned_with_their_layout(box: Tpu) -> None:
    def told(*ids: int) -> dict[str, str]:
        return box.assignment(ids, {})

    one = {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "1,1,1"}
    two = {"TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_HOST_BOUNDS": "1,1,1"}
    assert told(3) == {"TPU_VISIBLE_CHIPS": "3", **one}
    assert told(0, 1) == {"TPU_VISIBLE_CHIPS": "0,1", **two}
    assert told() == {"TPU_VISIBLE_CHIPS": ""}
    assert told(0, 1, 2, 3) == {}, "all of the host's"
    assert box.assignment((0,), {"AIOGPU_NOSET_TPU_VISIBLE_CHIPS": "1"}) == {}


def test_four_of_eight_are_named(tmp_path: Path) -> None:
    assert Tpu(str(tmp_path)).assignment((0, 1, 4, 5), {}) == {
        "TPU_VISIBLE_CHIPS": "0,1,4,5"
    }
