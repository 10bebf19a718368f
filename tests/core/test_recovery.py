"""Who is tried again: how often, how soon, and where memory ran out, with what."""

from __future__ import annotations

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.records import Memory
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World
from tests.core.builders import finish, status_of, submit, why_of


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize(
    "fails", [False, True], ids=["worker dies", "fails, then dies"]
)
def test_a_task_is_tried_again_as_often_as_it_may_be(retries, fails):
    w = World(cpus=1)
    w.submit("a", max_retries=retries)
    for number in range(retries):
        if fails and not number:
            w.finish("a", retry=True)
        else:
            w.die("a")
        assert not w.told
        w.advance(1)
        assert w.running == {"a"}
    w.die("a")
    assert (w.told, w.free) == ({"a": "lost"}, {"CPU": 1.0, "GPU": 0.0})
    w.submit("b", max_retries=0)
    w.finish("b", retry=True)
    assert w.told["b"] == "settled"


def test_a_retry_keeps_its_place_and_a_second_one_lets_others_go_first_for_a_while():
    w = World(cpus=1)
    for name in "abc":
        w.submit(name)
    w.die("a")
    assert w.running == {"a"}
    w.finish("a", retry=True)
    assert w.running == {"b"}
    assert w.scheduler.deadline() == pytest.approx(0.1)
    finish(w, "b", after=0.1)
    assert w.running == {"a"}
    w.submit("urgent", priority=1)
    w.advance(10)
    w.cancel("c")
    w.finish("a", retry=True)
    assert w.running == {"urgent"}


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
    assert str(why_of(w, "a")) == "a has failed before, and is tried again in a while."
    assert {task.state for task in status_of(w).tasks} == {"delayed"}
    w.cancel("a")
    assert w.forgotten == {"a"}
    w.advance(0.06)
    assert w.told == {"b": "expired"}
    w.close()
    w.advance(1)
    assert w.told == {"b": "expired", "c": "abandoned"}
    assert w.scheduler.is_closed


def test_three_workers_in_a_row_that_cannot_start_lose_the_task_but_no_retries():
    w = World(starts=False)
    w.submit("a", max_retries=1)
    for starts in (True, False):
        for _ in range(2):
            w.die("a")
            assert w.starting == {"a"}
        if starts:
            w.start("a")
            assert w.running == {"a"}
            w.die("a")
    w.die("a")
    assert w.told == {"a": "lost"}
    assert not w.workers


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


# What is held without end begins anew.


PATIENCE = SchedulerConfig(retry_after=1.0, retry_at_last=8.0, restarts_in_a_row=5)


def endless(max_retries: int = -1) -> World:
    world = World(cpus=1, config=PATIENCE)
    world.submit("actor", max_calls=1, max_retries=max_retries, is_endless=True)
    return world


def pause(world: World) -> float:
    """Seconds until it begins anew; it has died just now."""
    began = world.now
    while world.tasks["actor"].news is None:
        if any(worker.task for worker in world.workers.values()):
            return world.now - began
        world.advance(0.5)
    return -1.0


def die_and_wait(world: World, times: int, lived: float = 0.0) -> list[float]:
    pauses = []
    for _ in range(times):
        world.advance(lived)
        world.die("actor")
        pauses.append(pause(world))
    return pauses


def test_pauses_grow_and_then_it_is_given_up() -> None:
    world = endless()
    assert die_and_wait(world, 6) == [0, 1, 2, 4, 8, -1]
    assert world.tasks["actor"].news == "lost"
    assert not world.scheduler.restarts
    world.scheduler.check()


def test_one_that_has_lived_for_a_while_is_sound() -> None:
    world = endless()
    assert die_and_wait(world, 4) == [0, 1, 2, 4]
    assert die_and_wait(world, 8, lived=PATIENCE.sound_after) == [0] * 8
    assert die_and_wait(world, 3) == [1, 2, 4]


def test_no_more_often_than_was_asked_for() -> None:
    world = endless(max_retries=2)
    assert die_and_wait(world, 3, lived=PATIENCE.sound_after) == [0, 0, -1]
    world = endless()
    die_and_wait(world, 2)
    world.cancel("actor")
    world.run_dry()
    assert not world.scheduler.restarts


