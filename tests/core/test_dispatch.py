"""How a worker comes to its next task, and when it is sent some ahead."""

import pytest

from aiogpu.core.effects import Ahead
from aiogpu.core.model.request import DEEPEST
from aiogpu.testing import World

SHORT = 1e-5


def backlog(count: int, *, took: float = SHORT, cpus: float = 1, **options) -> World:
    """A node on which t0 has run, t1 runs, and so many in all were submitted."""
    w = World(cpus=cpus, took=took)
    submit(w, count, **options)
    w.finish("t0")
    return w


def submit(w: World, count: int, **options) -> None:
    """Submit so many more: t0, t1, ..."""
    for number in range(len(w.tasks), len(w.tasks) + count):
        w.submit(f"t{number}", **options)


def names(*numbers: int) -> set[str]:
    """The tasks of these numbers."""
    return {f"t{number}" for number in numbers}


def test_a_worker_goes_on_with_the_lease_that_it_has():
    w = World(cpus=1)
    submit(w, 3)
    [lease] = w.scheduler.ledger.leases.values()
    w.finish("t0")
    [_, ahead] = w.effects
    assert ahead == Ahead(w.worker_of("t1"), [w.tasks["t1"].id])
    assert w.scheduler.workers.get(w.worker_of("t1")).lease is lease
    assert w.running == names(1)


def test_nothing_is_sent_ahead_of_a_function_that_nobody_knows():
    w = backlog(100, took=0.0)
    assert w.running == names(1)
    assert not w.queued


def test_short_tasks_are_sent_ahead():
    w = backlog(10)
    assert w.running == names(1)
    assert w.queued == names(2, 3, 4, 5)
    [ahead] = [effect for effect in w.effects if isinstance(effect, Ahead)]
    sent = ("t1", "t2", "t3", "t4", "t5")
    assert ahead.tasks == [w.tasks[name].id for name in sent]


def test_long_tasks_are_not_sent_ahead():
    assert not backlog(100, took=0.1).queued


def test_as_many_are_sent_ahead_as_are_done_in_a_moment():
    assert len(backlog(4 * DEEPEST).queued) == DEEPEST
    assert len(backlog(4 * DEEPEST, took=1e-3).queued) == 2


def test_what_is_queued_is_a_fair_part_of_what_waits():
    """Whoever ends next shall find something to do."""
    w = backlog(44, cpus=4)
    assert len(w.running) == 4
    assert len(w.queued) == (44 - 5) // 4
    w.finish("t1")
    assert len(w.queued) == 9 + (44 - 5 - 9 - 1) // 4


def test_tasks_run_in_order_whether_they_were_sent_ahead_or_not():
    w = backlog(200)
    order = []
    while w.running:
        [name] = w.running
        order.append(name)
        w.finish(name)
    assert order == [f"t{number}" for number in range(1, 200)]
    assert set(w.told.values()) == {"settled"}
    assert len(w.workers) == 1


def test_more_is_sent_when_half_of_it_is_done():
    w = backlog(4 * DEEPEST)
    lengths = []
    for number in range(1, 80):
        w.finish(f"t{number}")
        lengths.append(len(w.queued))
    assert min(lengths) == DEEPEST // 2 + 1
    assert max(lengths) == DEEPEST
    assert lengths.count(DEEPEST) == 2


def test_a_worker_that_ends_after_so_many_calls_is_sent_nothing_ahead():
    w = backlog(20, max_calls=50)
    assert w.running == names(1)
    assert not w.queued


def test_one_that_counts_its_calls_stops_what_is_sent_ahead():
    w = World(cpus=1, took=SHORT)
    submit(w, 4)
    submit(w, 1, function=1, max_calls=50)
    submit(w, 20)
    w.finish("t0")
    assert w.queued == names(2, 3)


def test_one_that_nobody_knows_stops_what_is_sent_ahead():
    w = World(cpus=1, took=SHORT)
    submit(w, 4)
    submit(w, 1, function=1)
    submit(w, 20)
    w.finish("t0")
    assert w.queued == names(2, 3)
    for name in ("t1", "t2", "t3"):
        w.finish(name)
    assert w.running == names(4)
    assert not w.queued - names(*range(5, 25))


@pytest.mark.parametrize("options", [{"priority": 1}, {"parent": "root"}])
def test_who_goes_first_is_not_kept_waiting_by_those_sent_ahead(options):
    """At most a moment's work is before it; nothing more is sent."""
    w = backlog(300)
    w.submit("root", num_cpus=0)
    before = w.queued
    w.submit("urgent", num_cpus=0.5, **options)
    while "urgent" not in w.running:
        [name] = w.running - {"root"}
        w.finish(name)
        assert w.running <= before | {"urgent", "root"}
    assert not w.queued


def test_another_shape_whose_turn_has_come_gets_the_worker():
    w = World(cpus=2, took=SHORT)
    submit(w, 1, num_cpus=2)
    w.submit("other shape")
    submit(w, 3, num_cpus=2)
    w.finish("t0")
    assert w.running == {"other shape"}
    w.finish("other shape")
    assert w.running == names(2)


def test_nobody_is_sent_ahead_where_the_last_one_was_handed_over():
    w = backlog(2)
    assert w.running == names(1)
    assert not w.queued
    assert w.scheduler.ready.by_shape == {}


def test_what_is_sent_ahead_holds_no_lease_of_its_own():
    w = World(cpus=1, gpus=1, took=SHORT)
    submit(w, 20, num_gpus=1)
    w.finish("t0")
    assert len(w.queued) > 3
    assert len(w.scheduler.ledger.leases) == 1
    w.run_dry()
    assert w.free == {"CPU": 1.0, "GPU": 1.0}


def test_a_retry_of_one_that_was_sent_ahead_goes_to_its_old_place():
    w = backlog(60)
    w.finish("t1")
    assert w.running == names(2)
    w.finish("t2", retry=True)
    assert w.waiting >= names(2)
    assert min(w.waiting, key=lambda name: int(name[1:])) == "t2"
    w.run_dry()
    assert w.tasks["t2"].runs == 2


def test_an_older_task_that_needs_what_the_lease_has_not_holds_nobody_up():
    w = World(cpus=2, gpus=1, took=1e-5)
    w.submit("training", num_gpus=1)
    w.submit("next training", num_gpus=1)
    submit(w, 20)
    w.finish("t2")
    w.finish("t3")
    assert w.queued, "the CPU's lease goes on; it would not help the one before"
    w.finish("training")
    assert "next training" in w.running


def test_an_older_task_that_the_lease_would_help_goes_first():
    w = World(cpus=2, took=1e-5)
    w.submit("a", function=5)
    w.submit("b", function=5)
    w.submit("pair", num_cpus=2)
    submit(w, 5)
    w.finish("a")
    assert w.waiting >= {"pair"}
    assert not w.queued
