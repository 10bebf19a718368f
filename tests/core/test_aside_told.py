"""What people are told of devices that settle, are set aside, or were not verified."""

from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World

REASON = "GPU 0: of what has ended, the driver still lists pid 7"


def gone(gpus=1):
    w = World(cpus=4, gpus=1)
    w.settles = True
    w.submit("a", num_gpus=gpus, max_calls=1)
    worker = w.worker_of("a")
    w.finish("a")
    return w, worker


def table(w):
    return str(snapshot(w.scheduler, {}, w.now)).splitlines()


def told(w, name):
    record = w.scheduler.tasks[w.tasks[name].id]
    return str(why(w.scheduler, record, {}, w.now)).splitlines()


def test_a_share_that_settles_is_held_by_nobody_alive():
    w, _ = gone(0.5)
    (device,) = snapshot(w.scheduler, {}, w.now).devices
    (holder,) = device.holders
    assert (holder.is_settling, holder.task, holder.pid) == (True, None, 0)
    assert "  0.5  (ended)    until its driver agrees" in table(w)
    w.submit("b", num_gpus=1)
    assert told(w, "b")[1:] == [
        "  GPU 1: 0.5 of 1 free (0: 0.5)",
        "    0.5 of GPU 0: held by a process that has ended, until its driver agrees",
    ]


def test_a_device_that_is_set_aside_says_why():
    w, worker = gone()
    w.tell(Scheduler.devices_stuck, worker, REASON)
    (device,) = snapshot(w.scheduler, {}, w.now).devices
    assert (device.free, device.aside, device.holders) == (0.0, REASON, ())
    assert table(w)[-2:] == ["GPU 0  0 free", f"  set aside: {REASON}"]
    w.submit("b", num_gpus=0.5)
    assert told(w, "b")[1:] == [
        "  GPU 0.5: 0 of 1 free (0: set aside)",
        f"    set aside: {REASON}",
    ]
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.UNSETTLED, None)
    (device,) = snapshot(w.scheduler, {}, w.now).devices
    assert (device.free, device.aside) == (0.5, None)


def test_a_failure_that_is_told_from_two_sides_is_told_once():
    w, worker = gone()
    w.tell(Scheduler.devices_stuck, worker, "GPU 0: it is lost (no answer)")
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "it is lost; XID 79")
    (device,) = snapshot(w.scheduler, {}, w.now).devices
    assert device.aside == "GPU 0: it is lost (no answer); XID 79"
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.UNSETTLED, None)
    (device,) = snapshot(w.scheduler, {}, w.now).devices
    assert device.aside == "it is lost; XID 79"


def test_each_of_several_sick_devices_is_named_once():
    w = World(cpus=4, gpus=2)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    w.tell(Scheduler.device_changed, "GPU", 1, Cause.SICK, "GPU 1: XID 79")
    w.submit("b", num_gpus=1)
    assert told(w, "b")[1:] == [
        "  GPU 1: 0 of 2 free (0: set aside, 1: set aside)",
        "    set aside: GPU 0: XID 79",
        "    set aside: GPU 1: XID 79",
    ]


def test_a_device_of_which_nobody_knows_says_so():
    w, worker = gone()
    w.tell(Scheduler.devices_free, worker, is_verified=False)
    (device,) = snapshot(w.scheduler, {}, w.now).devices
    assert device.is_unverified
    assert table(w)[-1] == (
        "  unverified: whether ended tasks left something on it is not known"
    )
