"""What was seen on devices, in the picture of a node and as people read it."""

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot
from aiogpu.observe.status import (
    DeviceStatus,
    Holder,
    NodeStatus,
    Observed,
    OtherProcess,
    report,
)
from aiogpu.testing import World

GIB = 1 << 30
A100 = Device(0, "A100", "GPU-1", "NVIDIA A100-SXM4-80GB", 80 * GIB)
LONG = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


def picture(*devices: DeviceStatus) -> list[str]:
    """The lines that a status has for these devices."""
    status = NodeStatus({}, {}, devices, (), (), 0, (), 0, None)
    return report(status).splitlines()[2:]


def device(**known: object) -> DeviceStatus:
    return DeviceStatus(*("GPU", 0, "A100", "u", A100.name, 80 * GIB, 1.0, ()), **known)


def test_what_was_seen_is_in_the_picture_of_a_device():
    w = World(gpus=2, exits=False)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=0.5)
    other = OtherProcess(7, "Xorg", GIB)
    seen = Observed(w.now, 9 * GIB, 87, (other,), {1: 3 * GIB}, frozenset({1}), "why")
    w.advance(2)
    pids = {worker: 100 + worker for worker in w.workers}
    first, second = snapshot(w.scheduler, pids, w.now, {("GPU", 0): seen}).devices
    assert (first.used, first.utilisation, first.others) == (9 * GIB, 87, (other,))
    assert (first.seen, first.unknown) == (2.0, "why")
    a, b = first.holders
    assert (a.task, a.used, a.has_outgrown) == ("a", 3 * GIB, True)
    assert (b.task, b.used, b.has_outgrown) == ("b", None, False)
    assert (second.used, second.utilisation, second.others) == (None, None, None)
    assert (second.seen, second.unknown) == (None, None)


def test_a_look_is_never_younger_than_now():
    scheduler = Scheduler(Ledger({"CPU": UNIT}, [DeviceSet("GPU", [A100])]))
    [status] = snapshot(scheduler, {}, 5.0, {("GPU", 0): Observed(6.0)}).devices
    assert status.seen == 0.0


def test_devices_are_shown_one_below_the_other():
    seen = device(
        used=3 * GIB, utilisation=7, seen=0.2, memory_reserved=6 * GIB, others=()
    )
    full = DeviceStatus(
        *("GPU", 11, "A100", "u", A100.name, 80 * GIB, 0.25, ()),
        used=512 << 20,
        utilisation=100,
        seen=12.0,
    )
    assert picture(seen, full) == [
        "GPU 0   1 free     NVIDIA A100-SXM4-80GB  3 GiB used of 80 GiB    "
        "6 GiB reserved  7 % busy",
        "GPU 11  0.25 free  NVIDIA A100-SXM4-80GB",
        "  512 MiB used of 80 GiB  100 % busy  seen 12 s ago",
    ]


def test_what_is_too_wide_stands_on_two_lines():
    wide = DeviceStatus("GPU", 0, None, None, LONG, 96 * GIB, 1.0, (), used=95 * GIB)
    busy = DeviceStatus(
        *("GPU", 1, None, None, LONG, 96 * GIB, 1.0, ()), used=0, utilisation=3
    )
    rows = picture(wide, busy)
    assert rows == [
        f"GPU 0  1 free  {LONG}  95 GiB used of 96 GiB",
        f"GPU 1  1 free  {LONG}",
        "  0 used of 96 GiB  3 % busy",
    ]
    assert all(len(row) <= 100 for row in rows)


def test_a_device_without_memory_of_its_own_shows_what_is_used():
    bare = DeviceStatus("GPU", 0, None, None, None, 0, 1.0, (), used=3 * GIB // 2)
    assert picture(bare) == ["GPU 0  1 free  1.5 GiB used"]


def test_holders_show_what_they_use():
    holders = (
        Holder(0.5, 1, 101, "a", 3.0, used=(100 << 30) + 1, has_outgrown=True),
        Holder(0.25, 2, 102, "b", 12.0, used=1000),
        Holder(0.0, 3, 103, "c", memory=6 * GIB),
    )
    assert picture(DeviceStatus("GPU", 0, None, None, None, 0, 0.0, holders)) == [
        "GPU 0  0 free",
        "  0.5   a  pid 101  3.0 s  100 GiB used, more than was reserved for it",
        "  0.25  b  pid 102  12 s   0 used",
        "  6GiB  c  pid 103",
    ]


def test_processes_that_are_not_ours_are_named():
    others = (
        OtherProcess(7, "Xorg", 120 << 20),
        OtherProcess(9, "", GIB),
        OtherProcess(11, "python"),
    )
    assert picture(device(others=others))[1] == (
        "  not ours: Xorg pid 7 with 120 MiB, pid 9 with 1 GiB, python pid 11"
    )


def test_what_is_not_known_is_said_once():
    rows = picture(device(unknown="all"), device(), device(unknown="all"))
    assert rows[3:] == ["not known of GPU 0, GPU 0: all"]
