"""Who is tried again, and how often."""

import pytest

from aiogpu.core.ids import TaskId
from aiogpu.core.policy import may_retry
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources import Request
from aiogpu.core.specs import UNLIMITED, Shape, TaskSpec
from aiogpu.testing import World


@pytest.mark.parametrize(("retries", "granted"), [(0, 0), (1, 1), (3, 3)])
def test_retries_are_used_up(retries, granted):
    record = TaskRecord(TaskId(1), TaskSpec("f", Shape(Request())), retries)
    assert [may_retry(record) for _ in range(5)].count(True) == granted
    assert record.retries_left == 0


def test_retries_without_end():
    record = TaskRecord(TaskId(1), TaskSpec("f", Shape(Request())), UNLIMITED)
    assert all(may_retry(record) for _ in range(100))
    assert record.retries_left == UNLIMITED


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_task_whose_worker_dies_is_tried_again_and_then_lost(retries):
    w = World(cpus=1)
    w.submit("a", max_retries=retries)
    for _ in range(retries):
        w.die("a")
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
    w.die("a")
    assert w.told == {"a": "lost"}


def test_a_retry_goes_ahead_of_those_that_came_later():
    w = World(cpus=1)
    for name in "abc":
        w.submit(name)
    w.die("a")
    assert w.running == {"a"}
    w.finish("a", retry=True)
    assert w.running == {"a"}


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
