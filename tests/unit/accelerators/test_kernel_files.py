"""Devices found in the files of the kernel and by a fake `neuron-ls`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from aiogpu.accelerators import (
    AMD_INSTINCT_MI210,
    AWS_NEURON_CORE,
    GOOGLE_TPU_V4,
    INTEL_GAUDI,
    INTEL_MAX_1100,
    INTEL_MAX_1550,
)
from aiogpu.accelerators import neuron as neuron_file
from aiogpu.accelerators.amd import Amd
from aiogpu.accelerators.ascend import Ascend
from aiogpu.accelerators.gaudi import Gaudi
from aiogpu.accelerators.intel_gpu import IntelGpu
from aiogpu.accelerators.neuron import Neuron
from aiogpu.accelerators.tpu import Tpu
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError
from tests.unit.accelerators.vendors import GIB, listing, pci_card, tool, write

MI210 = {"type": AMD_INSTINCT_MI210, "memory": 64 * GIB}


def ids(devices: tuple[Device, ...]) -> list[int | str]:
    return [device.id for device in devices]


@pytest.mark.parametrize("kind", [Amd, IntelGpu, Tpu, Gaudi, Ascend, Neuron])
def test_machine_without_devices_has_only_declared_ones(
    tmp_path: Path, kind: type
) -> None:
    vendor = kind(str(tmp_path))
    assert vendor.devices({}, None) == vendor.devices({}, 0) == ()
    assert vendor.devices({vendor.variable: "?"}, 0) == ()
    assert ids(vendor.devices({}, 2)) == [0, 1]


# AMD


@pytest.fixture
def amd(tmp_path: Path) -> Amd:
    """A CPU, two MI210, an unknown card, and a card of another container."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    write(tmp_path, {f"{nodes}/0/gpu_id": 0, f"{nodes}/0/properties": "cpu_cores 64"})
    for number, bus in ((1, 0x0300), (2, 0x4308)):
        facts = f"device_id {0x740F}\nlocation_id {bus}\nunique_id {0xABC + number}"
        node = {"gpu_id": 4000 + number, "properties": f"{facts}\nno number\nodd"}
        for index, (heap, size) in enumerate([(1, 60 * GIB), (2, 4 * GIB)]):
            bank = f"heap_type {heap}\nsize_in_bytes {size}"
            node[f"mem_banks/{index}/properties"] = bank
        write(tmp_path / nodes / str(number), node)
    unknown = f"device_id {0x1234}\ndomain 1"
    write(tmp_path / nodes / "10", {"gpu_id": 4010, "properties": unknown})
    write(tmp_path / nodes / "3", {"properties": ""})
    return Amd(str(tmp_path))


def test_amd_gpus_are_detected_and_selected(amd: Amd) -> None:
    assert amd.devices({}, None) == (
        Device(0, uuid="GPU-0000000000000abd", pci="00000000:03:00.0", **MI210),
        Device(1, uuid="GPU-0000000000000abe", pci="00000000:43:01.0", **MI210),
        Device(2, pci="00000001:00:00.0"),
    )
    environ = {"HIP_VISIBLE_DEVICES": "2,0", "ROCR_VISIBLE_DEVICES": "0,1,2"}
    assert ids(amd.devices(environ, None)) == [2, 0]
    with pytest.raises(DeviceError, match=r"HIP_VISIBLE_DEVICES='3': there is no dev"):
        amd.devices({"HIP_VISIBLE_DEVICES": "3"}, None)
    with pytest.raises(DeviceError, match="ask for at most 1"):
        amd.devices({"HIP_VISIBLE_DEVICES": "1"}, 2)
    with pytest.raises(DeviceError, match="HIP_VISIBLE_DEVICES instead of ROCR_VISIB"):
        amd.devices({"ROCR_VISIBLE_DEVICES": "0"}, None)


def test_amd_uses_the_cuda_variable_without_its_own(amd: Amd, tmp_path: Path) -> None:
    """Without a GPU of AMD, the variable is about other devices."""
    for visible, expected in (
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, [0, 1, 2]),
    ):
        assert ids(amd.devices(visible, None)) == expected
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES='7': there is no dev"):
        amd.devices({"CUDA_VISIBLE_DEVICES": "7"}, None)
    without = Amd(str(tmp_path / "without"))
    assert without.devices({"CUDA_VISIBLE_DEVICES": "GPU-aaaa,7"}, None) == ()
    assert without.devices({"ROCR_VISIBLE_DEVICES": "0"}, None) == ()


# Intel


