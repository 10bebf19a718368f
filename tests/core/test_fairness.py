"""Programs that share a node: who gets what, in shares, in time, and in turn."""

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.queue import fair_share as clients_module
from aiogpu.core.queue.fair_share import LONGEST
from aiogpu.core.records import Memory
from aiogpu.core.scheduler.placement import SLICE
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World
from tests.core.contest import Contender, Contest, jain


def play(contenders, seconds, **node) -> list[float]:
    """What each has had, by weight, when all have wanted more all the time."""
    contest = Contest(contenders, **node)
    for each in contenders:
        contest.feed(each)
    contest.play(seconds)
    contest.scheduler.check()
    return [each.had / each.weight for each in contenders]


@pytest.mark.parametrize("cpus", [1, 3, 4])
def test_four_equal_programs_have_as_much_each(cpus):
    had = play([Contender(number) for number in range(1, 5)], 60, cpus=cpus)
    assert jain(had) > 0.99
    assert sum(had) > 0.98 * 60 * cpus


@pytest.mark.parametrize("cpus", [1, 4])
def test_programs_have_as_much_as_they_weigh(cpus):
    had = play([Contender(n, weight=n) for n in (1, 2, 3)], 60 * 6 / cpus, cpus=cpus)
    assert max(had) < 1.05 * min(had)


@pytest.mark.parametrize("cpus", [1, 4])
def test_long_tasks_are_worth_no_more_than_short_ones(cpus):
    long, short = Contender(1, seconds=3), Contender(2, seconds=0.1)
    assert jain(play([long, short], 60, cpus=cpus)) > 0.99
    assert short.ran > 25 * long.ran


def test_tasks_of_a_moment_are_as_fair():
    """They are sent ahead; a slice of them is one turn."""
    programs = [Contender(1, seconds=1e-3, flood=50), Contender(2, seconds=0.05)]
    assert jain(play(programs, 1, cpus=2)) > 0.96


def test_wide_tasks_are_worth_no_more_than_narrow_ones():
    wide = Contender(1, gpus=4, seconds=1)
    narrow = Contender(2, gpus=0.25, seconds=0.5)
    assert jain(play([wide, narrow], 60, cpus=16, gpus=4)) > 0.98


def test_one_that_floods_slows_only_itself():
    flood = Contender(1, seconds=0.5, flood=1_000)
    modest = Contender(2, seconds=0.5, flood=1)
    play([flood, modest], 10, cpus=2)
    # One at a time is all that it wants.
    assert modest.ran > 0.8 * flood.ran / 2
    assert modest.longest < 1.2


def test_the_others_have_what_one_does_not_want():
    programs = [Contender(1), Contender(2), Contender(3, flood=0)]
    had = play(programs, 30, cpus=2)
    assert sum(had) > 0.95 * 60


@pytest.fixture
def w() -> World:
    """One CPU, two programs."""
    w = World(cpus=1)
    w.join(1)
    w.join(2)
    return w


def order(w: World, seconds: float = 1.0) -> list[str]:
    """End what runs, one after the other; the order in which they ran."""
    names = []
    while w.running:
        [name] = w.running
        names.append(name)
        w.advance(seconds)
        w.finish(name)
    return names


def test_programs_take_turns_and_each_has_its_own_order(w):
    for name in ("a1", "a2", "a3", "b1", "b2", "b3"):
        w.submit(name, client=1 if name[0] == "a" else 2)
    assert order(w) == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_a_slice_is_gone_on_with(w):
    for name in ("a1", "a2", "a3", "b1", "b2", "b3"):
        w.submit(name, client=1 if name[0] == "a" else 2)
    assert order(w, SLICE / 2) == ["a1", "a2", "b1", "b2", "a3", "b3"]


def test_a_priority_is_one_for_all_programs(w):
    for number in range(3):
        w.submit(f"a{number}", client=1)
    w.submit("b", client=2, priority=1)
    w.submit("c", client=1, priority=2)
    assert order(w) == ["a0", "c", "b", "a1", "a2"]


def test_children_are_no_way_past_others(w):
    """They go first in their own program alone."""
    w.submit("parent", client=1)
    w.submit("b", client=2)
    w.submit("a", client=1)
    for number in range(3):
        w.submit(f"child{number}", parent="parent")
    record = w.scheduler.tasks[w.tasks["child0"].id]
    assert record.client == 1
    w.advance(1)
    w.wait_for("parent", "child0", "child1", "child2")
    for child in ("child0", "child1", "child2"):
        assert child in w.running | w.waiting
    seen = []
    while running := w.running - {"parent"}:
        [name] = running
        seen.append(name)
        w.advance(1)
        w.finish(name)
    assert seen == ["b", "child0", "child1", "child2"]


