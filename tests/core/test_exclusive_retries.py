"""A task that ran out of memory beside others is tried once more, alone."""

from aiogpu.core.records import Memory
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World


def starved(w, name):
    w.tell(Scheduler.kill_for_memory, w.worker_of(name), Memory.HOST)


def test_it_waits_for_the_others_and_they_for_it():
    w = World(cpus=4)
    for name in "abc":
        w.submit(name)
    starved(w, "a")
    assert w.running == {"b", "c"}
    w.submit("d")
    assert w.waiting == {"d"}
    w.finish("b")
    assert w.running == {"c"}
    w.finish("c")
    assert w.running == {"a"}
    assert w.waiting == {"d"}
    w.finish("a")
    assert w.running == {"d"}
    assert w.told == {"a": "settled", "b": "settled", "c": "settled"}


def test_the_second_time_it_is_lost():
    w = World()
    w.submit("a", max_retries=-1)
    starved(w, "a")
    assert w.running == {"a"}, "nobody else was there"
    starved(w, "a")
    assert w.told == {"a": "lost"}
    w.submit("b")
    assert w.running == {"b"}


def test_what_must_not_run_twice_does_not():
    w = World()
    w.submit("a", max_retries=0)
    starved(w, "a")
    assert w.told == {"a": "lost"}


def test_several_go_one_by_one():
    w = World(cpus=4)
    for name in "abc":
        w.submit(name)
    starved(w, "a")
    starved(w, "b")
    w.finish("c")
    assert w.running == {"a"}
    w.finish("a")
    assert w.running == {"b"}
    w.finish("b")
    assert not w.scheduler.exclusive.is_wanted


def test_others_are_held_up_for_a_limited_time():
    w = World(cpus=4)
    for name in ("a", "long"):
        w.submit(name)
    starved(w, "a")
    w.submit("later")
    w.advance(29)
    assert w.running == {"long"}
    w.advance(2)
    assert w.running == {"long", "a", "later"}


def test_one_gives_up_while_another_still_waits_for_its_turn():
    w = World(cpus=4)
    for name in ("a", "b", "long"):
        w.submit(name)
    starved(w, "a")
    w.advance(20)
    starved(w, "b")
    w.advance(11)
    assert w.running == {"long"}
    assert w.waiting == {"a"}, "the other one's turn comes first"
    w.finish("long")
    assert w.running == {"b"}
    w.finish("b")
    assert w.running == {"a"}


def test_children_of_those_that_run_are_not_held_up():
    w = World(cpus=2)
    w.submit("parent")
    w.submit("a")
    starved(w, "a")
    w.submit("child", parent="parent")
    assert w.running == {"parent", "child"}
    w.wait_for("parent", "child")
    w.finish("child")
    w.finish("parent")
    assert w.running == {"a"}
    w.submit("own", parent="a")
    assert w.running == {"a", "own"}


def test_whoever_waits_for_it_does_not_keep_it_waiting():
    w = World(cpus=2)
    w.submit("parent")
    w.submit("a", parent="parent")
    w.wait_for("parent", "a")
    starved(w, "a")
    assert w.running == {"a", "parent"}
    assert w.blocked == {"parent"}


def test_what_is_held_without_end_is_no_company():
    w = World(cpus=2)
    w.submit("actor", is_endless=True)
    w.submit("a")
    starved(w, "a")
    assert w.running == {"actor", "a"}


def test_it_can_be_cancelled_while_it_waits():
    w = World(cpus=2)
    w.submit("a")
    w.submit("b")
    starved(w, "a")
    w.cancel("a")
    w.submit("c")
    assert w.running == {"b", "c"}


def test_it_can_be_cancelled_while_it_runs_alone():
    w = World(cpus=2)
    w.submit("a")
    starved(w, "a")
    w.submit("b")
    w.cancel("a")
    assert w.running == {"a"}
    w.advance(3)
    assert w.running == {"b"}


def test_a_worker_that_is_returning_its_devices_is_no_company():
    w = World(cpus=2, gpus=3)
    w.settles = True
    w.submit("a", num_gpus=1)
    w.submit("b", num_gpus=1, max_calls=1)
    w.finish("b")
    starved(w, "a")
    assert w.running == {"a"}


