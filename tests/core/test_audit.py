"""`check()` notices whatever is broken: each of these is a bug that it would find."""

import pytest

from aiogpu.core.records import TaskState
from aiogpu.testing import World


@pytest.fixture
def w() -> World:
    """A node in the middle of its life, and in order.

    "parent" is blocked by "child", "first" runs with others queued behind it,
    "other" waits.
    """
    w = World(cpus=2, took=1e-5)
    w.submit("parent", num_cpus=1)
    w.submit("child", num_cpus=1, environment={"X": "1"}, parent="parent")
    w.wait_for("parent", "child")
    for name in ("before", "first", "second", "third", "fourth", "other"):
        w.submit(name)
    w.finish("before")
    assert w.blocked == {"parent"}
    assert w.running == {"parent", "child", "first"}
    assert w.queued == {"second"}
    assert w.waiting == {"third", "fourth", "other"}
    w.check()
    return w


def record_of(w: World, name: str):
    """What the scheduler knows of a task."""
    return w.scheduler.tasks[w.tasks[name].id]


def mark_running(w):
    record_of(w, "other").state = TaskState.RUNNING


def mark_ended(w):
    record_of(w, "first").state = TaskState.ENDED


def lose_from_queue(w):
    bucket = next(w.scheduler.ready.buckets())
    bucket.pop()


def count_wrong(w):
    next(w.scheduler.ready.buckets()).size += 1


def give_back_too_early(w):
    w.scheduler.ledger.give_back(record_of(w, "first").worker.lease)


def lose_lease(w):
    record_of(w, "first").worker.lease = None


def lose_place_behind(w):
    record_of(w, "second").worker.queue.clear()


def lose_task(w):
    record_of(w, "first").worker.task = None


def give_worker_to_one_that_waits(w):
    record_of(w, "other").worker = record_of(w, "first").worker


def run_last_with_others_behind(w):
    record_of(w, "first").worker.is_last = True


def forget_to_lend(w):
    w.scheduler.ledger.resume(record_of(w, "parent").worker.lease)


def lend_of_one_that_runs(w):
    w.scheduler.ledger.lend(record_of(w, "first").worker.lease)


def keep_child_that_ended(w):
    record_of(w, "parent").kin.children[99] = record_of(w, "first")


def forget_parent(w):
    record_of(w, "child").kin.parent = None


def forget_who_waits(w):
    record_of(w, "child").kin.awaited_by = None


def have_parent_that_ended(w):
    kin = record_of(w, "child").kin
    del w.scheduler.tasks[kin.parent.id]


def wait_while_running(w):
    record_of(w, "parent").state = TaskState.RUNNING
    w.scheduler.ledger.resume(record_of(w, "parent").worker.lease)


@pytest.mark.parametrize(
    "spoil",
    [
        mark_running,
        mark_ended,
        lose_from_queue,
        count_wrong,
        give_back_too_early,
        lose_lease,
        lose_place_behind,
        lose_task,
        give_worker_to_one_that_waits,
        run_last_with_others_behind,
        forget_to_lend,
        lend_of_one_that_runs,
        keep_child_that_ended,
        forget_parent,
        forget_who_waits,
        have_parent_that_ended,
        wait_while_running,
    ],
)
def test_what_is_broken_is_noticed(w, spoil):
    spoil(w)
    with pytest.raises(AssertionError):
        w.scheduler.check()
