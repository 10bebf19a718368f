"""The life of a task in each state, and how a node closes."""

from typing import get_args

import pytest

from aiogpu.core import effects
from aiogpu.core.effects import (
    Assign,
    Effect,
    Fail,
    Failure,
    Forget,
    Interrupt,
    Settle,
    Spawn,
)
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.records import TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.state import STOP_EVERY
from aiogpu.core.scheduler.task_tree import STOPPED_AT_ONCE
from tests.core.builders import World, kinds, record_of, submit

pytestmark = pytest.mark.usefixtures("few")

PATIENCE = SchedulerConfig(cancel_grace=2.0, interrupt_every=0.5, exit_grace=5.0)


SPEC = TaskSpec("f", Shape(Request.of({"CPU": UNIT}, {})))


def fails(effect: Effect, failure: Failure) -> bool:
    return isinstance(effect, Fail) and effect.failure is failure


def test_task_runs_from_submit_to_settle():
    w = World(cpus=2, gpus=1, starts=False).play("submit a gpus=0.5")
    assert kinds(w) == [Spawn]
    w.play("starting = a; free_gpus = 0.5; start a")
    assert not w.scheduler.worker_started(w.now, w.worker_of("a")), "it starts once"
    [assign] = w.effects
    assert isinstance(assign, Assign)
    assert (assign.is_first, assign.is_last) == (True, False)
    assert w.running == {"a"}
    assert repr(w.scheduler).startswith("<Scheduler 1 tasks, <Workers 1: 0 idle>, <Le")
    w.finish("a")
    assert (w.effects, w.told) == ([Settle(w.tasks["a"].id)], {"a": "settled"})
    w.play("free = CPU:2.0 GPU:1.0; cancel a")
    assert (w.effects, w.told) == ([], {"a": "settled"})


def test_cancel_ends_a_waiting_or_starting_task_at_once():
    w = World(cpus=2, starts=False).play("submit a; submit b c cpus=2")
    for name in ("b", "a"):
        w.cancel(name)
        assert Forget(w.tasks[name].id) in w.effects
    w.play("starting = c; start c; running = c")


def test_cancel_interrupts_a_running_task_then_kills():
    w = World(cpus=1, config=PATIENCE).play("submit a; cancel a")
    attempts = []
    for _ in range(3):
        w.advance(0.5)
        attempts += [e.attempt for e in w.effects if isinstance(e, Interrupt)]
    assert attempts == [1, 2, 3]
    w.play("killed =; advance 0.5; killed = 1; forgotten = a; free has CPU:1.0")


@pytest.mark.parametrize("state", ["waits", "starts", "runs", "runs again"])
def test_timeout_ends_a_task_in_each_state(state):
    w = World(cpus=1, config=PATIENCE, starts=state != "starts")
    if state == "waits":
        w.submit("before")
    w.play("submit a timeout=1.0; submit b; advance 0.9; told =")
    if state == "runs again":
        w.play("die a; running = a (the time counts from submission)")
    w.play("advance 0.1; told = a:expired")
    if state.startswith("runs"):
        assert w.tasks["a"].interrupts == 1
        assert w.waiting == {"b"}
        (w.finish if state == "runs" else w.die)("a")
    assert w.forgotten == {"a"}
    assert (w.running | w.starting) == ({"before"} if state == "waits" else {"b"})


def test_run_timeout_counts_from_the_begin_of_the_code():
    """The wait in the queue and the start of the process do not count."""
    w = World(cpus=1, config=PATIENCE, starts=False).play("""
        submit before; submit a run_timeout=1.0; start before; advance 5.0
        finish before; advance 3.0; begin a ago=0.5; advance 0.4; told lacks a
        advance 0.1; told has a:overrun
    """)
    (failed,) = [effect for effect in w.effects if isinstance(effect, Fail)]
    assert failed.reason == "it waited 7.5 s for {CPU: 1} and ran 1.0 s"
    assert w.tasks["a"].interrupts == 1
    w.play("finish a; forgotten = a")


def test_each_attempt_has_the_full_run_timeout():
    w = World(cpus=1, config=PATIENCE).play("""
        submit a run_timeout=1.0 max_retries=2; begin a; advance 0.6; die a; running = a
        advance 0.6; told = (that was the time of its first try)
        begin a; advance 0.9; told =; advance 0.1; told = a:overrun
    """)
    (failed,) = [effect for effect in w.effects if isinstance(effect, Fail)]
    assert failed.reason.endswith("(with 1 earlier tries) and ran 1.0 s")