def test_a_retry_keeps_its_place(w):
    for name in ("a1", "b1", "a2", "b2"):
        w.submit(name, client=1 if name[0] == "a" else 2)
    w.advance(1)
    w.finish("a1", retry=True)
    assert order(w) == ["b1", "a1", "b2", "a2"]


def test_who_comes_later_is_owed_nothing_for_the_time_before(w):
    for number in range(20):
        w.submit(f"a{number:02}", client=1)
    for number in range(10):
        w.advance(1)
        w.finish(f"a{number:02}")
    for number in range(3):
        w.submit(f"b{number}", client=2)
    ran = order(w)
    assert ran[:6] == ["a10", "b0", "a11", "b1", "a12", "b2"]


def test_who_holds_less_goes_first_though_it_has_had_more():
    w = World(cpus=2)
    w.join(1)
    w.join(2)
    w.submit("b0", client=2)
    w.advance(50)
    w.finish("b0")
    for number in range(4):
        w.submit(f"a{number}", client=1)
    w.submit("b1", client=2)
    w.submit("b2", client=2)
    assert w.running == {"a0", "a1"}
    w.advance(1)
    w.finish("a0")
    assert w.running == {"a1", "b1"}


def test_what_does_not_fit_is_not_held_against_what_stands_behind_it():
    """A program that has all CPUs has no GPU yet, and waits for both."""
    w = World(cpus=2, gpus=2)
    w.join(1)
    w.join(2)
    w.submit("cpus", num_cpus=2, client=1)
    w.submit("gpu", num_cpus=0, num_gpus=1, client=2)
    w.submit("last", num_cpus=0, num_gpus=0.6, client=2)
    w.submit("stuck", num_cpus=1, num_gpus=0.5, client=1)
    w.submit("mine", num_cpus=0, num_gpus=0.7, client=1)
    w.submit("theirs", num_cpus=0, num_gpus=0.7, client=2)
    w.advance(0.5)
    w.finish("last")
    assert w.running == {"cpus", "gpu", "mine"}
    assert w.waiting == {"stuck", "theirs"}


def test_a_program_whose_first_task_fits_has_its_turn_by_that():
    w = World(cpus=2, gpus=2)
    w.join(1)
    w.join(2)
    w.submit("all", num_cpus=0, num_gpus=2, client=2)
    w.submit("mine", num_cpus=0, num_gpus=1, client=1)
    w.submit("mine too", num_cpus=0, num_gpus=0.5, client=1)
    w.submit("theirs", num_cpus=0, num_gpus=1, client=2)
    w.finish("all")
    assert w.running == {"mine", "theirs"}
    w.scheduler.check()


def test_a_wide_task_is_not_starved_by_another_program():
    w = World(cpus=16, gpus=2, config=SchedulerConfig(reserve_after=1.0))
    w.join(1)
    w.join(2)
    for number in range(40):
        w.submit(f"s{number:02}", num_gpus=0.5, client=1)
    w.submit("wide", num_gpus=2, client=2)
    ended = 0
    while "wide" in w.waiting:
        w.advance(0.5)
        w.finish(min(w.running))
        ended += 1
        assert ended < 12
    assert w.running == {"wide"}


def test_what_is_kept_for_one_waits_until_it_is_its_turn():
    """Else a program of wide tasks would have most of a node."""
    w = World(cpus=16, gpus=1, config=SchedulerConfig(reserve_after=0.0))
    w.join(1)
    w.join(2)
    w.submit("wide0", num_gpus=1, client=1)
    w.submit("s", num_gpus=0.5, client=2)
    w.submit("s1", num_gpus=0.5, client=2)
    w.submit("s2", num_gpus=0.5, client=2)
    w.submit("s3", num_gpus=0.5, client=2)
    w.submit("s4", num_gpus=0.5, client=2)
    w.submit("wide1", num_gpus=1, client=1)
    w.advance(10)
    w.finish("wide0")
    assert w.running == {"s", "s1"}
    assert w.scheduler.reservation.record.spec.name == "s2"
    w.advance(1)
    w.finish("s")
    assert w.running == {"s1", "s2"}
    w.advance(12)
    w.finish("s1")
    assert w.running == {"s2", "s3"}
    w.finish("s2")
    kept = w.scheduler.reservation
    assert kept is not None
    assert kept.record.spec.name == "wide1"
    assert w.running == {"s3"}
    w.finish("s3")
    assert w.running == {"wide1"}


