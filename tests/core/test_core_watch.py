"""Workers that come no further: what they were sent is taken back, by exact rules."""

import pytest

from aiogpu.core.effects import Forget, Interrupt, Kill, Revoke, Settle
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.scheduler.revocation import count_begun
from aiogpu.testing import World

SHORT = 1e-5
LONG = 1 / 64
PATIENCE = SchedulerConfig(
    long=LONG, unheard=1.0, cancel_grace=2.0, interrupt_every=0.5
)


def queue_behind(count: int = 10, **options) -> World:
    """One worker runs t1, with t2, t3, ... queued behind it."""
    w = World(cpus=1, took=SHORT, config=PATIENCE, **options)
    for number in range(count):
        w.submit(f"t{number}", max_retries=0)
    w.finish("t0")
    assert w.running == {"t1"}
    assert "t2" in w.queued
    return w


def kinds(w: World) -> list[type]:
    """What was asked for by the last step."""
    return [type(effect) for effect in w.effects]


def test_what_stands_behind_a_long_task_is_taken_back():
    w = queue_behind()
    w.advance(LONG / 2)
    assert w.queued
    w.advance(LONG / 2)
    assert not w.queued
    assert w.running == {"t1"}
    assert w.waiting == {f"t{number}" for number in range(2, 10)}
    w.finish("t1")
    assert w.running == {"t2"}


def test_what_was_taken_back_runs_where_there_is_room():
    w = World(cpus=2, took=SHORT, config=PATIENCE)
    for name in ("t0", "t1", "t2", "t3", "t4", "t5"):
        w.submit(name)
    w.finish("t0")
    w.finish("t1")
    assert w.running == {"t2", "t4"}
    assert w.queued == {"t3"}
    for name in ("t4", "t5"):
        w.finish(name)
    assert w.free["CPU"] == 1.0
    w.advance(LONG)
    assert w.running == {"t2", "t3"}


def test_nothing_is_queued_behind_a_function_that_was_found_long():
    w = queue_behind(100)
    w.advance(LONG)
    assert w.tasks["t1"].spec.pace.depth == 0
    w.took = 1.0
    w.finish("t1")
    assert w.running == {"t2"}
    assert not w.queued
    w.took = SHORT
    for number in range(2, 30):
        w.finish(f"t{number}")
    assert w.queued


def test_a_worker_that_comes_further_keeps_its_queue():
    w = queue_behind(100)
    for number in range(1, 40):
        w.advance(0.75 * LONG)
        w.finish(f"t{number}")
        assert w.queued
        assert Revoke not in kinds(w)


def test_a_worker_without_a_queue_is_looked_at_now_and_then():
    w = queue_behind(4)
    for number in range(1, 4):
        w.finish(f"t{number}")
    w.submit("long")
    w.advance(0.5)
    assert not w.queued
    w.advance(60)
    assert w.running == {"long"}
    assert w.scheduler.deadline() is None


def test_a_worker_that_has_become_idle_is_not_looked_at():
    w = queue_behind(4)
    for number in range(1, 4):
        w.finish(f"t{number}")
    w.advance(60)
    assert w.effects == []
    assert w.scheduler.deadline() is None


def test_what_stands_behind_a_cancelled_task_is_taken_back():
    w = queue_behind(revokes=False)
    w.cancel("t1")
    assert kinds(w) == [Interrupt, Revoke]
    w.revoked(1)
    assert not w.queued
    w.finish("t1")
    assert w.running == {"t2"}


def test_a_task_that_is_killed_takes_nobody_along():
    """The kill waits until what is queued has been taken back."""
    w = queue_behind(revokes=False)
    w.cancel("t1")
    w.advance(2.5)
    assert w.killed == []
    w.revoked(1)
    w.advance(0.1)
    assert w.killed == [1]
    assert w.running == {"t2"}
    w.run_dry()
    assert {w.told[f"t{number}"] for number in range(2, 10)} == {"settled"}


def test_what_stands_behind_one_that_waits_is_taken_back():
    """[B12]"""
    w = queue_behind()
    w.submit("child", parent="t1")
    w.wait_for("t1", "child")
    assert not w.queued
    assert w.blocked == {"t1"}
    assert w.running == {"t1", "child"}