# A task that ran out of device memory is tried once more, with a device of its own.


def outgrow(w: World, name: str) -> None:
    """The task uses more than it has reserved."""
    w.tell(Scheduler.kill_for_memory, w.worker_of(name), Memory.DEVICE)


def asks_for(w: World, name: str) -> str:
    """What it asks for now."""
    return str(w.scheduler.tasks[w.tasks[name].id].spec.shape.request)


def fail(w: World, name: str, how: str) -> None:
    """End a task for want of device memory, in one of two ways."""
    if how == "raises":
        w.finish(name, ran_out=True)
    else:
        outgrow(w, name)


HOWS = pytest.mark.parametrize("how", ["raises", "is ended"])


@HOWS
@pytest.mark.parametrize("asked", [{"num_gpus": 0.25}, {"gpu_memory": "10GiB"}])
def test_it_waits_again_at_once_for_a_whole_device_and_has_that_try_once(how, asked):
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", retries_oom=True, max_retries=0, **asked)
    w.submit("b", num_gpus=0.5)
    fail(w, "a", how)
    assert (w.waiting, w.told) == ({"a"}, {})
    assert asks_for(w, "a") == "{CPU: 1, GPU: 1}"
    w.submit("c", num_gpus=0.5)  # it still shares with those that fit
    finish(w, "b c")
    assert (w.running, w.free_gpus) == ({"a"}, [0])
    fail(w, "a", how)
    assert w.told["a"] == ("settled" if how == "raises" else "lost")


@HOWS
def test_it_does_not_wait_for_what_is_held_without_end(how):
    """An actor may be there for ever, and its owner would wait instead of knowing."""
    w = World(cpus=9, gpus=2, gpu_memory="80GiB")
    w.submit("without", is_endless=True)
    for name in "ab":
        w.submit(name, num_gpus=0.5, is_endless=True, strategy="spread")
    w.submit("c", num_gpus=0.5, retries_oom=True, max_retries=0)
    fail(w, "c", how)
    assert w.told == {"c": "settled" if how == "raises" else "lost"}
    w.cancel("b")
    w.finish("b")
    w.submit("d", num_gpus=0.5, retries_oom=True, max_retries=0)
    fail(w, "d", how)
    assert "d" not in w.told
    assert w.running >= {"d"}
    assert w.gpus_of("d") == [1]


@HOWS
@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 0.5},
        {"num_gpus": 1, "retries_oom": True},
        {"num_gpus": 2, "retries_oom": True},
        {"num_gpus": 0, "retries_oom": True},
    ],
)
def test_without_the_option_or_a_share_it_is_not_tried_again(how, options):
    """Without the option; with whole devices; without any."""
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("a", **options)
    fail(w, "a", how)
    assert w.told == {"a": "settled" if how == "raises" else "lost"}
    w.run_dry()


def test_other_retries_go_beside_it():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5, retries_oom=True, max_retries=1)
    w.finish("a", ran_out=True, retry=True)
    assert asks_for(w, "a") == "{CPU: 1, GPU: 1}"
    w.finish("a", ran_out=True, retry=True)
    assert w.running == {"a"}
    w.die("a")
    assert w.told == {"a": "lost"}


@HOWS
@pytest.mark.parametrize("closes", [False, True], ids=["cancelled", "closing"])
def test_one_that_was_cancelled_or_abandoned_is_not_tried_again(how, closes):
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=0.5, retries_oom=True)
    if closes:
        w.close()
    else:
        w.cancel("a")
    fail(w, "a", how)
    if how == "is ended":
        w.die("a")
    assert w.told == ({"a": "abandoned"} if closes else {})
    assert not w.scheduler.tasks


@HOWS
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_task_is_not_made_to_wait_for_what_its_own_parent_holds(how, gpus):
    """It would wait for ever; on another device it is tried again."""
    w = World(gpus=gpus)
    w.submit("parent", num_gpus=0.5)
    w.submit("child", num_gpus=0.25, retries_oom=True, parent="parent")
    w.wait_for("parent", "child")
    fail(w, "child", how)
    if gpus == 1:
        assert w.told == {"child": "settled" if how == "raises" else "lost"}
        assert w.running == {"parent"}
    else:
        assert w.gpus_of("child") == [1]


