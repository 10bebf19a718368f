"""Two measures of a device, parts and bytes, and what either leaves of the other."""

import pytest

from aiogpu.core.model.request import Device, Request, named_bytes
from aiogpu.core.model.units import BY_SHARE, GPU, UNIT
from aiogpu.core.resources.devices import Cause, DeviceSet
from aiogpu.core.resources.ledger import Ledger

GIB = 1 << 30


def asking(gpus: float = 0, memory: float = 0, **options) -> Request:
    """A request for devices and so many GiB of each."""
    count = memory if memory == BY_SHARE else int(memory * GIB)
    return Request.of({}, {"GPU": int(gpus * UNIT)}, gpu_memory=count, **options)


def node(*sizes: int) -> Ledger:
    """GPUs with so many GiB; 0 for unknown."""
    cards = [Device(number, memory=size * GIB) for number, size in enumerate(sizes)]
    return Ledger({}, [DeviceSet("GPU", cards)])


def placed(ledger: Ledger, *requests: Request) -> list[list[int]]:
    """The devices that each of them gets, one after the other."""
    leases = [ledger.take(request) for request in requests]
    ledger.check()
    return [[i for i, _ in lease.shares[0]] if lease else [] for lease in leases]


@pytest.mark.parametrize(
    ("sizes", "asked", "got"),
    [
        # Bytes alone: one device, the fullest that has room, the lowest on a tie.
        ((80, 80), [asking(0, 30)] * 5, [[0], [0], [1], [1], []]),
        ((80, 40), [asking(0, 30)] * 4, [[1], [0], [0], []]),
        ((80, 80), [asking(0, 60), asking(0, 30), asking(0, 20)], [[0], [1], [0]]),
        ((80, 80), [asking(0, 30, spread=True)] * 3, [[0], [1], [0]]),
        # Beside a share: both must be there.
        ((80, 80), [asking(0.1, 50)] * 3, [[0], [1], []]),
        ((80, 80), [asking(0.6, 1)] * 3, [[0], [1], []]),
        (
            (80, 80),
            [asking(0.5, 70), asking(0.25, 20), asking(0.25, 10)],
            [[0], [1], [0]],
        ),
        # A share that says nothing is that part of the memory.
        ((80,), [asking(0, 60), asking(0.5)], [[0], []]),
        ((80,), [asking(0.5), asking(0, 60)], [[0], []]),
        ((80,), [asking(0.5), asking(0, 40)], [[0], [0]]),
        ((80,), [asking(0, 40), asking(0.5), asking(0.0001)], [[0], [0], []]),
        ((80, 80), [asking(0, 60), asking(0.5), asking(0.25)], [[0], [1], [1]]),
        ((80, 80), [asking(0.5), asking(0, 50), asking(0.5)], [[0], [1], [0]]),
        ((80,), [asking(0.5, BY_SHARE), asking(0, 60)], [[0], []]),
        # Whole devices are all of their memory.
        ((80,), [asking(1), asking(0, 0.001)], [[0], []]),
        ((80, 80), [asking(0, 0.001), asking(1), asking(1)], [[0], [1], []]),
        ((80, 80), [asking(0, 0.001), asking(2)], [[0], []]),
        ((40, 80), [asking(1, 60), asking(1, 60), asking(1, 40)], [[1], [], [0]]),
        ((40, 80, 80), [asking(2, 80)], [[1, 2]]),
        ((0, 80), [asking(1, BY_SHARE), asking(1, BY_SHARE)], [[1], []]),
        # What has no known memory serves nobody who asks for some, but others.
        ((0, 80), [asking(0, 1), asking(0.5, BY_SHARE), asking(0.5)], [[1], [1], [0]]),
        ((0,), [asking(0, 0.001), asking(0.5, 0.001), asking(0.5)], [[], [], [0]]),
        # Who has memory of a device is on it, as who has a share.
        (
            (80, 80),
            [asking(0, 1, spread=True), asking(0.25), asking(1)],
            [[0], [0], [1]],
        ),
        ((80, 80, 80), [asking(0, 1), asking(0.25, spread=True)], [[0], [1]]),
        ((80,), [asking(0, 1), asking(0.25, spread=True)], [[0], [0]]),
    ],
)
def test_who_gets_which_device(sizes, asked, got):
    """[B44]"""
    assert placed(node(*sizes), *asked) == got


def test_all_that_was_held_comes_back():
    ledger = node(80, 0)
    requests = [
        *(asking(0, 10), asking(0.25, 20), asking(0.25, BY_SHARE)),
        *(asking(0.5), asking(0.125)),
    ]
    leases = [lease for lease in map(ledger.take, requests) if lease is not None]
    for lease in leases[1:-1]:
        ledger.give_back(lease)
        ledger.check()
    more = ledger.take(asking(0, 60))
    assert more is not None
    for lease in (leases[0], leases[-1], more):
        ledger.give_back(lease)
        ledger.check()
    assert ledger.available() == ledger.totals()