@pytest.mark.parametrize("limit", ["timeout", "run_timeout"])
def test_time_limits_stand_still_at_a_breakpoint(limit):
    failure = {"timeout": "expired", "run_timeout": "overrun"}[limit]
    World(cpus=1, config=PATIENCE).play(f"""
        submit a {limit}=1.0; begin a; advance 0.4
        halt a; advance 5.0; halt a (attached); advance 5.0; told =
        go_on a; go_on a; advance 0.4; told =
        halt a; advance 5.0; go_on a; advance 0.1; told =
        advance 0.1; told = a:{failure}
    """)


def test_a_task_that_dies_at_a_breakpoint_has_limits_again():
    """An alarm that passes while the code stands must not be lost."""
    World(cpus=1, config=PATIENCE).play("""
        submit a timeout=1.0 max_retries=1; begin a; halt a; advance 2.0; die a
        running = a; advance 0.9; told =; advance 0.1; told = a:expired
    """)


def test_a_task_that_fails_at_a_breakpoint_has_limits_again():
    World(cpus=1, config=PATIENCE).play("""
        submit a timeout=3.0 max_retries=9; begin a; halt a; advance 2.0
        finish a retry=True; advance 2.9; told =; advance 0.1; told = a:expired
    """)


def test_a_task_whose_retry_waits_has_limits_meanwhile():
    w = World(cpus=1).play("submit a timeout=60.0 max_retries=9")
    tries = 0
    while w.scheduler.delayed == {}:
        w.play("begin a; halt a; die a")
        tries += 1
        assert tries < 9
    (halt,) = w.scheduler.halts.values()
    assert halt.since is None


def test_a_breakpoint_without_limits_or_of_a_lost_task_changes_nothing():
    w = World(cpus=1, config=PATIENCE).play("submit free; begin free; halt free")
    worker = w.worker_of("free")
    assert not w.scheduler.halts
    w.play("go_on free; finish free; submit a run_timeout=1.0; begin a")
    for name, by in (("a", WorkerId(99)), ("free", worker)):
        w.tell(Scheduler.task_halted, w.tasks[name].id, by, True)
    w.play(
        "advance 1.0; told has a:overrun; halt a; go_on a; finish a; forgotten has a"
    )
    assert not w.scheduler.halts


def test_unexpected_began_sets_no_timer():
    """A worker may report a task without a limit, or a task that it has lost."""
    w = World(cpus=1, config=PATIENCE).play("submit free; begin free")
    worker = w.worker_of("free")
    w.play("finish free; submit a run_timeout=1.0")
    w.tell(Scheduler.task_began, w.tasks["a"].id, WorkerId(99), 0.0)
    w.tell(Scheduler.task_began, w.tasks["free"].id, worker, 0.0)
    w.play("""
        advance 5.0; told = free:settled
        begin a; cancel a; advance 1.0; told lacks a (it is being stopped)
    """)


@pytest.mark.parametrize("limit", ["timeout", "run_timeout"])
def test_timers_of_ended_tasks_do_not_pile_up(limit):
    w = World(cpus=1)
    most = 0
    for number in range(300):
        w.submit(f"t{number}", **{limit: 3600})
        w.begin(f"t{number}")
        w.finish(f"t{number}")
        most = max(most, len(w.scheduler.timers))
    assert most < 100


# Closing.


def test_close_ends_tasks_in_every_state():
    w = World(cpus=3, starts=False, exits=False, config=PATIENCE)
    for name in ("answered", "running", "stopping"):
        w.submit(name)
        w.start(name)
    w.play("cancel stopping; finish answered")
    idle = w.scheduler.workers.idle
    w.play("submit starting environment=X:1; submit waiting")
    assert (idle, w.starting, w.waiting) == (1, {"starting"}, {"waiting"})
    w.play("""
        close
        told = answered:settled running:abandoned starting:abandoned waiting:abandoned
        forgotten = starting waiting; retired = 1; running = running stopping
        finish running; retired = 1 2; start 4; retired = 1 2 4
        advance 2.0; killed = 4 3 (one that starts need not come any more)
    """)
    for worker in (1, 2, 3):
        w.die(worker)
    assert not w.is_closed
    w.play("die 4; is_closed = True; forgotten = running starting stopping waiting")


def test_close_retries_nothing_and_refuses_new_tasks():
    w = World(config=PATIENCE).play("submit a b max_retries=-1; close; close")
    assert w.effects == []
    w.play("finish a retry=True; die b; told = a:abandoned b:abandoned; submit c")
    late = w.tasks["c"].id
    assert w.effects == [Fail(late, Failure.ABANDONED), Forget(late)]
    assert w.is_closed


