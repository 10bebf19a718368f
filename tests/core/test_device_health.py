"""Devices that settle after a task, are sick, or have processes of others on them."""

import pytest

from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, status_of, why_of

SICK = "XID 79"
WHO = "others are on it: python (pid 4711)"
REASON = "GPU 0: of what has ended, the driver still lists pid 7"


def note(w: World, index: int, reason: str | None, cause=Cause.SICK, **how) -> None:
    """A device has a reason not to be used, or has it no more."""
    w.tell(Scheduler.device_changed, "GPU", index, cause, reason, **how)


def shown(w: World) -> list[str | None]:
    """The reason for which each device is given to nobody."""
    return [one.aside for one in status_of(w).devices]


def gone(gpus=1, count=2):
    """A world in which a task has ended and its worker's devices are awaited."""
    w = World(cpus=4, gpus=count).play("let settles=True")
    w.submit("a", num_gpus=gpus, max_calls=1)
    worker = w.worker_of("a")
    w.finish("a")
    return w, worker


def test_the_owner_has_its_result_at_once_and_the_share_comes_back_later():
    """[B26]"""
    w, worker = gone()
    w.play("""
        told = a:settled; free = CPU:4.0 GPU:1.0 (its code has ended)
        submit b gpus=2; waiting = b
        advance 60; killed = (it has ended in time)
    """)
    w.tell(Scheduler.devices_free, worker)
    assert w.running == {"b"}
    assert w.scheduler.ledger.device_sets["GPU"].unverified == set()


def test_status_shows_what_settles_and_what_was_not_verified():
    w, worker = gone(0.5, count=1)
    (device,) = status_of(w).devices
    (holder,) = device.holders
    assert (holder.is_settling, holder.task, holder.pid) == (True, None, 0)
    assert "  0.5  (ended)    until its driver agrees" in str(status_of(w))
    w.submit("b", num_gpus=1, max_calls=1)
    assert str(why_of(w, "b")).splitlines()[1:] == [
        "  GPU 1: 0.5 of 1 free (0: 0.5)",
        "    0.5 of GPU 0: held by a process that has ended, until its driver agrees",
    ]
    w.tell(Scheduler.devices_free, worker, is_verified=False)
    (device,) = status_of(w).devices
    assert device.is_unverified
    assert "unverified: whether ended tasks left something" in str(status_of(w))
    worker = w.worker_of("b")
    w.finish("b")
    w.tell(Scheduler.devices_free, worker)
    assert not status_of(w).devices[0].is_unverified


def test_a_device_that_is_not_given_back_is_set_aside_and_says_why():
    w, worker = gone()
    w.submit("both", num_gpus=2)
    w.tell(Scheduler.devices_stuck, worker, REASON)
    w.tell(Scheduler.devices_stuck, worker, "said twice")
    assert w.free == {"CPU": 4.0, "GPU": 1.0}
    assert shown(w) == [REASON, None]
    assert f"  set aside: {REASON}" in str(status_of(w)).splitlines()
    assert "set aside" in status_of(w).waiting[0].reason
    w.play("submit b gpus=1; gpus_of b = 1")
    assert f"    set aside: {REASON}" in str(why_of(w, "both")).splitlines()
    w.play("advance 2; kept = None (none counts on it); finish b; run_dry")
    note(w, 0, None, Cause.UNSETTLED)
    assert w.gpus_of("both") == [0, 1]


def test_cpus_that_were_lent_come_back_with_the_rest():
    w = World(cpus=1, gpus=1)
    w.settles = True
    w.submit("parent", num_gpus=1, max_retries=0)
    w.play("submit child parent=parent; wait_for parent child")
    worker = w.worker_of("parent")
    w.play("die parent; cancel child; run_dry")
    w.tell(Scheduler.devices_free, worker)
    assert w.free == {"CPU": 1.0, "GPU": 1.0}


def test_the_end_of_the_node_waits_for_no_device():
    w, _ = gone()
    w.play("close; is_closed = True")


def test_a_spoilt_worker_ends_after_its_task_although_it_is_reused():
    w = World(gpus=1, took=1e-4).play("submit a b c d gpus=1; finish a")
    worker = w.worker_of("b")
    assert w.queued
    w.play("spoil b; queued =; finish b")
    assert w.running
    assert w.worker_of(next(iter(w.running))) != worker
    assert worker not in w.workers


def test_nobody_spoils_a_worker_without_a_task():
    w = World().play("submit a")
    worker = w.worker_of("a")
    w.finish("a")
    w.tell(Scheduler.worker_spoilt, worker)
    w.tell(Scheduler.worker_spoilt, 99)
    w.submit("b")
    assert w.worker_of("b") == worker


def test_a_worker_on_a_sick_device_is_given_no_more_of_the_same():
    """[B26] Not the next of its line, and not what it was sent ahead."""
    w = World(cpus=1, gpus=1, took=1e-5).play("""
        submit a b c d e f g h gpus=0.5; finish a
    """)
    assert w.queued
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "GPU reset needed")
    w.play("queued =; running = b; finish b; running =; heal 0; run_dry")
    assert set(w.told) == set("abcdefgh")


def test_nothing_is_kept_on_a_sick_device():
    w = World(gpus=2).play("""
        submit a gpus=0.5; submit b gpus=0.5 strategy=spread; submit c gpus=1; advance 2
        submit d gpus=0.25
    """)
    assert w.scheduler.reservation.barred == {"GPU": 0b01}
    w.play("advance 1; sicken 0")
    assert w.scheduler.reservation.barred == {"GPU": 0b10}


def test_what_was_opened_on_a_sick_device_is_not_used_again():
    """A reset ends it, and needs that nobody has the device open."""
    w = World(gpus=2, exits=False).play("""
        submit a b gpus=0.5; submit c gpus=1; submit d
    """)
    idle, busy, other = (w.worker_of(name) for name in "abc")
    w.play("finish a c d; sicken 0")
    assert w.retired == [idle]
    w.play("finish b; submit e gpus=1")
    assert w.worker_of("e") == other
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert w.retired == [idle, busy]
    w.submit("f", num_gpus=0.5)
    assert w.worker_of("f") not in (idle, busy)


@pytest.mark.parametrize("cause", [Cause.SICK, Cause.FOREIGN, Cause.UNSETTLED])
def test_a_task_whose_worker_is_being_forked_goes_elsewhere(cause):
    w, worker = gone(0.5)
    w.play("let starts=False; submit b gpus=0.5")
    if cause is Cause.UNSETTLED:
        w.tell(Scheduler.devices_stuck, worker, SICK)
    else:
        note(w, 0, SICK, cause)
    w.play("start b; gpus_of b = 1")
    assert w.worker_count == 1, "the same worker, which had no device yet"


def test_who_avoids_devices_with_others_on_them_takes_them_if_there_is_nothing_else():
    w = World(gpus=3)
    note(w, 0, WHO, Cause.FOREIGN, is_avoided=True)
    w.play("submit a gpus=0.5; submit b c gpus=1")
    assert [w.gpus_of(name) for name in "abc"] == [[1], [2], [0]]
    w.play("finish a b c")
    for count, devices in ((2, [1, 2]), (3, [0, 1, 2])):
        w.submit(f"of {count}", num_gpus=count)
        assert w.gpus_of(f"of {count}") == devices
        w.finish(f"of {count}")
    note(w, 0, None, Cause.FOREIGN, is_avoided=True)
    w.play("submit d gpus=1 environment=X:1; gpus_of d = 0")
