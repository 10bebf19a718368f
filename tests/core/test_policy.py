"""Who is tried again, and how often."""

import pytest

from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import UNLIMITED, Request, Shape, TaskSpec
from aiogpu.core.records import TaskRecord
from aiogpu.core.scheduler.recovery import may_retry
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World


@pytest.mark.parametrize(("retries", "granted"), [(0, 0), (1, 1), (3, 3)])
def test_retries_are_used_up(retries, granted):
    record = TaskRecord(TaskId(1), TaskSpec("f", Shape(Request()), max_retries=retries))
    assert [may_retry(record) for _ in range(5)].count(True) == granted
    assert record.retries_left == 0


def test_retries_without_end():
    record = TaskRecord(
        TaskId(1), TaskSpec("f", Shape(Request()), max_retries=UNLIMITED)
    )
    assert all(may_retry(record) for _ in range(100))
    assert record.retries_left == UNLIMITED


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_task_whose_worker_dies_is_tried_again_and_then_lost(retries):
    w = World(cpus=1)
    w.submit("a", max_retries=retries)
    for _ in range(retries):
        w.die("a")
        w.advance(1)
        assert w.running == {"a"}
    w.die("a")
    assert w.told == {"a": "lost"}
    assert w.free == {"CPU": 1.0, "GPU": 0.0}


def test_a_failure_that_is_to_be_retried_is():
    w = World()
    w.submit("a", max_retries=1)
    w.finish("a", retry=True)
    assert w.running == {"a"}
    assert not w.told
    w.finish("a", retry=True)
    assert w.told == {"a": "settled"}


def test_deaths_and_failures_use_up_the_same_retries():
    w = World()
    w.submit("a", max_retries=2)
    w.finish("a", retry=True)
    w.die("a")
    w.advance(1)
    w.die("a")
    assert w.told == {"a": "lost"}


def test_a_retry_goes_ahead_of_those_that_came_later():
    w = World(cpus=1)
    for name in "abc":
        w.submit(name)
    w.die("a")
    assert w.running == {"a"}


def test_a_second_retry_lets_others_go_first_for_a_while():
    w = World(cpus=1)
    for name in "abc":
        w.submit(name)
    w.die("a")
    w.finish("a", retry=True)
    assert w.running == {"b"}
    assert w.scheduler.deadline() == pytest.approx(0.1)
    w.advance(0.1)
    w.finish("b")
    assert w.running == {"a"}


def test_each_retry_waits_twice_as_long_as_the_one_before():
    w = World()
    w.submit("a", max_retries=-1)
    waits = []
    for _ in range(10):
        w.finish("a", retry=True)
        before = w.now
        while w.running != {"a"}:
            w.advance(w.scheduler.deadline() - w.now)
        waits.append(round(w.now - before, 6))
    assert waits == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]


def test_a_delayed_task_can_be_cancelled_expire_or_be_abandoned():
    w = World()
    for name, timeout in (("a", None), ("b", 0.05), ("c", None)):
        w.submit(name, timeout=timeout)
        w.finish(name, retry=True)
        w.finish(name, retry=True)
    assert not w.running
    record = w.scheduler.tasks[w.tasks["a"].id]
    told = str(why(w.scheduler, record, {}, w.now))
    assert told == "a has failed before, and is tried again in a while."
    assert [task.state for task in snapshot(w.scheduler, {}, w.now).tasks] == [
        "delayed"
    ] * 3
    w.cancel("a")
    assert w.forgotten == {"a"}
    w.advance(0.06)
    assert w.told == {"b": "expired"}
    w.close()
    w.advance(1)
    assert w.told == {"b": "expired", "c": "abandoned"}
    assert w.scheduler.is_closed


def test_a_retry_waits_like_everyone_where_its_place_was_taken():
    w = World(cpus=2)
    w.submit("a", num_cpus=2)
    w.submit("urgent", priority=1)
    w.die("a")
    assert w.running == {"urgent"}
    assert w.waiting == {"a"}


def test_three_workers_that_cannot_start_lose_the_task():
    w = World(starts=False)
    w.submit("a", max_retries=-1)
    for _ in range(2):
        w.die("a")
        assert w.starting == {"a"}
    w.die("a")
    assert w.told == {"a": "lost"}
    assert not w.workers


def test_a_worker_that_starts_ends_the_count_of_failed_starts():
    w = World(starts=False)
    w.submit("a")
    w.die("a")
    w.die("a")
    w.start("a")
    w.die("a")
    w.die("a")
    w.die("a")
    assert w.starting == {"a"}
    w.start("a")
    w.finish("a")
    assert w.told == {"a": "settled"}


def test_failed_starts_use_up_no_retries():
    w = World(starts=False)
    w.submit("a", max_retries=0)
    w.die("a")
    w.start("a")
    assert w.running == {"a"}


def test_a_cancelled_task_is_not_tried_again():
    w = World()
    w.submit("a", max_retries=-1)
    w.cancel("a")
    w.finish("a", retry=True)
    assert w.forgotten == {"a"}
    w.submit("b", max_retries=-1)
    w.cancel("b")
    w.die("b")
    assert w.forgotten == {"a", "b"}
    assert not w.told
