"""Bugs that were found, each as the shortest story that showed it.

Most were found by the machine of `test_scheduler_properties`. Write another here
when it finds one: calls in a straight line, no helpers, and what went wrong.
"""

from aiogpu.core.effects import Interrupt, Revoke
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.records import Memory
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, submit

SHORT = 1e-5


def test_a_lane_that_all_have_left_takes_back_one_that_is_tried_again():
    """An empty lane was taken for none: its tasks got two lanes, and one was lost."""
    w = World(cpus=1).play("""
        submit again leaves priority=1; submit later; cancel leaves; die again
        running = again
        submit urgent priority=1; finish again retry=True; running = urgent
        advance 0.1; finish urgent; running = again; finish again later
    """)
    assert not w.scheduler.ready.by_shape


def test_a_retry_takes_what_is_free_though_its_worker_goes_on_with_its_queue():
    """It waited until somebody else did something."""
    World(cpus=2, took=SHORT).play("""
        submit t0 t1 t2 t3 t4 t5; finish t0 t1 t4 t5; running = t2; queued = t3
        finish t2 retry=True; running = t2 t3
    """)


def test_what_a_parents_end_frees_is_taken_though_its_worker_has_its_next_task():
    """Only the parent's own lease was thought of."""
    World(cpus=2, gpus=1, starts=False).play("""
        submit parent; start parent; submit child gpus=1 parent=parent; submit next
        submit other gpus=1; starting = child
        finish parent; running = next; starting = other
    """)


def test_an_earlier_revocation_is_not_taken_for_a_later_one():
    """A worker that had ended all it had was still being taken back."""
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


def test_a_cancelled_task_at_its_turn_is_not_interrupted_before_it_has_begun():
    """The interrupt hit a worker that ran nothing, or the next task."""
    w = World(cpus=1, took=SHORT, revokes=False).play("""
        submit t0 t1 t2 t3 t4 t5 t6; finish t0; cancel t2; finish t1
    """)
    assert Interrupt not in [type(effect) for effect in w.effects]
    w.play("revoked 1; forgotten = t2")
    assert w.tasks["t2"].interrupts == 0
    assert w.running == {"t3"}


def test_closing_keeps_nothing_for_anybody():
    """What was kept was kept for one that had been abandoned."""
    w = World(gpus=2, exits=False, config=SchedulerConfig(reserve_after=0.0)).play("""
        submit long gpus=1; submit big gpus=2; submit small cpus=0; finish small
    """)
    assert w.scheduler.reservation is not None
    w.play("close; kept = None; run_dry; is_closed = True")


def test_an_answer_that_comes_when_all_was_skipped_does_not_touch_what_came_since():
    """It took back a task that was sent after it; sent again, that ran twice."""
    w = World(cpus=1, took=SHORT, revokes=False).play("""
        submit t0 t1 t2 t3; finish t0; cancel t3 t2; skip t1; stop 1; submit since
        revoked 1
    """)
    assert w.effects == []
    w.run_dry()
    assert w.tasks["since"].runs == 1


def test_a_backlog_goes_at_full_speed_however_old_it_is():
    """After a second something was kept for each of it, and nothing sent ahead."""
    w = World(cpus=1, took=SHORT, config=SchedulerConfig(reserve_after=0.1))
    submit(w, [f"t{n}" for n in range(400)])
    for number in range(200):
        w.finish(f"t{number}")
        w.play("advance 0.001; kept = None")
    assert len(w.queued) > 30


def test_a_task_that_goes_on_leaves_no_cpu_to_be_handed_over():
    """Each that had waited once added one to those that ran, for a whole backlog."""
    World(cpus=1).play("""
        submit parent; submit child parent=parent; submit t0 t1; wait_for parent child
        finish child; running = parent; finish parent; running = t0
    """)


def test_several_that_can_never_run_all_fail():
    """One failed, and whoever gathers failures too waited for the other for ever."""
    World(gpus=1).play("""
        submit parent gpus=1; submit x gpus=1 parent=parent
        submit y gpus=0.5 parent=parent; wait_for parent x y
        told = x:deadlocked y:deadlocked; blocked =
    """)


def test_a_detached_child_takes_what_is_kept_if_somebody_waits_for_it():
    """Else its parent, it, and the one for whom it is kept waited in a circle."""
    World(gpus=2).play("""
        submit parent gpus=1; submit big gpus=2 priority=1; submit a cpus=0; finish a
        advance 1.0; submit b cpus=0; finish b
        submit child gpus=1 parent=parent is_detached=True; waiting = big child
        wait_for parent child; running = child parent
    """)


def test_who_waits_for_a_queued_task_that_is_cancelled_goes_on():
    """What was taken back and unwanted left the queue, but not its family."""
    World(cpus=1, took=SHORT).play("""
        submit parent; submit t0 t1 t2 t3 t4 t5 parent=parent; wait_for parent t2
        finish t0; queued = t2 t3; cancel t2; forgotten = t2; blocked =
    """)


