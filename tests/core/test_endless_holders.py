"""Resources held without end: leases for other processes, and actors."""

from __future__ import annotations

import pytest

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, status_of, why_of


def test_lease_is_granted_without_a_worker():
    w = World(gpus=2).play("lease mine gpus=1")
    assert set(w.leases) == {"mine"}
    assert w.gpus_of("mine") == [0]
    assert w.worker_count == 0
    w.play("free_gpus = 0 1; give_back mine; free_gpus = 1 1; forgotten = mine; told =")


def test_lease_is_never_sent_to_a_worker():
    w = World(cpus=1, took=1e-5).play("submit t0 t1 t2 t3; lease lease cpus=1")
    for number in range(4):
        w.finish(f"t{number}")
    assert set(w.leases) == {"lease"}


def test_lease_is_granted_at_the_worker_limit():
    World(gpus=2).play("bound 1; submit task; lease lease gpus=1; leases = lease")


def test_cancelled_lease_is_held_until_its_processes_end():
    w = World(gpus=1).play("""
        lease lease waits gpus=1; submit task gpus=1; cancel waits; forgotten = waits
        cancel lease; waiting = task
    """)
    (lease, _) = status_of(w).tasks
    assert lease.state == "stopping"
    assert "have not ended" in lease.reason
    assert "its processes have not ended" in str(why_of(w, "lease"))
    w.play("cancel lease; give_back lease; running = task")


@pytest.mark.parametrize("is_stuck", [False, True])
def test_devices_of_a_returned_lease_settle(is_stuck):
    w = World(gpus=1).play("lease lease cpus=1 gpus=1")
    holder = w.leases["lease"]
    w.play("give_back lease settles=True; free has CPU:16")
    w.tell(Scheduler.lease_returned, holder)
    w.tell(Scheduler.lease_returned, WorkerId(99))
    assert w.free_gpus == [0]
    assert status_of(w).devices[0].holders[0].is_settling
    if is_stuck:
        w.tell(Scheduler.devices_stuck, holder, "pid 4711 is on it")
        assert status_of(w).devices[0].aside == "pid 4711 is on it"
    else:
        w.tell(Scheduler.devices_free, holder)
    w.submit("task", num_gpus=1)
    assert w.waiting == ({"task"} if is_stuck else set())
    assert not w.scheduler.granted


def test_close_ends_all_leases_at_once():
    w = World(gpus=3).play("""
        lease held reclaimed gpus=1; cancel reclaimed; lease settles gpus=1
        give_back settles settles=True; lease waits gpus=3; close; run_dry
        told = held:abandoned waits:abandoned
    """)
    assert w.is_closed
    assert not w.scheduler.ledger.leases


def test_lease_returned_during_close_does_not_settle():
    w = World(gpus=1).play("lease held gpus=1")
    holder = w.leases["held"]
    w.close()
    w.tell(Scheduler.lease_returned, holder, settles=True)
    assert not w.scheduler.granted


# An actor needs a CPU only for its placement.


def resident(w: World, name: str = "actor", **options) -> None:
    """Place an actor, which then gives its CPU back."""
    w.submit(name, max_calls=1, max_retries=1, is_endless=True, **options)
    w.tell(Scheduler.release_cpus, w.tasks[name].id)


def test_actor_frees_its_cpu_after_its_start():
    w = World(cpus=1, gpus=1).play("""
        submit actor gpus=0.5 max_calls=1 is_endless=True; submit task; waiting = task
    """)
    for who in (w.tasks["actor"].id, w.tasks["actor"].id, 99):
        w.tell(Scheduler.release_cpus, who)
    assert (w.running, w.free) == ({"actor", "task"}, {"CPU": 0.0, "GPU": 0.5})
    requests = {task.name: task.request for task in status_of(w).tasks}
    assert requests == {"actor": {"GPU": 0.5}, "task": {"CPU": 1.0}}


@pytest.mark.parametrize("end", ["finish", "die", "cancel"])
def test_end_of_an_actor_does_not_free_its_cpu_twice(end):
    w = World(cpus=2)
    resident(w)
    getattr(w, end)("actor")
    if end == "die":
        assert w.free["CPU"] == 1.0, "it begins anew"
        w.tell(Scheduler.release_cpus, w.tasks["actor"].id)
        w.die("actor")
    w.play("run_dry; free has CPU:2.0")


def test_task_that_waits_for_an_actor_lends_its_cpu():
    w = World(cpus=1).play("submit task")
    w.tell(Scheduler.wait_for, w.tasks["task"].id, (), elsewhere=True)
    assert (w.blocked, w.free["CPU"]) == ({"task"}, 1.0)
    assert "waits for an actor" in str(why_of(w, "task"))
    assert "an actor" in str(status_of(w))
    w.tell(Scheduler.wait_for, w.tasks["task"].id, ())
    assert (w.blocked, w.free["CPU"]) == (set(), 0.0)


@pytest.mark.parametrize("closes", [True, False])
def test_actor_has_the_nodes_grace_only_when_the_node_closes(closes):
    w = World(cpus=1).play("submit actor max_calls=1 is_endless=True cancel_grace=0.0")
    if closes:
        w.close()
        w.advance(w.scheduler.config.cancel_grace - 0.1)
        w.play("killed =; advance 0.2")
    else:
        w.play("cancel actor; advance 0.01")
    assert w.killed == [1]


def test_leaving_actor_does_not_hold_without_end():
    w = World(gpus=1).play("submit actor gpus=1 max_calls=1 is_endless=True")
    w.play("submit task gpus=1; waiting = task")
    assert why_of(w, "task").is_held_endlessly
    w.tell(Scheduler.task_leaves, w.tasks["actor"].id)
    w.tell(Scheduler.task_leaves, 99)
    why = why_of(w, "task")
    assert not why.is_held_endlessly
    assert "held by actor (pid 101, which is ending)" in str(why)
    assert "is ending" in str(status_of(w))
    w.advance(60)
    assert not w.warned
    w.finish("actor")
    w.play("running = task")