def test_it_waits_no_longer_than_a_task_counts():
    """Whose tag is lower may be held up by something else for ever."""
    w = World(cpus=16, gpus=2, config=SchedulerConfig(reserve_after=0.0))
    for number in (1, 2, 3):
        w.join(number)
    w.submit("old", num_gpus=1, client=1)
    w.advance(5)
    w.finish("old")
    w.submit("life", num_gpus=1, is_endless=True, client=3)
    w.submit("never", num_gpus=2, client=2)
    w.submit("half", num_gpus=0.5, client=3)
    w.submit("one", num_gpus=1, client=1)
    w.submit("half2", num_gpus=0.5, client=3)
    assert w.running == {"life", "half", "half2"}
    w.submit("x", num_cpus=0)
    w.finish("x")
    w.advance(LONGEST + 1)
    w.finish("half")
    kept = w.scheduler.reservation
    assert kept is not None
    assert kept.record.spec.name == "one"


def test_a_higher_priority_may_take_what_is_kept_for_another_program():
    w = World(cpus=16, gpus=1, config=SchedulerConfig(reserve_after=0.0))
    w.join(1)
    w.join(2)
    w.submit("half", num_gpus=0.5, client=1)
    w.submit("other", num_gpus=0.5, client=1)
    w.submit("wide", num_gpus=1, client=2)
    w.submit("low", num_gpus=0.5, client=1)
    w.advance(1)
    w.finish("half")
    assert w.running == {"other"}
    w.submit("urgent", num_gpus=0.5, client=1, priority=1)
    assert w.running == {"other", "urgent"}
    w.submit("urgent wide", num_gpus=1, client=1, priority=1)
    w.finish("other")
    kept = w.scheduler.reservation
    assert kept is not None
    assert kept.record.spec.name == "urgent wide"
    w.cancel("urgent wide")
    w.finish("urgent")
    assert w.running == {"wide"}


def test_who_has_waited_longest_gives_way_to_nobody():
    """Then what it has had decides, though it holds more than others."""
    w = World(cpus=4, gpus=2)
    w.join(1)
    w.join(2)
    w.submit("life", num_cpus=0, num_gpus=1, client=1)
    w.submit("b0", num_gpus=0.5, client=2)
    w.submit("b1", num_gpus=0.5, client=2)
    w.submit("a", num_gpus=0.5, client=1)
    for number in range(2, 200):
        w.submit(f"b{number}", num_gpus=0.5, client=2)
    began = 0
    while "a" in w.waiting:
        w.advance(1)
        w.finish(f"b{began}")
        began += 1
        assert began < 2 * LONGEST + 5
    assert began >= LONGEST


def test_what_runs_when_a_second_program_joins_counts():
    w = World(cpus=2)
    w.submit("a0")
    w.submit("lent")
    w.submit("child", parent="lent")
    w.wait_for("lent", "child")
    w.submit("a1")
    w.join(7)
    w.submit("b0", client=7)
    own, other = sorted(w.scheduler.clients, key=lambda one: one.id)
    assert (own.held, own.unfinished) == ({"CPU": 20_000}, 4)
    assert (other.held, other.unfinished) == ({}, 1)
    w.advance(1)
    w.finish("child")
    assert w.running == {"a0", "lent"}
    w.finish("a0")
    assert w.running == {"lent", "b0"}


def test_what_was_sent_ahead_before_any_joined_is_on_its_programs_account():
    w = World(cpus=1, took=1e-6)
    for number in range(12):
        w.submit(f"t{number:02}")
    w.finish("t00")
    assert w.queued
    w.join(1)
    for _ in range(12):
        if w.running:
            w.finish(min(w.running))
    assert not w.tasks.keys() - w.told.keys()


def test_a_task_sent_ahead_and_skipped_leaves_its_lease_to_the_next():
    w = World(cpus=1, took=1e-6, revokes=False)
    for number in range(12):
        w.submit(f"t{number:02}")
    w.finish("t00")
    w.join(1)
    w.cancel("t02")
    w.skip("t01")
    w.revoked(1)
    w.run_dry()
    assert not w.scheduler.tasks