def test_close_fails_waiting_tasks_in_batches():
    """The event loop can do other things in between."""
    w = World(cpus=1, config=PATIENCE)
    for number in range(2 * STOPPED_AT_ONCE + 10):
        w.scheduler.submit(w.now, TaskId(number), SPEC)
    [worker] = w.scheduler.workers
    slices = [w.scheduler.close(w.now)]
    assert not w.is_closed
    while (moment := w.scheduler.deadline()) == w.now + STOP_EVERY:
        w.clock.advance_to(moment)
        slices.append(w.scheduler.wake(moment))
        w.scheduler.check()
    told = [
        [effect.task for effect in effects if fails(effect, Failure.ABANDONED)]
        for effects in slices
    ]
    assert [len(tasks) for tasks in told] == [1 + STOPPED_AT_ONCE, STOPPED_AT_ONCE, 9]
    assert [task for tasks in told for task in tasks] == list(
        range(2 * STOPPED_AT_ONCE + 10)
    )
    assert w.left == 0
    w.scheduler.worker_gone(w.now, worker.id)
    assert w.is_closed


@pytest.mark.parametrize("state", ["runs", "idle", "starts"])
def test_close_at_once_kills_workers(state):
    w = World(cpus=1, config=PATIENCE, starts=state != "starts")
    w.play("submit a cancel_grace=60; submit waits")
    [worker] = w.scheduler.workers
    if state == "idle":
        w.play("cancel waits; finish a")
    w.close(at_once=True)
    assert w.killed == [worker.id]
    w.play("is_closed = True; left = 0")


# Events about unknown ids, and the scheduler's own checks.


def test_events_about_unknown_ids_change_nothing():
    scheduler: Scheduler = World().scheduler
    for step, *args in (
        (Scheduler.cancel, TaskId(9)),
        (Scheduler.finish, TaskId(9), WorkerId(9)),
        (Scheduler.worker_started, WorkerId(9)),
        (Scheduler.worker_gone, WorkerId(9)),
        (Scheduler.wait_for, TaskId(9), ()),
        (Scheduler.wait_for, TaskId(9), (TaskId(8),)),
        (Scheduler.task_skipped, TaskId(9), WorkerId(9)),
        (Scheduler.revoked, WorkerId(9), 1, TaskId(9)),
        (Scheduler.wake,),
    ):
        assert not step(scheduler, 0.0, *args)
        scheduler.check()


def test_events_about_an_old_task_of_a_worker_change_nothing():
    w = World().play("submit a b")
    a, b = (w.tasks[name].id for name in "ab")
    worker = w.worker_of("b")
    for step, *args in (
        (Scheduler.finish, a, worker),
        (Scheduler.task_skipped, a, worker),
        (Scheduler.revoked, worker, 1, b),
        (Scheduler.worker_started, worker),
    ):
        assert not step(w.scheduler, 0.0, *args)
        w.check()
    assert w.running == {"a", "b"}


RUNNING, ENDED = TaskState.RUNNING, TaskState.ENDED
TOLD = ("settled", "lost", "expired", "deadlocked", "disowned")


class Diary(World):
    """A world that records every effect."""

    def __init__(self, *arguments, **options):
        self.seen = []
        super().__init__(*arguments, **options)

    def _apply(self, effect):
        self.seen.append(effect)
        super()._apply(effect)


def test_short_run_shows_every_effect():
    w = Diary(
        cpus=2,
        gpus=1,
        resources={"special": 1},
        config=SchedulerConfig(cancel_grace=1.0),
    ).play("""
        submit settled; finish settled; submit lost max_retries=0; die lost
        submit expired timeout=1.0; advance 2.0; submit parent gpus=1
        submit deadlocked gpus=1 parent=parent; wait_for parent deadlocked
        submit disowned parent=parent; finish parent disowned; lease reclaimed gpus=1
        submit warned gpus=1; advance 5.0; cancel warned reclaimed; give_back reclaimed
        placement_group gang GPU:0.5; submit_in gang evicted
        submit_in gang misfit gpus=0.6; cancel gang; finish evicted
    """)
    w.took = 1e-5
    submit(w, [f"abandoned {n}" for n in range(8)])
    w.finish("abandoned 0")
    assert w.queued
    w.play("join 1; submit announced cpus=0 client=1")
    w.announce_stop(1)
    w.play("""
        submit actor cpus=0 resources=special:1 is_endless=True is_evictable=True
        rest actor; submit rival cpus=0 resources=special:1
        advance 1.0
    """)
    w.starts = False
    w.play("submit unclaimed cpus=0 environment=X:1; cancel unclaimed")
    w.play("close; run_dry")
    assert {type(effect) for effect in w.seen} == set(get_args(effects.Effect))
    for name in (*TOLD, "evicted", "misfit"):
        assert w.told[name] == name
    assert [w.told[f"abandoned {n}"] for n in range(1, 8)] == ["abandoned"] * 7