def test_what_a_lease_holds_of_the_memory_is_known_to_the_byte():
    ledger = node(80, 80, 0)
    leases = {
        "named": ledger.take(asking(0.25, 10)),
        "alone": ledger.take(asking(0, 20)),
        "share": ledger.take(asking(0.25)),
        "by share": ledger.take(asking(0.3333, BY_SHARE)),
        "unknown": ledger.take(asking(1, where=None)),
    }
    third = 80 * GIB * 3333 // UNIT
    held = {name: ledger.reserved(lease) for name, lease in leases.items() if lease}
    assert held == {
        "named": (("GPU", 0, 10 * GIB),),
        "alone": (("GPU", 0, 20 * GIB),),
        "share": (("GPU", 0, 20 * GIB),),
        "by share": (("GPU", 0, third),),
        "unknown": (("GPU", 1, 80 * GIB),),
    }
    devices = ledger.device_sets["GPU"]
    used = 50 * GIB + (80 * GIB * 5833 // UNIT - 20 * GIB)
    assert [devices.memory_reserved(index) for index in range(3)] == [used, 80 * GIB, 0]
    assert ledger.available()["gpu_memory"] == 80 * GIB - used
    assert ledger.totals()["gpu_memory"] == 160 * GIB
    several = node(80, 40)
    both = several.take(asking(2, 30))
    assert both is not None
    assert several.reserved(both) == (("GPU", 0, 80 * GIB), ("GPU", 1, 40 * GIB))


def test_memory_is_told_of_where_that_of_a_gpu_is_known():
    assert "gpu_memory" not in node(0, 0).totals()
    assert "gpu_memory" not in node(0, 0).available()
    assert node(0, 8).totals()["gpu_memory"] == 8 * GIB
    ledger = node(8, 8)
    ledger.device_sets["GPU"].availability.note(0, Cause.UNSETTLED, "it is stuck")
    assert ledger.available()["gpu_memory"] == 8 * GIB
    assert ledger.totals()["gpu_memory"] == 16 * GIB


def test_devices_kept_until_their_driver_agrees_keep_their_memory():
    ledger = node(80)
    lease = ledger.take(asking(0, 60))
    assert lease is not None
    ledger.keep_devices(lease)
    ledger.check()
    assert ledger.take(asking(0, 30)) is None
    ledger.give_back(lease)
    assert ledger.available() == ledger.totals()


@pytest.mark.parametrize(
    ("sizes", "asked", "room"),
    [
        ((80, 80), asking(0, 30), 4),
        ((80, 20), asking(0, 30), 2),
        ((80, 0), asking(0.5), 4),
        ((80, 0), asking(0.5, 30), 2),
        ((80, 80), asking(0.25, 30), 4),
        ((80, 80), asking(0.75, 30), 2),
        ((80, 0), asking(0.25, BY_SHARE), 4),
        ((80, 40), asking(1, 60), 1),
        ((80, 40), asking(2, 60), 0),
        ((0,), asking(0, 1), 0),
    ],
)
def test_how_many_of_them_an_idle_node_has_room_for(sizes, asked, room):
    ledger = node(*sizes)
    assert ledger.room_for(asked) == room
    assert all(placed(ledger, *[asked] * room))
    assert ledger.take(asked) is None


def test_only_a_share_or_less_is_reserved_by_name():
    assert named_bytes(5_000, 10) == named_bytes(0, 10) == 10
    assert named_bytes(UNIT, 10) == named_bytes(5_000, 0) == 0
    assert named_bytes(5_000, BY_SHARE) == 0


@pytest.mark.parametrize("spoil", ["named", "capacity", "mask", "apart"])
def test_check_notices_memory_that_is_given_twice(spoil):
    ledger = node(80)
    devices = ledger.device_sets["GPU"]
    ledger.take(asking(0.25, 40))
    ledger.check()
    if spoil == "named":
        devices.named[0] += 1
    elif spoil == "capacity":
        devices.capacity = (10 * GIB,)
    elif spoil == "mask":
        devices.named_mask = 0
    else:
        devices._apart[0] = 5_000
    with pytest.raises(AssertionError):
        devices.check() if spoil != "named" else ledger.check()


def test_bytes_are_written_as_people_read_them():
    one = asking(0.5, 6)
    assert str(one) == "{GPU: 0.5, gpu_memory: 6GiB}"
    assert one.as_numbers() == {"GPU": 0.5, "gpu_memory": 6.0 * GIB}
    alone = asking(0, 6)
    assert str(alone) == "{gpu_memory: 6GiB}"
    assert alone.as_numbers() == {"gpu_memory": 6.0 * GIB}
    by_share = asking(0.5, BY_SHARE)
    assert str(by_share) == "{GPU: 0.5, gpu_memory: share}"
    assert by_share.as_numbers() == {"GPU": 0.5}
    ledger = node(80)
    ledger.take(asking(0, 20))
    assert repr(ledger) == "<Ledger GPU 1/1, gpu_memory 60GiB/80GiB; 1 leases>"


def test_which_devices_are_large_enough_is_remembered_for_some_sizes():
    devices = DeviceSet(GPU, [Device(0, memory=80 * GIB), Device(1, memory=300)])
    for size in (*range(1, 400), 300, 301):
        request = Request.of({}, {GPU: 5_000}, gpu_memory=size)
        assert devices.usable(5_000, request) == (0b11 if size <= 300 else 0b01)
