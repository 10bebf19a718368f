"""Intel's answers, with the kernel's files in a directory of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiogpu.accelerators import INTEL_MAX_1100, INTEL_MAX_1550
from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.intel_gpu import IntelGpu
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError, OptionError

MAX_1550 = "Intel(R) Data Center GPU Max 1550"


def card(
    root: Path, number: int, pci: str, device: str, driver="xe", vendor="0x8086"
) -> None:
    place = root / "sys/devices/pci" / pci
    place.mkdir(parents=True)
    (place / "vendor").write_text(f"{vendor}\n")
    (place / "device").write_text(f"{device}\n")
    home = root / "sys/bus/pci/drivers" / driver
    home.mkdir(parents=True, exist_ok=True)
    (place / "driver").symlink_to(home)
    drm = root / f"sys/class/drm/card{number}"
    drm.mkdir(parents=True)
    (drm / "device").symlink_to(place)
    (root / f"sys/class/drm/card{number}-DP-1").mkdir()


@pytest.fixture
def box(tmp_path: Path) -> IntelGpu:
    """The processor's own, two cards, one of another vendor, one without a driver."""
    card(tmp_path, 0, "0000:00:02.0", "0x4680", "i915")
    card(tmp_path, 1, "0000:9a:00.0", "0x0bda")
    card(tmp_path, 2, "0000:29:00.0", "0x0bd5", "i915")
    card(tmp_path, 3, "0000:30:00.0", "0x740f", "amdgpu", "0x1002")
    card(tmp_path, 4, "0000:31:00.0", "0x0bd5", "vfio-pci")
    (tmp_path / "sys/class/drm/card5/device").mkdir(parents=True)
    return IntelGpu(str(tmp_path))


def test_it_gives_the_answers() -> None:
    vendor: Accelerator = IntelGpu()
    assert (vendor.kind, vendor.option) == ("GPU", "num_gpus")
    assert vendor.variable == "ZE_AFFINITY_MASK"
    assert vendor.quantity(0.25) == 2500
    with pytest.raises(OptionError, match=r"num_gpus=1\.5 mixes"):
        vendor.quantity(1.5)
    assert repr(vendor) == "<IntelGpu GPU>"
    assert not vendor.watch().knows(Device(0))


def test_the_type_is_the_names_last_words() -> None:
    assert IntelGpu().type_of(MAX_1550) == INTEL_MAX_1550
    assert IntelGpu().type_of("") is IntelGpu().type_of(None) is None


def test_discrete_cards_are_counted_by_the_bus(box: IntelGpu) -> None:
    assert box.devices({}, None) == (
        Device(0, type=INTEL_MAX_1550, name=MAX_1550, pci="0000:29:00.0"),
        Device(
            1,
            type=INTEL_MAX_1100,
            name="Intel(R) Data Center GPU Max 1100",
            pci="0000:9a:00.0",
        ),
    )


def test_a_machine_without_has_none(tmp_path: Path) -> None:
    assert IntelGpu(str(tmp_path)).devices({}, None) == ()
    assert IntelGpu(str(tmp_path)).devices({}, 1) == (Device(0),)


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({"ZE_AFFINITY_MASK": "1"}, [1]),
        ({"ZE_AFFINITY_MASK": "1,0.1"}, [1, "0.1"]),
        ({"ZE_AFFINITY_MASK": "", "ONEAPI_DEVICE_SELECTOR": "level_zero:1"}, [1]),
        ({"ZE_AFFINITY_MASK": "0", "ONEAPI_DEVICE_SELECTOR": "level_zero:1"}, [0]),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:1,0"}, [1, 0]),
        ({"ONEAPI_DEVICE_SELECTOR": "0"}, [0]),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, [0, 1]),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:*"}, [0, 1]),
        ({"ONEAPI_DEVICE_SELECTOR": ""}, []),
    ],
)
def test_variables_restrict_the_node(
    box: IntelGpu, environ: dict[str, str], ids: list[int | str]
) -> None:
    assert [device.id for device in box.devices(environ, None)] == ids


def test_a_part_has_its_cards_type_and_no_memory_of_its_own(box: IntelGpu) -> None:
    (part,) = box.devices({"ZE_AFFINITY_MASK": "0.1"}, None)
    assert (part.id, part.type, part.memory) == ("0.1", INTEL_MAX_1550, 0)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"ZE_AFFINITY_MASK": "2"}, "there is no device '2'"),
        ({"ZE_AFFINITY_MASK": "2.0"}, "there is no device '2.0'"),
        ({"ZE_AFFINITY_MASK": "0."}, "'0.' names no device"),
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:gpu"}, "'opencl:gpu' names no device"),
    ],
)
def test_what_they_may_not_say(
    box: IntelGpu, environ: dict[str, str], why: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        box.devices(environ, None)
    assert why in str(caught.value)
    assert box.devices(environ, 0) == ()


def test_cards_are_assigned_by_their_variable() -> None:
    assert IntelGpu().assignment((0, "1.0"), {}) == {"ZE_AFFINITY_MASK": "0,1.0"}
    assert IntelGpu().assignment((), {}) == {"ZE_AFFINITY_MASK": "999999"}
    switch = {"AIOGPU_NOSET_ZE_AFFINITY_MASK": "true"}
    assert IntelGpu().assignment((0,), switch) == {}


def test_a_selector_does_not_count_among_what_the_mask_leaves() -> None:
    environ = {"ONEAPI_DEVICE_SELECTOR": "level_zero:2,3"}
    assert IntelGpu().assignment((3,), environ) == {
        "ZE_AFFINITY_MASK": "3",
        "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu",
    }