@pytest.fixture
def intel(tmp_path: Path) -> IntelGpu:
    """An integrated GPU, two cards, another vendor's card, a card without a driver."""
    for number, pci, device, driver, vendor in (
        (0, "0000:00:02.0", "0x4680", "i915", "0x8086"),
        (1, "0000:9a:00.0", "0x0bda", "xe", "0x8086"),
        (2, "0000:29:00.0", "0x0bd5", "i915", "0x8086"),
        (3, "0000:30:00.0", "0x740f", "amdgpu", "0x1002"),
        (4, "0000:31:00.0", "0x0bd5", "vfio-pci", "0x8086"),
    ):
        name = f"drm/card{number}"
        pci_card(tmp_path, name, pci, driver, vendor=vendor, device=device)
        (tmp_path / f"sys/class/{name}-DP-1").mkdir()
    (tmp_path / "sys/class/drm/card5/device").mkdir(parents=True)
    return IntelGpu(str(tmp_path))


def test_intel_gpus_are_numbered_by_bus(intel: IntelGpu) -> None:
    name = "Intel(R) Data Center GPU Max"
    assert intel.devices({}, None) == (
        Device(0, type=INTEL_MAX_1550, name=f"{name} 1550", pci="0000:29:00.0"),
        Device(1, type=INTEL_MAX_1100, name=f"{name} 1100", pci="0000:9a:00.0"),
    )
    (part,) = intel.devices({"ZE_AFFINITY_MASK": "0.1"}, None)
    assert (part.id, part.type, part.memory) == ("0.1", INTEL_MAX_1550, 0)


@pytest.mark.parametrize(
    ("environ", "expected"),
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
def test_variables_select_intel_gpus(
    intel: IntelGpu, environ: dict[str, str], expected: list[int | str]
) -> None:
    assert ids(intel.devices(environ, None)) == expected


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"ZE_AFFINITY_MASK": "2"}, "there is no device '2'"),
        ({"ZE_AFFINITY_MASK": "2.0"}, "there is no device '2.0'"),
        ({"ZE_AFFINITY_MASK": "0."}, "'0.' names no device"),
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:gpu"}, "'opencl:gpu' names no device"),
    ],
)
def test_invalid_variables_of_intel_are_refused(
    intel: IntelGpu, environ: dict[str, str], reason: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        intel.devices(environ, None)
    assert reason in str(caught.value)
    assert intel.devices(environ, 0) == ()


# Google, Gaudi and Ascend


def test_tpus_are_detected_as_device_files(tmp_path: Path) -> None:
    (tmp_path / "dev/accel").mkdir(parents=True)  # made by NVIDIA's driver
    write(tmp_path, {f"dev/accel{number}": "" for number in range(4)})
    tpu = Tpu(str(tmp_path))
    devices = tpu.devices({"TPU_ACCELERATOR_TYPE": "v4-8"}, None)
    assert devices == tuple(Device(chip, type=GOOGLE_TPU_V4) for chip in range(4))
    assert ids(tpu.devices({"TPU_VISIBLE_CHIPS": "2,3"}, 1)) == [2]
    with pytest.raises(DeviceError, match="there is no device '9'"):
        tpu.devices({"TPU_VISIBLE_CHIPS": "9"}, None)
    logical = Tpu("/nowhere").devices({"TPU_ACCELERATOR_TYPE": "v4-8"}, 1)
    assert logical == (Device(0, type=GOOGLE_TPU_V4),)


def test_tpus_behind_vfio_are_told_from_other_devices(tmp_path: Path) -> None:
    for group, vendor in ((0, "0x1ae0"), (7, "0x1AE0"), (96, "0x15b3")):
        device = f"sys/kernel/iommu_groups/{group}/devices/0000:00:0{group}.0"
        write(tmp_path, {f"{device}/vendor": vendor})
    write(tmp_path / "dev/vfio", dict.fromkeys(("0", "7", "96", "97", "vfio"), ""))
    assert ids(Tpu(str(tmp_path)).devices({}, None)) == [0, 1]


def test_gaudis_are_numbered_by_module(tmp_path: Path) -> None:
    for number, pci, device, vendor, module in (
        (0, "0000:33:00.0", "0x1020", "0x1da3", "3"),
        (1, "0000:19:00.0", "0x1020", "0x1da3", "0"),
        (2, "0000:20:00.0", "0x1", "0x8086", "1"),
    ):
        facts = {"vendor": vendor, "device": device, "module_id": module}
        pci_card(tmp_path, f"accel/accel{number}", pci, **facts)
    assert Gaudi(str(tmp_path)).devices({}, None) == (
        Device(0, type="Intel-GAUDI2", pci="0000:19:00.0"),
        Device(3, type="Intel-GAUDI2", pci="0000:33:00.0"),
    )


def test_gaudis_are_detected_on_older_kernels(tmp_path: Path) -> None:
    for number, device in enumerate(("0x1000", "0x9999")):
        facts = {"vendor": "0x1da3", "device": device}
        pci_card(tmp_path, f"habanalabs/hl{number}", f"0000:3{number}:00.0", **facts)
    gaudi = Gaudi(str(tmp_path))
    assert gaudi.devices({"HABANA_VISIBLE_MODULES": "1,0"}, None) == (
        Device(1, pci="0000:31:00.0"),
        Device(0, type=INTEL_GAUDI, pci="0000:30:00.0"),
    )
    with pytest.raises(DeviceError, match="there is no device '4'"):
        gaudi.devices({"HABANA_VISIBLE_MODULES": "4"}, None)


def test_ascends_are_detected_as_device_files(tmp_path: Path) -> None:
    names = ("davinci1", "davinci0", "davinci10", "davinci_manager")
    write(tmp_path / "dev", dict.fromkeys(names, ""))
    ascend = Ascend(str(tmp_path))
    assert ids(ascend.devices({}, None)) == [0, 1, 10]
    assert ids(ascend.devices({"ASCEND_RT_VISIBLE_DEVICES": "10,0"}, None)) == [10, 0]
    with pytest.raises(DeviceError, match="there is no device '2'"):
        ascend.devices({"ASCEND_RT_VISIBLE_DEVICES": "2"}, None)


# Neuron


@pytest.fixture
def neuron(tmp_path: Path) -> Neuron:
    return Neuron(str(tmp_path / "none"))


def test_each_neuron_core_is_a_device(neuron: Neuron, tmp_path: Path) -> None:
    assert neuron.devices(listing(tmp_path), None) == tuple(
        Device(core, type=AWS_NEURON_CORE, memory=16 * GIB, pci=f"00:1{core // 2}.0")
        for core in range(4)
    )


def test_machine_without_neuron_has_no_devices(neuron: Neuron, tmp_path: Path) -> None:
    assert neuron.devices({"PATH": "/nowhere::"}, None) == ()
    for chips in ([], "", [{"neuron_device": 0}]):
        assert neuron.devices(listing(tmp_path, chips), None) == ()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo broken >&2; echo no driver >&2; exit 3", "status 3: no driver"),
        ("exit 1", "ended with status 1;"),
        ("echo no json", "Expecting value"),
        ("echo {}", "wrote no list of chips"),
        ("echo '[1]'", "wrote no list of chips"),
        ("""echo '[{"nc_count": "two"}]'""", "wrote 'two' cores"),
        ("""echo '[{"nc_count": -1}]'""", "wrote -1 cores"),
        ("printf '\\377'", "can't decode"),
    ],
)
def test_failing_neuron_ls_is_logged_in_one_line(
    neuron: Neuron,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    script: str,
    reason: str,
) -> None:
    assert neuron.devices(tool(tmp_path, script), None) == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.message
    assert record.message.startswith(f"! {tmp_path}/neuron-ls: ")
    assert record.message.endswith("; no NeuronCore is detected.")


