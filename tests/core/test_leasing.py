"""Leases for code that is no worker's: their turn, their holder, their end."""

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import WorkerId
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import InfeasibleError
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World

HOLDER = 4711


def look_at(w: World):
    return snapshot(w.scheduler, dict.fromkeys(w.leases.values(), HOLDER), w.now)


def why_of(w: World, name: str):
    record = w.scheduler.tasks.get(w.tasks[name].id)
    return why(w.scheduler, record, dict.fromkeys(w.leases.values(), HOLDER), w.now)


def test_a_lease_is_granted_at_once_and_without_a_worker():
    w = World(gpus=2)
    w.lease("mine", num_gpus=1)
    assert list(w.leases) == ["mine"]
    assert w.gpus_of("mine") == [0]
    assert not w.workers
    assert w.free_gpus == [0, 1]
    w.give_back("mine")
    assert w.free_gpus == [1, 1]
    assert w.forgotten == {"mine"}
    assert w.told == {}


def test_a_lease_waits_for_its_turn_among_tasks():
    w = World(gpus=1)
    w.submit("before", num_gpus=1)
    w.lease("lease", num_gpus=0.5)
    w.submit("after", num_gpus=0.5)
    w.submit("whole", num_gpus=1)
    assert w.waiting == {"lease", "after", "whole"}
    w.finish("before")
    assert (set(w.leases), w.running) == ({"lease"}, {"after"})
    w.finish("after")
    assert w.waiting == {"whole"}
    w.give_back("lease")
    assert w.running == {"whole"}


def test_a_higher_priority_goes_first():
    w = World(gpus=1)
    w.lease("holds", num_gpus=1)
    w.submit("task", num_gpus=1)
    w.lease("urgent", num_gpus=1, priority=1)
    w.give_back("holds")
    assert (set(w.leases), w.waiting) == ({"urgent"}, {"task"})


def test_a_lease_is_never_sent_ahead_to_a_worker_of_its_shape():
    w = World(cpus=1, took=1e-5)
    for number in range(4):
        w.submit(f"t{number}")
    w.lease("lease", num_cpus=1)
    for number in range(4):
        w.finish(f"t{number}")
    assert set(w.leases) == {"lease"}


def test_a_lease_needs_no_room_for_a_worker():
    w = World(gpus=2)
    w.scheduler.worker_limit.bound(1)
    w.submit("task")
    w.lease("lease", num_gpus=1)
    assert set(w.leases) == {"lease"}


def test_a_lease_that_waits_is_withdrawn_at_once():
    w = World(gpus=1)
    w.submit("task", num_gpus=1)
    w.lease("lease", num_gpus=1)
    w.cancel("lease")
    assert w.forgotten == {"lease"}


def test_a_lease_that_nobody_wants_any_more_is_held_until_its_processes_have_ended():
    w = World(gpus=1)
    w.lease("lease", num_gpus=1)
    w.submit("task", num_gpus=1)
    w.cancel("lease")
    assert w.waiting == {"task"}
    status = look_at(w)
    (lease, _) = status.tasks
    assert lease.state == "stopping"
    assert "have not ended" in lease.reason
    assert "as soon as its processes have ended" in str(why_of(w, "lease"))
    w.cancel("lease")
    w.give_back("lease")
    assert w.running == {"task"}


def test_its_devices_may_have_to_be_seen_free():
    w = World(gpus=1)
    w.lease("lease", num_cpus=1, num_gpus=1)
    holder = w.leases["lease"]
    w.give_back("lease", settles=True)
    assert w.free["CPU"] == 16
    assert w.free_gpus == [0]
    assert look_at(w).devices[0].holders[0].is_settling
    w.tell(Scheduler.devices_free, holder)
    assert w.free_gpus == [1]
    assert not w.scheduler.granted


def test_devices_that_do_not_become_free_are_set_aside():
    w = World(gpus=1)
    w.lease("lease", num_gpus=1)
    holder = w.leases["lease"]
    w.give_back("lease", settles=True)
    w.tell(Scheduler.devices_stuck, holder, "pid 4711 is on it")
    assert look_at(w).devices[0].aside == "pid 4711 is on it"
    w.submit("task", num_gpus=1)
    assert w.waiting == {"task"}


