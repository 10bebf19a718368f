"""What a task asks of a device beside its type, and which devices fulfil it."""

import pytest

from aiogpu.core.model.request import Device, DeviceSelector, Request
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.observe.snapshot import snapshot
from aiogpu.testing import World

GIB = 1 << 30
A100 = Device(
    0, "A100", name="NVIDIA A100-SXM4-80GB", memory=80 * GIB, compute_capability=(8, 0)
)
H100 = Device(
    1, "H100", name="NVIDIA H100 PCIe", memory=94 * GIB, compute_capability=(9, 0)
)
PLAIN = Device(2)


@pytest.mark.parametrize(
    ("where", "fitting"),
    [
        (DeviceSelector(), [A100, H100, PLAIN]),
        (DeviceSelector(least_memory=80 * GIB), [A100, H100]),
        (DeviceSelector(least_memory=80 * GIB + 1), [H100]),
        (DeviceSelector(least_capability=(8, 0)), [A100, H100]),
        (DeviceSelector(least_capability=(8, 6)), [H100]),
        (DeviceSelector(least_capability=(10, 0)), []),
        (DeviceSelector(name="*h100*"), [H100]),
        (DeviceSelector(name="nvidia ?100*"), [A100, H100]),
        (DeviceSelector(name="nvidia [hl]100*"), [H100]),
        (DeviceSelector(name="a100"), []),
        (DeviceSelector(80 * GIB, (9, 0), "*a100*"), []),
    ],
)
def test_a_device_fulfils_all_or_is_not_used(where, fitting):
    assert [one for one in (A100, H100, PLAIN) if where.fits(one)] == fitting
    devices = DeviceSet("GPU", [A100, H100, PLAIN])
    request = Request.of({}, {"GPU": UNIT}, where=where)
    chosen = [(1 << one.id) for one in fitting]
    assert devices.fitting(request) == devices.usable(UNIT, request) == sum(chosen)
    shares = devices.choose(UNIT, request)
    assert shares == (((fitting[0].id, UNIT),) if fitting else None)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (DeviceSelector(least_memory=40 * GIB), "memory of 40GiB or more"),
        (DeviceSelector(least_capability=(8, 6)), "compute capability 8.6 or more"),
        (DeviceSelector(name="*h100*"), "a name like '*h100*'"),
        (
            DeviceSelector(GIB, (9, 0)),
            "memory of 1GiB or more and compute capability 9.0 or more",
        ),
    ],
)
def test_conditions_are_told_in_words(where, told):
    assert str(where) == told


def test_which_devices_fulfil_it_is_looked_up_once():
    devices = DeviceSet("GPU", [A100, H100])
    asked = []

    class Counted(DeviceSelector):
        def fits(self, device):
            asked.append(device.id)
            return super().fits(device)

    request = Request.of({}, {"GPU": UNIT}, where=Counted(least_memory=GIB))
    for _ in range(5):
        devices.choose(UNIT, request)
    assert asked == [0, 1]
    for least in range(2, 600):
        devices.choose(UNIT, Request.of({}, {"GPU": UNIT}, where=DeviceSelector(least)))
    assert len(devices._where) <= 256


def test_conditions_and_a_type_are_both_fulfilled():
    cards = [A100, H100, Device(2, "A100", memory=40 * GIB)]
    devices = DeviceSet("GPU", cards)
    large = DeviceSelector(least_memory=80 * GIB)
    request = Request.of({}, {"GPU": UNIT}, "A100", where=large)
    assert devices.fitting(request) == 0b001
    assert devices.choose(2 * UNIT, request) is None


def test_who_waits_for_such_a_device_holds_up_nobody_else():
    w = World(devices=[A100, H100, PLAIN])
    fast = DeviceSelector(least_capability=(9, 0))
    w.submit("a", num_gpus=1, where=fast)
    w.submit("b", num_gpus=1, where=fast)
    w.submit("c", num_gpus=2)
    assert w.gpus_of("a") == [1]
    assert w.waiting == {"b"}
    shown = str(snapshot(w.scheduler, {}, w.now))
    assert "1 x {CPU: 1, GPU: 1} of compute capability 9.0 or more: b first" in shown
    assert w.gpus_of("c") == [0, 2]
    w.finish("c")
    assert w.waiting == {"b"}
    w.finish("a")
    assert w.gpus_of("b") == [1]


def test_what_is_kept_for_one_is_such_a_device():
    w = World(devices=[A100, H100])
    w.submit("a", num_gpus=0.5, where=DeviceSelector(least_capability=(9, 0)))
    w.submit("b", num_gpus=1, where=DeviceSelector(name="*h100*"))
    w.advance(2)
    w.submit("c", num_gpus=0.5, where=DeviceSelector(least_memory=GIB))
    assert w.scheduler.reservation.barred == {"GPU": 0b10}
    assert w.gpus_of("c") == [0]
    w.finish("a")
    assert w.gpus_of("b") == [1]


def test_a_request_without_devices_has_no_conditions():
    w = World(devices=[A100])
    w.submit("a", where=DeviceSelector(least_memory=1 << 50))
    assert w.running == {"a"}


def test_beside_gpus_a_type_and_conditions_are_said_of_these():
    boards = DeviceSet("FPGA", [Device(0), Device(1, "U250")])
    gpus = DeviceSet("GPU", [A100, H100])
    ledger = Ledger({"accelerator_type:H100": UNIT}, [gpus, boards])
    wanted = {"GPU": UNIT // 2, "FPGA": UNIT}
    request = Request.of(
        {}, wanted, "H100", where=DeviceSelector(least_memory=90 * GIB)
    )
    assert ledger.why_infeasible(request) is None
    lease = ledger.take(request)
    assert lease is not None
    assert dict(zip(["FPGA", "GPU"], lease.shares, strict=True)) == {
        "FPGA": ((0, UNIT),),
        "GPU": ((1, UNIT // 2),),
    }
    ledger.check()
    unknown = ledger.why_infeasible(Request.of({}, wanted, "U250"))
    assert unknown == "there is no GPU of type 'U250' (there are: 1 x A100, 1 x H100)"
    alone = Request.of({}, {"FPGA": UNIT}, "U250")
    assert boards.choose(UNIT, alone) == ((1, UNIT),)