def test_a_crash_blames_the_task_that_ran():
    w = queue_behind()
    w.die("t1")
    assert w.told == {"t0": "settled", "t1": "lost"}
    w.run_dry()
    others = [f"t{number}" for number in range(2, 10)]
    assert [w.told[name] for name in others] == ["settled"] * 8
    assert [w.tasks[name].runs for name in others] == [1] * 8


def test_a_crash_before_the_worker_has_begun_costs_the_first_in_line_a_start():
    """Nobody's code ran, and still a task that kills its worker early is given up."""
    w = queue_behind()
    w.stop(1)
    w.finish("t1")
    assert w.running == set()
    w.die(1)
    assert w.running == {"t2"}
    w.run_dry()
    assert w.told["t2"] == "settled"


def test_a_crash_blames_all_whose_answers_are_lost():
    w = queue_behind()
    t2 = w.tasks["t2"].id
    [lost, *_] = w.scheduler.worker_gone(w.now, w.worker_of("t1"), t2)[:1]
    assert lost.task == w.tasks["t1"].id
    assert t2 not in w.scheduler.tasks
    assert w.tasks["t3"].id in w.scheduler.tasks
    w.scheduler.check()


def test_a_cancelled_task_in_the_queue_of_a_dead_worker_is_forgotten():
    w = queue_behind(revokes=False)
    w.cancel("t3")
    w.die(1)
    assert "t3" in w.forgotten
    assert w.running == {"t2"}


def test_a_queued_task_is_cancelled_before_it_has_begun():
    w = queue_behind(revokes=False)
    w.cancel("t3")
    assert kinds(w) == [Revoke]
    assert "t3" not in w.forgotten
    w.revoked(1)
    assert Forget(w.tasks["t3"].id) in w.effects
    w.run_dry()
    assert w.tasks["t3"].runs == 0


def test_a_queued_task_is_cancelled_as_it_begins():
    w = queue_behind(revokes=False)
    w.finish("t1")
    assert w.running == {"t2"}
    w.cancel("t3")
    w.workers[1].void.popleft()
    w.workers[1].sent.append(w.tasks["t3"])
    w.finish("t2")
    assert w.running == {"t3"}
    assert Interrupt not in kinds(w)
    w.revoked(1)
    assert kinds(w)[0] is Interrupt
    w.finish("t3")
    assert "t3" in w.forgotten
    assert "t3" not in w.told
    w.run_dry()
    assert [w.told[f"t{number}"] for number in range(4, 10)] == ["settled"] * 6


def test_nothing_is_sent_to_a_worker_that_is_being_taken_back():
    """Else it would be taken for part of what is back, and run twice."""
    w = queue_behind(revokes=False)
    w.finish("t1")
    for number in range(10, 50):
        w.submit(f"t{number}")
    w.cancel("t5")
    w.workers[1].sent.append(w.workers[1].void.popleft())
    w.finish("t2")
    assert w.running == {"t3"}
    assert w.effects == [Settle(w.tasks["t2"].id)]
    assert "t6" in w.waiting
    w.revoked(1)
    assert w.waiting >= {"t4", "t6"}
    assert w.forgotten == {"t5"}


def test_two_that_are_cancelled_are_taken_back_by_one_revocation():
    w = queue_behind(revokes=False)
    w.cancel("t3")
    w.cancel("t2")
    assert w.effects == []
    w.revoked(1)
    assert w.forgotten == {"t2", "t3"}
    assert w.running == {"t1"}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_turn_that_comes_as_it_is_taken_back_is_skipped(is_late):
    """The worker says so before it is known what was taken back, or after."""
    w = queue_behind(revokes=False)
    w.advance(LONG)
    assert [type(effect) for effect in w.effects] == [Revoke]
    w.skip("t1", is_late=is_late)
    w.run_dry()
    assert [w.told[f"t{number}"] for number in range(10)] == ["settled"] * 10
    assert [w.tasks[f"t{number}"].runs for number in range(10)] == [1] * 10


def test_a_skipped_task_that_was_cancelled_is_forgotten():
    w = queue_behind(revokes=False)
    w.cancel("t2")
    w.skip("t1")
    assert "t2" in w.forgotten
    w.run_dry()
    assert w.tasks["t2"].runs == 0


