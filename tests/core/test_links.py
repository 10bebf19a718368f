"""Several whole devices go to those that fast links join."""

from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.topology import TRIED, Topology
from aiogpu.testing import World


def box(count: int, *pairs: tuple[int, int], parents: dict[int, str] | None = None):
    """Devices of which these pairs are linked."""
    return [
        Device(
            index,
            uuid=f"GPU-{index}",
            links=frozenset(f"GPU-{b}" for a, b in pairs if a == index),
            parent=(parents or {}).get(index),
        )
        for index in range(count)
    ]


def mask(*indices: int) -> int:
    return sum(1 << index for index in indices)


def placed(devices: DeviceSet, count: int, **options) -> list[int]:
    """Take so many whole devices."""
    shares = devices.choose(
        count * UNIT, Request.of({}, {"GPU": count * UNIT}), **options
    )
    devices.take(shares or ())
    return [index for index, _ in shares or ()]


PAIRS = [(0, 3), (1, 4), (2, 5)]


def test_a_pair_goes_to_two_that_are_linked():
    devices = DeviceSet("GPU", box(6, *PAIRS))
    assert [placed(devices, 2) for _ in range(4)] == [[0, 3], [1, 4], [2, 5], []]


def test_of_what_is_left_the_best():
    devices = DeviceSet("GPU", box(6, *PAIRS))
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


def test_without_links_the_lowest():
    """[B22]"""
    assert not Topology(box(8)).matter
    assert placed(DeviceSet("GPU", box(8)), 3) == [0, 1, 2]
    assert Topology([Device(0, links=frozenset({"GPU-1"}))]).matter is False


def test_a_lone_device_and_a_share_go_where_they_went():
    devices = DeviceSet("GPU", box(4, (2, 3)))
    assert placed(devices, 1) == [0]
    half = Request.of({}, {"GPU": UNIT // 2})
    assert devices.choose(UNIT // 2, half) == ((1, UNIT // 2),)


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


def test_a_process_has_one_mig_instance():
    """CUDA sees one of them, whichever are named."""
    devices = DeviceSet("GPU", box(4, parents={0: "GPU-a", 2: "GPU-a"}))
    assert [placed(devices, count) for count in (3, 2, 2)] == [[], [1, 3], []]
    assert [placed(devices, 1) for _ in range(3)] == [[0], [2], []]


def test_who_wants_two_waits_for_what_is_no_mig_instance():
    w = World(devices=box(4, parents={0: "GPU-a", 1: "GPU-a"}))
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=1)
    w.submit("c", num_gpus=1)
    w.submit("d", num_gpus=2)
    assert (w.gpus_of("a"), w.gpus_of("b"), w.gpus_of("c")) == ([0], [1], [2])
    w.advance(2)
    w.submit("e", num_gpus=0.1)
    assert w.scheduler.reservation.barred == {"GPU": 0b1100}
    assert w.gpus_of("e") == [0]
    w.finish("c")
    assert w.gpus_of("d") == [2, 3]