def test_who_waits_for_a_task_that_a_stopped_worker_never_began_goes_on():
    """The same, where the worker was given up."""
    World(cpus=2, config=SchedulerConfig(cancel_grace=9.0)).play("""
        submit parent a; finish a; stop 2; submit child parent=parent
        wait_for parent child; cancel child; advance 2.5; forgotten = child; blocked =
        finish parent
    """)


def test_who_answers_before_the_kill_for_memory_is_starved_no_more():
    """Its next try was to run alone if a worker failed to start: it never had run."""
    w = World(cpus=1, exits=False).play("submit a")
    first = w.worker_of("a")
    w.tell(Scheduler.kill_for_memory, first, Memory.HOST)
    w.play("finish a retry=True; let starts=False")
    w.die(first)
    w.play("die a; starting = a")


def test_who_is_to_run_alone_needs_a_worker_as_well():
    """He began beside a worker that had gone, whose device was not seen free."""
    w = World(cpus=4, gpus=2)
    w.play("bound 1; let settles=True; submit a gpus=1; starve a")
    assert w.running | w.starting == set()
    w.play("settle; running = a")


def test_an_idle_worker_makes_way_for_who_is_to_run_alone():
    """He waited for his time to be up, since nobody was there to make way."""
    w = World(cpus=4, gpus=1)
    w.play("let settles=True; submit idle; finish idle; submit a gpus=1")
    w.play("bound 1; starve a; settle; running = a; worker_count = 1")


def test_a_worker_that_is_being_killed_skips_a_task_and_is_given_no_other():
    """It was taken for idle, and sent the next of those that wait."""
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


def test_what_is_heard_of_a_killed_worker_that_has_skipped_all_changes_nothing():
    """What was taken back was looked for behind a task that it had not got any more."""
    w = World(cpus=1, took=SHORT, exits=False, revokes=False).play("""
        submit t0 t1 t2 t3; finish t0; queued = t2
    """)
    worker = w.worker_of("t1")
    w.close(at_once=True)
    assert w.workers[worker].void
    w.skip("t1")
    w.revoked(worker)
    w.play("run_dry; is_closed = True")


def test_what_fails_for_a_deadlock_may_be_nobodys_child():
    """One whose result a child expects; the scheduler fell over it."""
    World(cpus=4).play("""
        bound 1; submit parent other; submit child parent=parent needs=other
        wait_for parent child; told = other:deadlocked
    """)


def test_what_was_kept_for_a_task_that_goes_on_with_a_lease_is_placed():
    """It lay idle until something else happened."""
    World(cpus=1.5, config=SchedulerConfig(reserve_after=0.0)).play("""
        submit first; submit half cpus=0.5; submit second
        submit small cpus=0.5 environment=X:1; finish half; waiting = second small
        finish first; running = second small
    """)


def test_a_lease_goes_before_tasks_that_wait_for_want_of_a_worker():
    """It came first among them; nothing was placed until something else happened."""
    w = World(cpus=2, starts=False).play("submit low cpus=0 priority=-1")
    w.tell(Scheduler.worker_gone, w.worker_of("low"), outage="no process")
    w.play("lease lease; leases = lease; waiting = low")


def test_a_lease_is_not_passed_over_with_tasks_of_another_program():
    """These had no worker; it was passed over as their like, and needs none."""
    w = World(cpus=1, starts=False).play("""
        join 1; submit first client=1 priority=1; lease lease cpus=1
    """)
    w.tell(Scheduler.worker_gone, w.worker_of("first"), outage="no process")
    w.play("leases = lease; waiting = first")


def test_a_task_whose_time_is_up_just_as_it_is_warned_of():
    """The alarm of the warning had been set before, for another that waits."""
    w = World(cpus=1, config=SchedulerConfig(warn_after=0.5)).play("""
        submit endless is_endless=True; submit other; submit task cpus=0.5 timeout=0.5
        advance 1.0; told = task:expired
    """)
    assert w.warned == ["other"]


def test_a_worker_that_does_not_begin_is_ended_at_the_very_moment():
    """By rounding it had a little time left, and was given the next task."""
    w = World(cpus=1, config=SchedulerConfig(unresponsive_after=0.1), starts=False)
    w.play("advance 0.5; submit task")
    worker = w.worker_of("task")
    w.stop(worker)
    w.start(worker)
    w.advance(0.1)
    assert w.killed == [worker]
    assert w.worker_of("task") != worker


def test_what_has_its_place_lends_no_cpu_twice():
    """It waited for a child, and there were more CPUs than the node has."""
    w = World(cpus=1)
    w.play("submit actor is_endless=True max_calls=1; submit child parent=actor cpus=0")
    w.tell(Scheduler.release_cpus, w.tasks["actor"].id)
    w.wait_for("actor", "child")
    w.check()
    w.finish("child")
    w.check()
