"""Detection and sampling of real GPUs agree with pynvml."""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest

from aiogpu.accelerators.nvidia import Nvidia, inventory
from aiogpu.accelerators.nvml.watch import NvmlWatch
from aiogpu.core.model.request import Device

pytestmark = pytest.mark.gpu


class Card(NamedTuple):
    """A GPU as pynvml describes it; sorted by bus, as CUDA may order them."""

    bus: str
    uuid: str
    name: str
    memory: int
    capability: tuple[int, int]


@pytest.fixture
def nvml() -> Iterator[ModuleType]:
    import pynvml

    pynvml.nvmlInit()
    yield pynvml
    pynvml.nvmlShutdown()


@pytest.fixture
def cards(nvml: ModuleType) -> list[Card]:
    """All GPUs of a machine without MIG mode."""
    if inventory().mig:
        pytest.skip("a GPU is in MIG mode")
    count = nvml.nvmlDeviceGetCount()
    return sorted(
        Card(
            nvml.nvmlDeviceGetPciInfo(handle).busId,
            nvml.nvmlDeviceGetUUID(handle),
            nvml.nvmlDeviceGetName(handle),
            nvml.nvmlDeviceGetMemoryInfo(handle).total,
            nvml.nvmlDeviceGetCudaComputeCapability(handle),
        )
        for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(count))
    )


@pytest.fixture
def watch() -> Iterator[NvmlWatch]:
    watch = NvmlWatch()
    watch.open()
    yield watch
    watch.close()


def detected() -> tuple[Device, ...]:
    return Nvidia().devices({}, None)


def test_detection_agrees_with_pynvml(cards: list[Card]) -> None:
    assert inventory().problem is None
    devices = detected()
    assert [device.id for device in devices] == list(range(len(cards)))
    assert [
        (card.pci, card.uuid, card.name, card.memory, card.compute_capability)
        for card in devices
    ] == cards
    assert all(device.type for device in devices)
    assert not any(device.parent for device in devices)


def test_pci_address_identifies_the_gpu(nvml: ModuleType) -> None:
    for device in detected():
        assert device.pci is not None
        handle = nvml.nvmlDeviceGetHandleByPciBusId(device.pci)
        assert nvml.nvmlDeviceGetUUID(handle) == (device.parent or device.uuid)


def test_variable_selects_real_gpus(cards: list[Card]) -> None:
    last = len(cards) - 1
    uuid = cards[last].uuid
    by_index = Nvidia().devices({"CUDA_VISIBLE_DEVICES": str(last)}, None)
    by_uuid = Nvidia().devices({"CUDA_VISIBLE_DEVICES": uuid}, 1)
    assert [device.id for device in by_index] == [last]
    assert [device.id for device in by_uuid] == [uuid]
    assert by_index[0].uuid == by_uuid[0].uuid == uuid


def test_detection_returns_uuids_under_another_order(cards: list[Card]) -> None:
    devices = Nvidia().devices({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, None)
    assert [device.id for device in devices] == [card.uuid for card in cards]


def test_links_between_gpus_are_symmetric() -> None:
    links = {device.uuid: device.links for device in detected()}
    for uuid, peers in links.items():
        assert uuid not in peers
        assert all(uuid in links[peer] for peer in peers)


def test_gpu_reports_its_processes_and_its_memory(watch: NvmlWatch) -> None:
    for device in detected():
        assert watch.knows(device)
        sample = watch.look(device)
        assert sample.problem is None
        assert sample.processes is not None
        assert sample.used is not None
        assert 0 < sample.used < device.memory
    assert watch.driver_version


def test_gpu_reports_its_utilisation(cards: list[Card], watch: NvmlWatch) -> None:
    for device in detected():
        busy = watch.look(device).utilisation
        assert busy is not None
        assert 0 <= busy <= 100
    assert cards


def test_working_gpu_is_well(watch: NvmlWatch) -> None:
    """Twice, because the first check registers the GPU for events."""
    for device in (*detected(), *detected()):
        health = watch.check(device)
        assert (health.errors, health.is_lost) == ((), False)
        assert health.action in {"", None}


def test_missing_device_is_lost(watch: NvmlWatch) -> None:
    uuid = "GPU-fedcba98-7654-3210-fedc-ba9876543210"
    assert watch.check(Device(uuid, uuid=uuid)).is_lost


def test_mig_instances_are_separate_devices(watch: NvmlWatch) -> None:
    machine = inventory()
    if not machine.mig:
        pytest.skip("no GPU is in MIG mode")
    for mig in machine.mig:
        for place, device in mig.instances:
            assert place.count("/") == 1
            assert device.parent == mig.gpu.uuid
            assert 0 < device.memory < mig.gpu.memory
            old = f"MIG-{mig.gpu.uuid}/{place}"
            by_place = Nvidia().devices({"CUDA_VISIBLE_DEVICES": old}, None)
            assert [instance.uuid for instance in by_place] == [device.uuid]
            assert watch.look(device).problem is None
            assert not watch.check(device).is_lost
