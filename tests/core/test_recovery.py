"""Who is tried again: how often, how soon, and where memory ran out, with what."""

from __future__ import annotations

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.records import Memory
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, status_of, why_of


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
        w.play("told =; advance 1; running = a")
    w.play("""
        die a; told = a:lost; free = CPU:1.0 GPU:0.0
        submit b max_retries=0; finish b retry=True; told has b:settled
    """)


def test_three_workers_in_a_row_that_cannot_start_lose_the_task_but_no_retries():
    w = World(starts=False).play("submit a max_retries=1")
    for starts in (True, False):
        for _ in range(2):
            w.play("die a; starting = a")
        if starts:
            w.play("start a; running = a; die a")
    w.play("die a; told = a:lost; worker_count = 0")


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
    w.play("finish b c; running = a; free_gpus = 0")
    fail(w, "a", how)
    assert w.told["a"] == ("settled" if how == "raises" else "lost")


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


# A task that was killed for want of main memory is tried once more, alone.


def test_it_waits_for_the_others_and_they_for_it():
    World(cpus=4).play("""
        submit a b c; starve a; running = b c; submit d; waiting = d
        finish b; running = c; finish c; running = a; waiting = d
        finish a; running = d; told = a:settled b:settled c:settled
    """)


def test_it_has_one_more_try_if_it_may_run_twice():
    w = World()
    assert repr(w.scheduler.exclusive) == "<Solitude for None, then 0>"
    w.play("""
        submit once max_retries=0; starve once; told = once:lost
        submit a max_retries=-1; starve a; running = a (nobody else was there)
        starve a; told has a:lost; submit b
    """)
    worker = w.worker_of("b")
    w.finish("b")
    for memory in Memory:
        w.tell(Scheduler.kill_for_memory, worker, memory)
        w.tell(Scheduler.kill_for_memory, 99, memory)
    assert worker in w.workers, "it runs nothing"


def test_others_are_held_up_for_a_limited_time():
    World(cpus=4).play("""
        submit a long; starve a; submit later; advance 29; running = long
        advance 2; running = a later long
    """)


def test_it_waits_for_its_own_device_to_come_back():
    w = World(cpus=2, gpus=1).play("let settles=True; submit a gpus=1")
    worker = w.worker_of("a")
    w.play("starve a; submit b; running =")
    w.tell(Scheduler.devices_free, worker)
    assert w.running == {"a"}
    w.play("let settles=False; advance 31; running = a (his time was up while he ran)")


def test_it_can_be_cancelled_while_it_waits_and_while_it_runs_alone():
    World(cpus=2).play("""
        submit a b; starve a; cancel a; submit c; running = b c
        finish b; starve c; submit d; cancel c; running = c
        advance 3; running = d
    """)


def test_status_and_why_say_that_others_wait_for_it():
    w = World(cpus=2).play("submit a b; starve a; submit c")
    reasons = {task.name: task.reason for task in status_of(w).tasks}
    assert "run alone" in reasons["c"]
    assert "tried again" in reasons["a"]
    assert "run alone" in str(why_of(w, "c"))


def test_who_fails_while_he_runs_alone_has_had_his_turn():
    World(cpus=2).play("""
        submit a; starve a; submit b; running = a; die a; running = b
        advance 0.2; running = a b
    """)


def test_one_whose_worker_never_starts_has_had_its_turn():
    w = World(cpus=2).play("submit a; submit b max_calls=1; starve a")
    w.starts = False
    w.play("finish b; submit c environment=X:1; starting = a; die a; starting = a c")
