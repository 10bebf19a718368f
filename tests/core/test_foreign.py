"""Devices on which processes are that are none of the node's."""

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World

WHO = "others are on it: python (pid 4711)"


def test_who_avoids_them_takes_other_devices_first():
    w = World(gpus=3)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, WHO, is_avoided=True)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=1)
    assert (w.gpus_of("a"), w.gpus_of("b")) == ([1], [2])
    w.submit("c", num_gpus=1)
    assert w.gpus_of("c") == [0]
    assert w.running == {"a", "b", "c"}


def test_several_are_had_with_them_if_not_without():
    w = World(gpus=3)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, WHO, is_avoided=True)
    w.submit("two", num_gpus=2)
    assert w.gpus_of("two") == [1, 2]
    w.finish("two")
    w.submit("three", num_gpus=3)
    assert w.gpus_of("three") == [0, 1, 2]


def test_when_they_have_gone_it_is_as_before():
    w = World(gpus=2)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, WHO, is_avoided=True)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, None, is_avoided=True)
    w.submit("a", num_gpus=1)
    assert w.gpus_of("a") == [0]


def test_who_waits_for_them_is_told_so():
    w = World(gpus=1)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, WHO)
    w.submit("a", num_gpus=0.5)
    assert w.waiting == {"a"}
    record = w.scheduler.tasks.get(w.tasks["a"].id)
    assert f"set aside: GPU 0: {WHO}" in str(why(w.scheduler, record, {}, w.now))
    assert snapshot(w.scheduler, {}, w.now).devices[0].aside == WHO
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, None)
    assert w.running == {"a"}


def test_who_has_a_share_already_keeps_it():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, WHO)
    w.submit("b", num_gpus=0.5)
    assert (w.running, w.waiting) == ({"a"}, {"b"})


def test_what_has_not_begun_goes_elsewhere():
    w = World(gpus=2, starts=False)
    w.submit("a", num_gpus=1)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, WHO)
    w.start("a")
    assert w.gpus_of("a") == [1]


def test_what_was_kept_is_kept_elsewhere():
    w = World(gpus=2, config=SchedulerConfig(reserve_after=1.0))
    w.submit("first", num_gpus=0.5)
    w.submit("second", num_gpus=1)
    w.submit("large", num_gpus=1)
    w.advance(2.0)
    w.submit("other")
    kept = w.scheduler.reservation
    assert kept is not None
    index = kept.barred["GPU"].bit_length() - 1
    w.tell(Scheduler.device_changed, "GPU", index, Cause.FOREIGN, WHO)
    assert w.scheduler.reservation is None or (
        w.scheduler.reservation.barred["GPU"] == 1 << (1 - index)
    )


def test_it_may_be_sick_as_well():
    w = World(gpus=1)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.FOREIGN, WHO)
    assert snapshot(w.scheduler, {}, w.now).devices[0].aside == f"XID 79; {WHO}"
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert snapshot(w.scheduler, {}, w.now).devices[0].aside == WHO
