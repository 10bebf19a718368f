"""Fixed bugs, each as the shortest story that showed it.

Most were found by the machine of `test_scheduler_properties`. Write another here
when it finds one: calls in a straight line, no helpers, and what went wrong.
"""

from aiogpu.core.effects import Interrupt, Revoke
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.records import Memory
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, submit

SHORT = 1e-5


def test_empty_lane_takes_back_a_retried_task():
    """An empty lane was treated as missing: its tasks got two lanes, one was lost."""
    w = World(cpus=1).play("""
        submit again leaves priority=1; submit later; cancel leaves; die again
        running = again
        submit urgent priority=1; finish again retry=True; running = urgent
        advance 0.1; finish urgent; running = again; finish again later
    """)
    assert not w.scheduler.ready.by_shape


def test_retry_takes_free_resources_while_its_worker_continues():
    """The retry waited until some other event."""
    World(cpus=2, took=SHORT).play("""
        submit t0 t1 t2 t3 t4 t5; finish t0 t1 t4 t5; running = t2; queued = t3
        finish t2 retry=True; running = t2 t3
    """)


def test_resources_freed_by_a_parents_end_are_placed():
    """Only the parent's own lease was considered."""
    World(cpus=2, gpus=1, starts=False).play("""
        submit parent; start parent; submit child gpus=1 parent=parent; submit next
        submit other gpus=1; starting = child
        finish parent; running = next; starting = other
    """)


def test_revocation_is_matched_by_its_number():
    """The revocation of a worker that had finished its queue stayed open."""
    w = World(cpus=1, took=SHORT, revokes=False).play("submit long; advance 2.0")
    assert w.workers[1].revoking
    w.play("""
        finish long; submit t0 t1 t2 t3 t4 t5 t6; finish t0; queued = t2 t3
        cancel t2
    """)
    assert [type(effect) for effect in w.effects] == [Revoke]
    w.revoked(1)
    assert (w.effects, w.queued) == ([], {"t3"})
    w.play("revoked 1; forgotten = t2; queued =")


def test_cancelled_task_is_not_interrupted_before_it_begins():
    """The interrupt hit a worker that ran nothing, or the next task."""
    w = World(cpus=1, took=SHORT, revokes=False).play("""
        submit t0 t1 t2 t3 t4 t5 t6; finish t0; cancel t2; finish t1
    """)
    assert Interrupt not in [type(effect) for effect in w.effects]
    w.play("revoked 1; forgotten = t2")
    assert w.tasks["t2"].interrupts == 0
    assert w.running == {"t3"}


def test_close_ends_the_reservation():
    """The reservation stayed, for a task that had been abandoned."""
    w = World(gpus=2, exits=False, config=SchedulerConfig(reserve_after=0.0)).play("""
        submit long gpus=1; submit big gpus=2; submit small cpus=0; finish small
    """)
    assert w.scheduler.reservation is not None
    w.play("close; kept = None; run_dry; is_closed = True")


def test_late_revoked_does_not_affect_new_tasks():
    """It requeued a task that was sent later, which then ran twice."""
    w = World(cpus=1, took=SHORT, revokes=False).play("""
        submit t0 t1 t2 t3; finish t0; cancel t3 t2; skip t1; stop 1; submit since
        revoked 1
    """)
    assert w.effects == []
    w.run_dry()
    assert w.tasks["since"].runs == 1


def test_old_backlog_runs_at_full_speed():
    """After a second each task got a reservation, and none was sent ahead."""
    w = World(cpus=1, took=SHORT, config=SchedulerConfig(reserve_after=0.1))
    submit(w, [f"t{n}" for n in range(400)])
    for number in range(200):
        w.finish(f"t{number}")
        w.play("advance 0.001; kept = None")
    assert len(w.queued) > 30


def test_unblocked_task_leaves_no_cpu_to_hand_over():
    """Each task that had waited once let one task too many run."""
    World(cpus=1).play("""
        submit parent; submit child parent=parent; submit t0 t1; wait_for parent child
        finish child; running = parent; finish parent; running = t0
    """)


def test_all_deadlocked_children_fail():
    """Only one failed; a parent that gathers failures waited for the other for ever."""
    World(gpus=1).play("""
        submit parent gpus=1; submit x gpus=1 parent=parent
        submit y gpus=0.5 parent=parent; wait_for parent x y
        told = x:deadlocked y:deadlocked; blocked =
    """)


def test_awaited_detached_child_passes_the_reservation():
    """Its parent, the child and the task with the reservation waited in a circle."""
    World(gpus=2).play("""
        submit parent gpus=1; submit big gpus=2 priority=1; submit a cpus=0; finish a
        advance 1.0; submit b cpus=0; finish b
        submit child gpus=1 parent=parent is_detached=True; waiting = big child
        wait_for parent child; running = child parent
    """)


def test_waiter_of_a_cancelled_queued_task_continues():
    """A revoked cancelled task left the queue but kept its links to its parent."""
    World(cpus=1, took=SHORT).play("""
        submit parent; submit t0 t1 t2 t3 t4 t5 parent=parent; wait_for parent t2
        finish t0; queued = t2 t3; cancel t2; forgotten = t2; blocked =
    """)