def test_an_endless_one_is_begun_anew_as_its_restarts_say():
    w = World(gpus=1)
    w.submit("a", num_gpus=0.5, is_endless=True, max_calls=1, max_retries=1)
    outgrow(w, "a")
    assert w.running == {"a"}
    outgrow(w, "a")
    assert w.told == {"a": "lost"}


def test_those_behind_one_that_is_ended_wait_again():
    w = World(cpus=1, gpus=1, took=1e-5, revokes=False)
    for name in ("before", "a", "b", "c", "d", "e", "f"):
        w.submit(name, num_gpus=0.5, max_retries=0)
    w.finish("before")
    assert w.queued
    outgrow(w, "a")
    assert w.told == {"before": "settled", "a": "lost"}
    w.run_dry()
    assert set(w.told.values()) == {"settled", "lost"}
    assert list(w.told.values()).count("lost") == 1


def test_one_whose_end_comes_before_it_has_begun_has_lost_nothing():
    w = World(gpus=1, exits=False)
    w.submit("a", num_gpus=0.5, max_retries=0)
    outgrow(w, "a")
    w.workers[w.worker_of("a")].began = None
    w.die("a")
    assert w.running == {"a"}
    w.finish("a")
    assert w.told == {"a": "settled"}


# A task that was killed for want of main memory is tried once more, alone.


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
    assert (w.running, w.waiting) == ({"a"}, {"d"})
    w.finish("a")
    assert w.running == {"d"}
    assert w.told == {"a": "settled", "b": "settled", "c": "settled"}


def test_it_has_one_more_try_if_it_may_run_twice():
    w = World()
    assert repr(w.scheduler.exclusive) == "<Solitude for None, then 0>"
    w.submit("once", max_retries=0)
    starved(w, "once")
    assert w.told == {"once": "lost"}
    w.submit("a", max_retries=-1)
    starved(w, "a")
    assert w.running == {"a"}, "nobody else was there"
    starved(w, "a")
    assert w.told["a"] == "lost"
    w.submit("b")
    worker = w.worker_of("b")
    w.finish("b")
    for memory in Memory:
        w.tell(Scheduler.kill_for_memory, worker, memory)
        w.tell(Scheduler.kill_for_memory, 99, memory)
    assert worker in w.workers, "it runs nothing"


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


def test_it_waits_for_its_own_device_to_come_back():
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
    submit(w, "parent a")
    starved(w, "a")
    w.submit("child", parent="parent")
    assert w.running == {"parent", "child"}
    w.wait_for("parent", "child")
    finish(w, "child parent")
    assert w.running == {"a"}
    w.submit("own", parent="a")
    assert w.running == {"a", "own"}


def test_whoever_waits_for_it_does_not_keep_it_waiting():
    w = World(cpus=2)
    w.submit("parent")
    w.submit("a", parent="parent")
    w.wait_for("parent", "a")
    starved(w, "a")
    assert (w.running, w.blocked) == ({"a", "parent"}, {"parent"})


def test_what_is_held_without_end_is_no_company():
    w = World(cpus=2)
    w.submit("actor", is_endless=True)
    w.submit("a")
    starved(w, "a")
    assert w.running == {"actor", "a"}


def test_it_can_be_cancelled_while_it_waits_and_while_it_runs_alone():
    w = World(cpus=2)
    submit(w, "a b")
    starved(w, "a")
    w.cancel("a")
    w.submit("c")
    assert w.running == {"b", "c"}
    w.finish("b")
    starved(w, "c")
    w.submit("d")
    w.cancel("c")
    assert w.running == {"c"}
    w.advance(3)
    assert w.running == {"d"}


def test_status_and_why_say_that_others_wait_for_it():
    w = World(cpus=2)
    submit(w, "a b")
    starved(w, "a")
    w.submit("c")
    reasons = {task.name: task.reason for task in status_of(w).tasks}
    assert "run alone" in reasons["c"]
    assert "tried again" in reasons["a"]
    assert "run alone" in str(why_of(w, "c"))


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
    assert (w.running, w.waiting) == ({"parent", "second child"}, {"other"})