@pytest.fixture
def w() -> World:
    """A node in the middle of its life, and in order.

    "parent" is blocked by "child", "first" runs with others queued behind it,
    "other" waits.
    """
    w = World(cpus=2, took=1e-5).play("""
        submit parent cpus=1; submit child cpus=1 environment=X:1 parent=parent
        wait_for parent child; submit before first second third fourth other
        finish before; blocked = parent; running = child first parent; queued = second
        waiting = fourth other third
    """)
    w.check()
    return w


def worker_of(w, name):
    return record_of(w, name).worker


def buckets(w):
    return w.scheduler.ready.buckets()


SPOILT = {
    "waits but runs": lambda w: setattr(record_of(w, "other"), "state", RUNNING),
    "runs but ended": lambda w: setattr(record_of(w, "first"), "state", ENDED),
    "lost from the queue": lambda w: next(buckets(w)).pop(),
    "counted wrong": lambda w: setattr(next(buckets(w)), "size", 99),
    "given back": lambda w: w.scheduler.ledger.give_back(worker_of(w, "first").lease),
    "no lease": lambda w: setattr(worker_of(w, "first"), "lease", None),
    "nothing behind": lambda w: worker_of(w, "second").queue.clear(),
    "no task": lambda w: setattr(worker_of(w, "first"), "task", None),
    "has a worker": lambda w: setattr(
        record_of(w, "other"), "worker", worker_of(w, "first")
    ),
    "the last": lambda w: setattr(worker_of(w, "first"), "is_last", True),
    "not lent": lambda w: w.scheduler.ledger.resume(worker_of(w, "parent").lease),
    "lent": lambda w: w.scheduler.ledger.lend(worker_of(w, "first").lease),
    "a child that ended": lambda w: record_of(w, "parent").kin.children.update(
        {99: record_of(w, "first")}
    ),
    "no parent": lambda w: setattr(record_of(w, "child").kin, "parent", None),
    "not awaited": lambda w: setattr(record_of(w, "child").kin, "awaited_by", None),
    "orphan": lambda w: w.scheduler.tasks.pop(record_of(w, "parent").id),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_check_detects_broken_records(w, spoil):
    spoil(w)
    with pytest.raises(AssertionError):
        w.scheduler.check()


def test_check_detects_a_running_task_that_waits(w):
    parent = record_of(w, "parent")
    parent.state = RUNNING
    w.scheduler.ledger.resume(parent.worker.lease)
    with pytest.raises(AssertionError):
        w.scheduler.check()


def test_task_is_interrupted_after_its_stop_grace():
    """The grace counts from the announcement, if there was one."""
    w = World(cpus=4, config=PATIENCE)
    w.play("submit cancelled stop_grace=5.0; cancel cancelled")
    assert w.tasks["cancelled"].interrupts == 1, "nothing stops but this task"
    w.play("""
        submit patient stop_grace=5.0; submit hasty stop_grace=0.5; submit other
        announce_stop; advance 1.0; announce_stop; running has hasty other patient
        close
    """)
    told = {name: w.tasks[name].interrupts for name in ("patient", "hasty", "other")}
    assert told == {"patient": 0, "hasty": 1, "other": 1}
    w.advance(3.9)
    assert w.tasks["patient"].interrupts == 0
    w.advance(0.1)
    assert w.tasks["patient"].interrupts == 1
    assert w.worker_of("patient") not in w.killed
    w.play("advance 2.0; running =")


def test_announced_stop_of_a_program_concerns_only_its_tasks():
    w = World(cpus=4, config=PATIENCE)
    w.announce_stop(7)  # of a node that knows of no programs
    w.join(1)
    w.announce_stop(7)  # one that has left, or never asked for a task
    w.join(2)
    assert [client.id for client in w.scheduler.clients or ()] == [0, 1, 2]
    for client in (1, 2):
        w.submit(f"of {client}", client=client, stop_grace=3.0)
    w.play("submit detached client=1 is_detached=True; submit waits client=1 cpus=3")
    w.announce_stop(1)
    assert w.announced == ["of 1"]
    w.advance(1.0)
    w.announce_stop(1)
    for client in (1, 2):
        w.cancel(f"of {client}")
    assert [w.tasks[f"of {client}"].interrupts for client in (1, 2)] == [0, 1]
    w.advance(2.0)
    assert w.tasks["of 1"].interrupts == 1
