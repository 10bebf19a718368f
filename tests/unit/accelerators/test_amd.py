"""AMD's answers, with the kernel's files in a directory of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiogpu.accelerators import AMD_INSTINCT_MI210, AMD_INSTINCT_MI300x
from aiogpu.accelerators.amd import Amd
from aiogpu.accelerators.base import Accelerator
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError, OptionError

GIB = 1 << 30


def node(root: Path, number: int, gpu_id: int, *banks: tuple[int, int], **facts: int):
    """One of KFD's nodes; banks are type of heap and bytes."""
    place = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    place.mkdir(parents=True)
    (place / "gpu_id").write_text(f"{gpu_id}\n")
    lines = [f"{name} {value}\n" for name, value in facts.items()]
    (place / "properties").write_text("".join(lines) + "no number\nodd\n")
    for index, (heap, size) in enumerate(banks):
        bank = place / f"mem_banks/{index}"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\n")


@pytest.fixture
def box(tmp_path: Path) -> Amd:
    """A CPU, two MI210, an unknown card, and one that is not for this container."""
    node(tmp_path, 0, 0, (0, 256 * GIB), cpu_cores_count=64)
    for number, bus in ((1, 0x0300), (2, 0x4308)):
        facts = {"device_id": 0x740F, "location_id": bus, "unique_id": 0xABC + number}
        node(tmp_path, number, 4000 + number, (1, 60 * GIB), (2, 4 * GIB), **facts)
    node(tmp_path, 10, 4010, device_id=0x1234, domain=1)
    node(tmp_path, 3, 4003)
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/3/gpu_id").unlink()
    return Amd(str(tmp_path))


def test_it_gives_the_answers() -> None:
    vendor: Accelerator = Amd()
    assert (vendor.kind, vendor.option) == ("GPU", "num_gpus")
    assert vendor.variable == "HIP_VISIBLE_DEVICES"
    assert vendor.quantity(0.25) == 2500
    with pytest.raises(OptionError, match=r"num_gpus=1\.5 mixes"):
        vendor.quantity(1.5)
    assert repr(vendor) == "<Amd GPU>"
    assert not vendor.watch().knows(Device(0))


def test_the_type_is_that_of_the_pci_device_id() -> None:
    names = ("0x74a1", "740F", "0x1", "MI210", "", None)
    known = [AMD_INSTINCT_MI300x, AMD_INSTINCT_MI210, None, None, None, None]
    assert [Amd().type_of(name) for name in names] == known


def test_the_kernels_files_tell_of_each_card(box: Amd) -> None:
    assert box.devices({}, None) == (
        Device(
            0,
            type=AMD_INSTINCT_MI210,
            uuid="GPU-0000000000000abd",
            memory=64 * GIB,
            pci="00000000:03:00.0",
        ),
        Device(
            1,
            type=AMD_INSTINCT_MI210,
            uuid="GPU-0000000000000abe",
            memory=64 * GIB,
            pci="00000000:43:01.0",
        ),
        Device(2, pci="00000001:00:00.0"),
    )


def test_a_machine_without_has_none(tmp_path: Path) -> None:
    assert Amd(str(tmp_path)).devices({"ROCR_VISIBLE_DEVICES": "0"}, None) == ()
    assert Amd(str(tmp_path)).devices({}, 1) == (Device(0),)


def test_the_variable_restricts_the_node(box: Amd) -> None:
    environ = {"HIP_VISIBLE_DEVICES": "2,0", "ROCR_VISIBLE_DEVICES": "0,1,2"}
    assert [device.id for device in box.devices(environ, None)] == [2, 0]
    assert box.devices({"HIP_VISIBLE_DEVICES": "?"}, 0) == ()
    with pytest.raises(DeviceError, match=r"HIP_VISIBLE_DEVICES='3': there is no dev"):
        box.devices({"HIP_VISIBLE_DEVICES": "3"}, None)
    with pytest.raises(DeviceError, match="ask for at most 1"):
        box.devices({"HIP_VISIBLE_DEVICES": "1"}, 2)


def test_hip_goes_by_cudas_variable_where_it_has_none(box: Amd) -> None:
    def ids(**environ: str) -> list[int | str]:
        return [device.id for device in box.devices(environ, None)]

    assert ids(CUDA_VISIBLE_DEVICES="1") == [1]
    assert ids(CUDA_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="0") == [0]
    assert ids(CUDA_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="") == []
    assert ids(CUDA_VISIBLE_DEVICES="") == [0, 1, 2]
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES='7': there is no dev"):
        ids(CUDA_VISIBLE_DEVICES="7")


def test_cudas_variable_is_not_its_own_where_it_has_no_gpu(tmp_path: Path) -> None:
    without = Amd(str(tmp_path))
    assert without.devices({"CUDA_VISIBLE_DEVICES": "GPU-aaaa,7"}, None) == ()


def test_the_variable_beneath_hip_is_refused_alone(box: Amd) -> None:
    with pytest.raises(
        DeviceError, match="Use HIP_VISIBLE_DEVICES instead of ROCR_VISIBLE_DEVICES"
    ):
        box.devices({"ROCR_VISIBLE_DEVICES": "0"}, None)


def test_cards_are_assigned_by_their_variable() -> None:
    assert Amd().assignment((0, 2), {}) == {"HIP_VISIBLE_DEVICES": "0,2"}
    assert Amd().assignment((), {}) == {"HIP_VISIBLE_DEVICES": "-1"}
    switch = {"AIOGPU_NOSET_HIP_VISIBLE_DEVICES": "on"}
    assert Amd().assignment((0,), switch) == {}