def test_waiter_of_a_revoked_task_continues():
    """The same after the worker was killed."""
    World(cpus=2, config=SchedulerConfig(cancel_grace=9.0)).play("""
        submit parent a; finish a; stop 2; submit child parent=parent
        wait_for parent child; cancel child; advance 2.5; forgotten = child; blocked =
        finish parent
    """)


def test_result_before_the_kill_clears_killed_for():
    """`killed_for` remained, so a failed start caused an exclusive retry."""
    w = World(cpus=1, exits=False).play("submit a")
    first = w.worker_of("a")
    w.tell(Scheduler.kill_for_memory, first, Memory.HOST)
    w.play("finish a retry=True; let starts=False")
    w.die(first)
    w.play("die a; starting = a")


def test_exclusive_retry_needs_a_worker():
    """The task started while a device of a gone worker was still settling."""
    w = World(cpus=4, gpus=2)
    w.play("bound 1; let settles=True; submit a gpus=1; starve a")
    assert w.running | w.starting == set()
    w.play("settle; running = a")


def test_idle_worker_makes_room_for_an_exclusive_retry():
    """The task waited for its timeout, since no idle worker was evicted."""
    w = World(cpus=4, gpus=1)
    w.play("let settles=True; submit idle; finish idle; submit a gpus=1")
    w.play("bound 1; starve a; settle; running = a; worker_count = 1")


def test_killed_worker_that_skips_a_task_gets_no_other():
    """The worker counted as idle and got the next waiting task."""
    w = World(cpus=1, took=SHORT, exits=False, revokes=False).play("""
        submit t0 t1 t2 t3 t4 t5; finish t0; queued = t2 t3
    """)
    worker = w.worker_of("t1")
    w.tell(Scheduler.kill_for_memory, worker, Memory.HOST)
    w.advance(0.1)
    assert w.workers[worker].void
    w.play("skip t1 is_late=True; running =")
    w.die(worker)
    w.run_dry()
    assert set(w.told.values()) == {"settled"}


def test_late_revoked_of_a_killed_worker_changes_nothing():
    """The scheduler searched the queue behind a task that was gone."""
    w = World(cpus=1, took=SHORT, exits=False, revokes=False).play("""
        submit t0 t1 t2 t3; finish t0; queued = t2
    """)
    worker = w.worker_of("t1")
    w.close(at_once=True)
    assert w.workers[worker].void
    w.skip("t1")
    w.revoked(worker)
    w.play("run_dry; is_closed = True")


def test_deadlocked_task_may_have_no_parent():
    """A task whose result a child expects has no parent; the scheduler raised."""
    World(cpus=4).play("""
        bound 1; submit parent other; submit child parent=parent needs=other
        wait_for parent child; told = other:deadlocked
    """)


def test_reservation_is_freed_when_a_lease_is_handed_over():
    """The resources stayed idle until another event."""
    World(cpus=1.5, config=SchedulerConfig(reserve_after=0.0)).play("""
        submit first; submit half cpus=0.5; submit second
        submit small cpus=0.5 environment=X:1; finish half; waiting = second small
        finish first; running = second small
    """)


def test_lease_goes_before_tasks_that_lack_a_worker():
    """The lease was first in the queue, but was placed only at another event."""
    w = World(cpus=2, starts=False).play("submit low cpus=0 priority=-1")
    w.tell(Scheduler.worker_gone, w.worker_of("low"), outage="no process")
    w.play("lease lease; leases = lease; waiting = low")


def test_lease_is_not_passed_over_with_tasks_of_an_outage():
    """The lease was passed over like these tasks, although it needs no worker."""
    w = World(cpus=1, starts=False).play("""
        join 1; submit first client=1 priority=1; lease lease cpus=1
    """)
    w.tell(Scheduler.worker_gone, w.worker_of("first"), outage="no process")
    w.play("leases = lease; waiting = first")


def test_task_expires_at_the_time_of_its_warning():
    """The alarm of the warning was set earlier, for another waiting task."""
    w = World(cpus=1, config=SchedulerConfig(warn_after=0.5)).play("""
        submit endless is_endless=True; submit other; submit task cpus=0.5 timeout=0.5
        advance 1.0; told = task:expired
    """)
    assert w.warned == ["other"]


def test_unresponsive_worker_is_killed_at_the_exact_time():
    """By a rounding error the worker had time left, and got the next task."""
    w = World(cpus=1, config=SchedulerConfig(unresponsive_after=0.1), starts=False)
    w.play("advance 0.5; submit task")
    worker = w.worker_of("task")
    w.stop(worker)
    w.start(worker)
    w.advance(0.1)
    assert w.killed == [worker]
    assert w.worker_of("task") != worker


def test_actor_lends_its_cpu_only_once():
    """Its CPU was freed twice, so the node had too many CPUs."""
    w = World(cpus=1)
    w.play("submit actor is_endless=True max_calls=1; submit child parent=actor cpus=0")
    w.tell(Scheduler.release_cpus, w.tasks["actor"].id)
    w.wait_for("actor", "child")
    w.check()
    w.finish("child")
    w.check()