def test_a_worker_that_has_skipped_all_has_time_for_others():
    w = queue_behind(4, revokes=False)
    w.cancel("t3")
    w.cancel("t2")
    w.skip("t1")
    assert w.forgotten == {"t2", "t3"}
    assert w.scheduler.workers.idle == 1
    w.submit("next")
    assert w.worker_of("next") == 1


def test_the_next_in_line_may_be_cancelled_as_well():
    w = queue_behind(revokes=False)
    w.cancel("t2")
    w.cancel("t3")
    w.skip("t1")
    assert w.forgotten == {"t2"}
    w.revoked(1)
    assert w.forgotten == {"t2", "t3"}
    assert w.running == {"t4"}
    w.run_dry()
    assert w.tasks["t3"].runs == 0


def test_a_skipped_task_is_known_wherever_it_stands():
    w = queue_behind()
    t3 = w.tasks["t3"].id
    w.scheduler.task_skipped(w.now, t3, w.worker_of("t1"))
    w.scheduler.check()
    assert "t3" in w.waiting
    assert "t2" in w.queued


def test_an_answer_to_an_earlier_revocation_changes_nothing():
    w = queue_behind(revokes=False)
    w.cancel("t2")
    before = w.queued
    assert not w.scheduler.revoked(w.now, w.worker_of("t1"), 7, None)
    assert w.queued == before
    w.revoked(1)
    assert not w.queued


def test_a_stopped_worker_is_given_up_and_its_task_runs_elsewhere_once():
    """As under SIGSTOP: it was sent a task and does not begin it."""
    w = World(cpus=1, config=PATIENCE)
    w.submit("a")
    w.finish("a")
    w.stop(1)
    w.submit("b", max_retries=0)
    assert w.running == set()
    w.advance(0.75)
    assert w.killed == []
    w.advance(1.25)
    assert w.killed == [1]
    assert w.running == {"b"}
    w.finish("b")
    assert w.told == {"a": "settled", "b": "settled"}
    assert w.tasks["b"].runs == 1


def test_a_worker_stopped_between_two_tasks_loses_all_that_it_was_sent():
    w = queue_behind()
    w.stop(1)
    w.finish("t1")
    w.advance(2.0)
    assert w.killed == [1]
    assert w.running == {"t2"}
    w.run_dry()
    assert [w.tasks[f"t{number}"].runs for number in range(10)] == [1] * 10


def test_a_worker_that_runs_for_long_is_not_given_up():
    w = World(cpus=1, config=PATIENCE)
    w.submit("a")
    w.advance(3600)
    assert w.killed == []
    assert w.running == {"a"}


def test_a_worker_that_has_just_been_sent_its_task_may_still_begin_it():
    """What it has not begun is taken back for another reason; it is not given up."""
    w = queue_behind(revokes=False)
    w.finish("t1")
    w.stop(1)
    w.finish("t2")
    w.cancel("t4")
    w.revoked(1)
    assert Kill not in kinds(w)
    assert w.killed == []
    w.workers[1].is_stopped = False
    w.workers[1].begin()
    assert w.running == {"t3"}
    w.run_dry()
    assert w.tasks["t4"].runs == 0
    assert [w.tasks[f"t{n}"].runs for n in range(10) if n != 4] == [1] * 9


def test_an_answer_that_comes_when_all_is_over_is_not_taken_for_the_next():
    """What was sent since is on the worker, and stays there."""
    w = queue_behind(4, revokes=False)
    w.cancel("t3")
    w.cancel("t2")
    w.skip("t1")
    for number in range(4, 14):
        w.submit(f"t{number}")
    w.finish("t4")
    before = w.queued
    assert before
    w.revoked(1)
    assert w.queued == before
    w.run_dry()
    assert [w.tasks[f"t{number}"].runs for number in range(4, 14)] == [1] * 10


def test_what_a_worker_has_begun_is_counted_up_to_the_last():
    w = queue_behind()
    worker = w.scheduler.workers.get(w.worker_of("t1"))
    inflight = [worker.task, *worker.queue]
    assert count_begun(inflight, None) == 0
    assert count_begun(inflight, inflight[0].id) == 1
    assert count_begun(inflight, inflight[2].id) == 3
    assert count_begun(inflight, 999) == 0
    assert count_begun([], inflight[0].id) == 0