def test_a_place_among_workers_goes_round_too():
    w = World(cpus=4)
    w.join(1)
    w.join(2)
    w.scheduler.worker_limit.bound(1)
    for name in ("a1", "a2", "b1", "b2"):
        w.submit(name, client=1 if name[0] == "a" else 2, environment={"P": name[0]})
    assert order(w) == ["a1", "b1", "a2", "b2"]


def test_one_that_is_to_run_alone_holds_up_all_programs():
    w = World(cpus=4)
    w.join(1)
    w.join(2)
    w.submit("greedy", client=1)
    w.submit("b1", client=2)
    w.tell(Scheduler.kill_for_memory, w.worker_of("greedy"), Memory.HOST)
    w.submit("b2", client=2)
    w.submit("b3", client=2)
    assert {"b2", "b3"} <= w.waiting
    w.finish("b1")
    assert w.running == {"greedy"}
    w.finish("greedy")
    assert w.running == {"b2", "b3"}


def test_environments_of_one_program_are_in_its_own_order():
    w = World(cpus=1)
    w.join(1)
    w.join(2)
    w.submit("first", client=2)
    for number, name in enumerate("abcde"):
        w.submit(name, client=1, environment={"X": str(number % 2)})
    w.cancel("c")
    w.cancel("d")
    w.submit("f", client=1, priority=1)
    assert order(w, SLICE / 8) == ["first", "f", "a", "b", "e"]


def test_a_priority_of_another_program_is_heeded_when_a_slice_ends(w):
    for number in range(9):
        w.submit(f"a{number}", client=1)
    w.submit("b", client=2, priority=1)
    ran = order(w, SLICE * 0.4)
    assert ran[:4] == ["a0", "a1", "a2", "b"]


def test_nobody_gives_way_to_one_that_is_not_helped():
    w = World(cpus=2, gpus=1)
    w.join(1)
    w.join(2)
    w.submit("life", num_gpus=1, is_endless=True)
    for number in range(3):
        w.submit(f"a{number}", client=1)
    w.submit("b", num_gpus=1, client=2)
    for number in range(3):
        assert w.running == {"life", f"a{number}"}
        w.advance(1)
        w.finish(f"a{number}")
    assert w.waiting == {"b"}


def test_nothing_is_kept_for_one_that_waits_for_what_is_held_for_life():
    w = World(cpus=4, gpus=2, config=SchedulerConfig(reserve_after=0.0))
    w.join(1)
    w.join(2)
    w.submit("life", num_gpus=1, is_endless=True)
    w.submit("half", num_gpus=0.5, client=1)
    w.submit("wide", num_gpus=1, client=2)
    w.advance(1)
    w.submit("x", num_cpus=0)
    w.finish("x")
    kept = w.scheduler.reservation
    assert kept is not None
    w.submit("never", num_gpus=2, client=1, priority=1)
    w.submit("y", num_cpus=0)
    w.finish("y")
    assert w.scheduler.reservation.record is kept.record


def test_a_device_that_settles_counts_until_it_is_free():
    w = World(cpus=4, gpus=1)
    w.join(1)
    w.settles = True
    w.submit("a", num_gpus=1, max_calls=1, client=1)
    w.finish("a")
    [_, client] = w.scheduler.clients
    assert client.held == {"GPU": 10_000}
    w.join(2)
    w.tell(Scheduler.devices_free, w.unsettled[0])
    assert client.held == {}


def test_what_settles_when_programs_join_is_nobodys():
    w = World(cpus=4, gpus=1)
    w.settles = True
    w.submit("a", num_gpus=1, max_calls=1)
    w.finish("a")
    w.join(1)
    assert all(not client.held for client in w.scheduler.clients)
    w.tell(Scheduler.devices_free, w.unsettled[0])
    w.submit("b", num_gpus=1, client=1)
    assert w.running == {"b"}


def test_requests_without_number_are_not_all_remembered(monkeypatch):
    monkeypatch.setattr(clients_module, "KNOWN", 3)
    w = World(cpus=1)
    w.join(1)
    for number in range(1, 9):
        w.submit(f"t{number}", num_cpus=number / 10, client=1)
    assert len(w.scheduler.clients._portions) <= 3
    w.run_dry()
    assert not w.scheduler.tasks