def test_hanging_neuron_ls_is_ended(
    neuron: Neuron,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neuron_file, "TOOL_LIMIT", 0.05)
    assert neuron.devices(tool(tmp_path, "exec tail -f /dev/null"), None) == ()
    assert "it has not answered for 0.05 s" in caplog.text


def test_neuron_ls_that_cannot_be_started_is_logged(
    neuron: Neuron, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = tool(tmp_path, "")
    (tmp_path / "neuron-ls").write_text("#!/no/such/shell\n")
    assert neuron.devices(environ, None) == ()
    assert "no NeuronCore is detected" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1,3", [1, 3]), ("0-2", [0, 1, 2]), ("3,0-1", [3, 0, 1]), ("", []), ("2-2", [2])],
)
def test_variable_selects_neuron_cores(
    neuron: Neuron, tmp_path: Path, text: str, expected: list[int]
) -> None:
    environ = listing(tmp_path) | {"NEURON_RT_VISIBLE_CORES": text}
    devices = neuron.devices(environ, None)
    assert ids(devices) == expected
    assert all(device.memory for device in devices)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0,a", "'a' names no device"),
        ("2-0", "'2-0' names no device"),
        ("0-", "'0-' names no device"),
        ("0-999999", "'0-999999' names no device"),
        ("0-2,1", "'1' names the device 1 for the second time"),
        ("0-4", "there is no device '4'. This machine has 0, 1, 2, 3"),
    ],
)
def test_invalid_variable_of_neuron_is_refused(
    neuron: Neuron, tmp_path: Path, text: str, reason: str
) -> None:
    environ = listing(tmp_path) | {"NEURON_RT_VISIBLE_CORES": text}
    with pytest.raises(DeviceError) as caught:
        neuron.devices(environ, None)
    assert str(caught.value).startswith(f"NEURON_RT_VISIBLE_CORES={text!r}")
    assert reason in str(caught.value)


def test_declared_neuron_cores_are_logical(neuron: Neuron) -> None:
    cores = tuple(Device(core, type=AWS_NEURON_CORE) for core in range(2))
    assert neuron.devices({}, 2) == cores
    assert ids(neuron.devices({"NEURON_RT_VISIBLE_CORES": "4-7"}, 2)) == [4, 5]
    with pytest.raises(DeviceError, match=r"=3, but NEURON_RT_VISIBLE_CORES='0-1' na"):
        neuron.devices({"NEURON_RT_VISIBLE_CORES": "0-1"}, 3)