def test_what_is_returned_twice_or_never_was_is_no_news():
    w = World(gpus=1)
    w.lease("lease", num_gpus=1)
    holder = w.leases["lease"]
    w.give_back("lease", settles=True)
    w.tell(Scheduler.lease_returned, holder)
    assert w.free_gpus == [0]
    w.tell(Scheduler.lease_returned, WorkerId(99))
    w.tell(Scheduler.devices_free, holder)
    w.tell(Scheduler.lease_returned, holder)
    assert w.free_gpus == [1]


def test_nobody_waits_for_the_end_of_a_lease():
    w = World(gpus=2, config=SchedulerConfig(reserve_after=1.0))
    w.lease("lease", num_gpus=1)
    w.submit("needs both", num_gpus=2)
    w.advance(5.0)
    w.submit("small", num_gpus=0.5)
    assert w.running == {"small"}
    told = why_of(w, "needs both")
    assert told.is_held_endlessly
    assert "held by lease (pid 4711, without end)" in str(told)


def test_a_share_is_kept_for_a_lease_that_has_waited_long():
    w = World(gpus=1, config=SchedulerConfig(reserve_after=1.0))
    w.submit("a", num_gpus=0.5)
    w.lease("lease", num_gpus=1)
    w.advance(2.0)
    w.submit("b", num_gpus=0.5)
    w.finish("a")
    assert set(w.leases) == {"lease"}


def test_status_shows_who_holds_it():
    w = World(gpus=1)
    w.lease("train", num_gpus=0.5)
    w.advance(2.0)
    status = look_at(w)
    (task,) = status.tasks
    assert (task.name, task.state, task.worker) == ("train", "running", None)
    assert (task.pid, task.is_lease, task.is_held) == (HOLDER, True, True)
    assert not status.workers
    (holder,) = status.devices[0].holders
    assert (holder.task, holder.pid, holder.share) == ("train", HOLDER, 0.5)
    assert holder.seconds == 2.0
    assert "leases\n  0  train  pid 4711  {GPU: 0.5}" in str(status)
    told = why_of(w, "train")
    assert (told.worker, told.pid, told.is_lease) == (None, HOLDER, True)
    assert str(told) == "train is held by pid 4711, for 2.0 s now."


def test_a_task_is_not_given_a_whole_device_that_is_leased():
    w = World(gpus=1)
    w.lease("lease", num_gpus=0.5)
    w.submit("a", num_gpus=0.5, retries_oom=True, max_retries=0)
    w.finish("a", ran_out=True)
    assert w.told == {"a": "settled"}


def test_closing_ends_all_leases_at_once():
    w = World(gpus=3)
    w.lease("held", num_gpus=1)
    w.lease("reclaimed", num_gpus=1)
    w.cancel("reclaimed")
    w.lease("settles", num_gpus=1)
    w.give_back("settles", settles=True)
    w.lease("waits", num_gpus=3)
    w.close()
    w.run_dry()
    assert w.told == {"held": "abandoned", "waits": "abandoned"}
    assert w.scheduler.is_closed
    assert not w.scheduler.ledger.leases


def test_a_lease_returned_while_the_node_closes_settles_no_more():
    w = World(gpus=1)
    w.lease("held", num_gpus=1)
    holder = w.leases["held"]
    w.close()
    w.tell(Scheduler.lease_returned, holder, settles=True)
    assert not w.scheduler.granted


def test_a_lease_ends_with_the_task_that_has_asked_for_it():
    w = World(gpus=1)
    w.submit("parent")
    w.submit(
        "lease",
        num_gpus=1,
        num_cpus=0,
        parent="parent",
        max_calls=1,
        max_retries=0,
        is_endless=True,
        is_lease=True,
    )
    w.finish("parent")
    assert w.told["lease"] == "disowned"
    w.give_back("lease")
    assert w.free_gpus == [1]


def test_what_there_never_will_be_is_refused():
    w = World(gpus=1)
    with pytest.raises(InfeasibleError):
        w.lease("lease", num_gpus=2)


def test_what_a_program_has_leased_counts_for_its_share():
    w = World(gpus=2)
    w.join(1)
    w.join(2)
    w.lease("held", num_gpus=1, client=1)
    w.submit("runs", num_gpus=1, client=2)
    w.submit("again 2", num_gpus=1, client=2)
    w.submit("again 1", num_gpus=1, client=1)
    w.finish("runs")
    assert w.running == {"again 2"}
    w.give_back("held")
    assert w.running == {"again 2", "again 1"}
