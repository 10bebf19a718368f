"""On a real card: what we detect is what pynvml says."""

import pytest

from aiogpu.accelerators.nvidia import Nvidia, inventory
from aiogpu.accelerators.nvml_watch import NvmlWatch

pytestmark = pytest.mark.gpu


@pytest.fixture
def cards():
    """(uuid, name, memory) of every GPU, ordered by bus as CUDA may order them."""
    import pynvml

    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        found.append((bus, uuid, pynvml.nvmlDeviceGetName(handle), memory))
    pynvml.nvmlShutdown()
    return [card[1:] for card in sorted(found)]


def test_detection_agrees_with_pynvml(cards):
    assert inventory().problem is None
    devices = Nvidia().devices({}, None)
    assert [device.id for device in devices] == list(range(len(cards)))
    assert [(each.uuid, each.name, each.memory) for each in devices] == cards
    assert all(device.type for device in devices)


def test_the_variable_is_read_against_the_real_cards(cards):
    last = len(cards) - 1
    uuid = cards[last][0]
    by_index = Nvidia().devices({"CUDA_VISIBLE_DEVICES": str(last)}, None)
    by_uuid = Nvidia().devices({"CUDA_VISIBLE_DEVICES": uuid}, 1)
    assert [device.id for device in by_index] == [last]
    assert [device.id for device in by_uuid] == [uuid]
    assert by_index[0].uuid == by_uuid[0].uuid == uuid


def test_another_order_makes_detection_answer_in_uuids(cards):
    devices = Nvidia().devices({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, None)
    assert [device.id for device in devices] == [uuid for uuid, _, _ in cards]


def test_a_card_tells_its_processes_and_its_memory():
    watch = NvmlWatch()
    watch.open()
    try:
        for device in Nvidia().devices({}, None):
            assert watch.knows(device)
            sample = watch.look(device)
            assert sample.problem is None
            assert sample.processes is not None
            assert sample.used is not None
            assert 0 < sample.used < device.memory
        assert watch.driver_version
    finally:
        watch.close()