def test_nothing_is_sent_ahead_meanwhile():
    w = World(cpus=2, took=1e-4)
    for number in range(40):
        w.submit(f"t{number}")
    w.submit("a", resources={})
    w.finish("t0")
    starved(w, min(w.running))
    done = len(w.told)
    for _ in range(40):
        for name in sorted(w.running):
            w.finish(name)
    w.run_dry()
    assert len(w.told) > done
    assert not w.scheduler.tasks


def test_it_is_said_why_others_wait():
    w = World(cpus=2)
    w.submit("a")
    w.submit("b")
    starved(w, "a")
    w.submit("c")
    told = {task.name: task.reason for task in snapshot(w.scheduler, {}, w.now).tasks}
    assert "run alone" in told["c"]
    assert "tried again" in told["a"]
    record = w.scheduler.tasks[w.tasks["c"].id]
    assert "run alone" in str(why(w.scheduler, record, {}, w.now))


def test_nobody_starves_who_does_not_run():
    w = World()
    w.submit("a")
    worker = w.worker_of("a")
    w.finish("a")
    w.tell(Scheduler.kill_for_memory, worker, Memory.HOST)
    w.tell(Scheduler.kill_for_memory, 99, Memory.HOST)
    assert not w.killed


def test_it_says_who_is_to_run_alone():
    w = World()
    w.submit("a")
    assert repr(w.scheduler.exclusive) == "<Solitude for None, then 0>"


def test_who_fails_while_he_runs_alone_has_had_his_turn():
    w = World(cpus=2)
    w.submit("a")
    starved(w, "a")
    w.submit("b")
    assert w.running == {"a"}
    w.die("a")
    assert w.running == {"b"}
    w.advance(0.2)
    assert w.running == {"a", "b"}


def test_he_waits_for_his_own_device_to_come_back():
    w = World(cpus=2, gpus=1)
    w.settles = True
    w.submit("a", num_gpus=1)
    worker = w.worker_of("a")
    starved(w, "a")
    w.submit("b")
    assert w.running == set()
    w.tell(Scheduler.devices_free, worker)
    assert w.running == {"a"}
    w.settles = False
    w.advance(31)
    assert w.running == {"a"}, "his time was up while he ran"


def test_a_worker_that_is_ending_is_company():
    w = World(cpus=2, exits=False)
    w.submit("a")
    w.submit("b", max_calls=1)
    b = w.worker_of("b")
    w.finish("b")
    a = w.worker_of("a")
    starved(w, "a")
    w.die(a)
    assert w.running == set()
    w.die(b)
    assert w.running == {"a"}


def test_when_it_has_ended_all_others_start_that_fit():
    """Not only as many as its own worker can take, one after the other."""
    w = World(cpus=3)
    for name in "ab":
        w.submit(name)
    starved(w, "a")
    for name in "cdef":
        w.submit(name)
    w.finish("b")
    assert w.running == {"a"}
    w.finish("a")
    assert w.running == {"c", "d", "e"}


def test_one_whose_worker_never_starts_has_had_its_turn():
    w = World(cpus=2)
    w.submit("a")
    w.submit("b", max_calls=1)
    starved(w, "a")
    w.starts = False
    w.finish("b")
    w.submit("c", environment={"X": "1"})
    assert w.starting == {"a"}
    w.die("a")
    assert w.starting == {"a", "c"}


def test_it_holds_up_no_child_because_of_a_task_like_it():
    """That task is another program's, and its turn comes before."""
    w = World(cpus=2)
    for client in (1, 2):
        w.join(client)
    for name in ("parent", "a"):
        w.submit(name, client=1)
    starved(w, "a")
    w.submit("other", client=2)
    for name in ("first child", "second child"):
        w.submit(name, parent="parent", client=1)
    assert w.running == {"parent", "first child"}
    w.finish("first child")
    assert w.running == {"parent", "second child"}
    assert w.waiting == {"other"}
