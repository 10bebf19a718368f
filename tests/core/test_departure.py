"""A worker's end, and when what it held may be given to others [B26]."""

import pytest

from aiogpu.core.effects import Kill
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World


def gone(gpus=1, **options):
    """A world in which a task has ended and its worker's devices are awaited."""
    w = World(cpus=4, gpus=2)
    w.settles = True
    w.submit("a", num_gpus=gpus, max_calls=1, **options)
    worker = w.worker_of("a")
    w.finish("a")
    return w, worker


def test_the_owner_is_told_at_once_and_the_share_comes_back_later():
    w, worker = gone()
    assert w.told == {"a": "settled"}
    assert w.free == {"CPU": 4.0, "GPU": 1.0}, "its code has ended"
    w.submit("b", num_gpus=2)
    assert w.waiting == {"b"}
    w.tell(Scheduler.devices_free, worker)
    assert w.running == {"b"}
    assert w.scheduler.ledger.device_sets["GPU"].unverified == set()


def test_what_nobody_could_see_is_noted():
    w, worker = gone(0.5)
    w.tell(Scheduler.devices_free, worker, is_verified=False)
    assert w.free_gpus == [1, 1]
    gpus = w.scheduler.ledger.device_sets["GPU"]
    assert gpus.unverified == {0}
    w.submit("b", num_gpus=0.5, max_calls=1)
    worker = w.worker_of("b")
    w.finish("b")
    w.tell(Scheduler.devices_free, worker)
    assert gpus.unverified == set()


def test_one_that_has_ended_in_time_is_not_killed_while_its_devices_are_awaited():
    w, worker = gone()
    w.advance(60)
    assert not any(isinstance(effect, Kill) for effect in w.effects)
    w.tell(Scheduler.devices_free, worker)
    assert w.free["GPU"] == 2.0


def test_a_device_that_is_not_given_back_is_set_aside():
    w, worker = gone()
    w.submit("both", num_gpus=2)
    w.tell(Scheduler.devices_stuck, worker, "pid 7 holds 3 GiB of it")
    assert w.free == {"CPU": 4.0, "GPU": 1.0}
    assert w.waiting == {"both"}
    w.submit("b", num_gpus=1)
    assert w.gpus_of("b") == [1]
    record = w.scheduler.tasks[w.tasks["both"].id]
    assert "set aside" in snapshot(w.scheduler, {}, w.now).waiting[0].reason
    assert why(w.scheduler, record, {}, w.now).reasons
    w.finish("b")
    w.run_dry()
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.UNSETTLED, None)
    assert w.gpus_of("both") == [0, 1]


def test_who_shares_a_device_that_is_set_aside_keeps_his_share():
    w = World(gpus=1)
    w.settles = True
    w.submit("a", num_gpus=0.5, max_calls=1)
    w.submit("b", num_gpus=0.5)
    worker = w.worker_of("a")
    w.finish("a")
    w.tell(Scheduler.devices_stuck, worker, "stuck")
    w.tell(Scheduler.devices_stuck, worker, "said twice")
    assert w.running == {"b"}
    assert w.free["GPU"] == 0.0
    w.finish("b")
    w.submit("c", num_gpus=0.5)
    assert w.waiting == {"c"}
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.UNSETTLED, None)
    assert w.running == {"c"}
    assert w.worker_of("c")


def test_a_reservation_counts_on_nothing_that_is_set_aside():
    w, worker = gone()
    w.tell(Scheduler.devices_stuck, worker, "stuck")
    w.submit("b", num_gpus=1)
    w.submit("both", num_gpus=2)
    w.advance(2)
    assert w.scheduler.reservation is None
    w.submit("c", num_gpus=1)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.UNSETTLED, None)
    w.advance(2)
    assert w.scheduler.reservation is not None or w.running == {"b", "c"}


def test_a_dead_workers_task_is_decided_about_before_its_devices_are_back():
    w = World(gpus=1)
    w.settles = True
    w.submit("a", num_gpus=1, max_retries=1)
    w.submit("lost", num_gpus=0, max_retries=0)
    worker = w.worker_of("a")
    w.die("lost")
    assert w.told == {"lost": "lost"}
    w.die("a")
    assert w.waiting == {"a"}
    w.tell(Scheduler.devices_free, worker)
    assert w.running == {"a"}


def test_cpus_that_were_lent_come_back_with_the_rest():
    w = World(cpus=1, gpus=1)
    w.settles = True
    w.submit("parent", num_gpus=1, max_retries=0)
    w.submit("child", parent="parent")
    w.wait_for("parent", "child")
    worker = w.worker_of("parent")
    w.die("parent")
    w.cancel("child")
    w.run_dry()
    w.tell(Scheduler.devices_free, worker)
    assert w.free == {"CPU": 1.0, "GPU": 1.0}


def test_the_end_of_the_node_waits_for_no_device():
    w, _ = gone()
    w.close()
    assert w.scheduler.is_closed


@pytest.mark.parametrize("step", [Scheduler.devices_free, Scheduler.worker_gone])
def test_what_is_said_of_nobody_changes_nothing(step):
    w, worker = gone()
    w.tell(step, 99)
    w.tell(Scheduler.worker_gone, worker)
    assert w.unsettled == [worker]
    w.tell(Scheduler.devices_stuck, 99, "nobody's")
    w.tell(Scheduler.device_changed, "GPU", 1, Cause.UNSETTLED, None)
    assert w.free_gpus == [0, 1]


def test_a_spoilt_worker_ends_after_its_task_although_it_is_reused():
    w = World(gpus=1, took=1e-4)
    for name in "abcd":
        w.submit(name, num_gpus=1)
    w.finish("a")
    worker = w.worker_of("b")
    assert w.queued
    w.spoil("b")
    assert not w.queued
    w.finish("b")
    assert w.running
    assert w.worker_of(next(iter(w.running))) != worker
    assert worker not in w.workers


def test_nobody_spoils_a_worker_without_a_task():
    w = World()
    w.submit("a")
    worker = w.worker_of("a")
    w.finish("a")
    w.tell(Scheduler.worker_spoilt, worker)
    w.tell(Scheduler.worker_spoilt, 99)
    w.submit("b")
    assert w.worker_of("b") == worker
