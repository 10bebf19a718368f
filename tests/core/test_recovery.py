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


def test_a_retry_keeps_its_place_and_a_second_one_lets_others_go_first_for_a_while():
    w = World(cpus=1).play("""
        submit a b c; die a; running = a
        finish a retry=True; running = b
    """)
    assert w.scheduler.deadline() == pytest.approx(0.1)
    w.play("""
        advance 0.1; finish b; running = a
        submit urgent priority=1; advance 10; cancel c; finish a retry=True
        running = urgent
    """)


def test_each_retry_waits_twice_as_long_as_the_one_before():
    w = World().play("submit a max_retries=-1")
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
    w.play("""
        cancel a; forgotten = a; advance 0.06; told = b:expired
        close; advance 1; told = b:expired c:abandoned; is_closed = True
    """)


def test_three_workers_in_a_row_that_cannot_start_lose_the_task_but_no_retries():
    w = World(starts=False).play("submit a max_retries=1")
    for starts in (True, False):
        for _ in range(2):
            w.play("die a; starting = a")
        if starts:
            w.play("start a; running = a; die a")
    w.play("die a; told = a:lost; worker_count = 0")


def test_a_cancelled_task_is_not_tried_again():
    World().play("""
        submit a max_retries=-1; cancel a; finish a retry=True; forgotten = a
        submit b max_retries=-1; cancel b; die b; forgotten = a b; told =
    """)


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
    w.play("finish b c; running = a; free_gpus = 0")
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
    w.play("cancel b; finish b; submit d gpus=0.5 retries_oom=True max_retries=0")
    fail(w, "d", how)
    w.play("told lacks d; running has d; gpus_of d = 1")


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
    w.play("finish a ran_out=True retry=True; running = a; die a; told = a:lost")


@HOWS
@pytest.mark.parametrize("closes", [False, True], ids=["cancelled", "closing"])
def test_one_that_was_cancelled_or_abandoned_is_not_tried_again(how, closes):
    w = World(gpus=1, exits=False).play("submit a gpus=0.5 retries_oom=True")
    if closes:
        w.close()
    else:
        w.cancel("a")
    fail(w, "a", how)
    if how == "is ended":
        w.die("a")
    assert w.told == ({"a": "abandoned"} if closes else {})
    assert w.left == 0


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
    World(gpus=1).play("""
        submit a gpus=0.5 is_endless=True max_calls=1 max_retries=1; outgrow a
        running = a; outgrow a; told = a:lost
    """)


def test_those_behind_one_that_is_ended_wait_again():
    w = World(cpus=1, gpus=1, took=1e-5, revokes=False).play("""
        submit before a b c d e f gpus=0.5 max_retries=0; finish before
    """)
    assert w.queued
    w.play("outgrow a; told = before:settled a:lost; run_dry")
    assert set(w.told.values()) == {"settled", "lost"}
    assert list(w.told.values()).count("lost") == 1


def test_one_whose_end_comes_before_it_has_begun_has_lost_nothing():
    w = World(gpus=1, exits=False).play("submit a gpus=0.5 max_retries=0; outgrow a")
    w.workers[w.worker_of("a")].began = None
    w.play("die a; running = a; finish a; told = a:settled")


# A task that was killed for want of main memory is tried once more, alone.


def starved(w, name):
    w.tell(Scheduler.kill_for_memory, w.worker_of(name), Memory.HOST)


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


def test_one_gives_up_while_another_still_waits_for_its_turn():
    World(cpus=4).play("""
        submit a b long; starve a; advance 20; starve b; advance 11; running = long
        waiting = a (the other one's turn comes first)
        finish long; running = b; finish b; running = a
    """)


def test_children_of_those_that_run_are_not_held_up():
    World(cpus=2).play("""
        submit parent a; starve a; submit child parent=parent; running = child parent
        wait_for parent child; finish child parent; running = a
        submit own parent=a; running = a own
    """)


def test_whoever_waits_for_it_does_not_keep_it_waiting():
    World(cpus=2).play("""
        submit parent; submit a parent=parent; wait_for parent a; starve a
        running = a parent; blocked = parent
    """)


def test_what_is_held_without_end_is_no_company():
    World(cpus=2).play("""
        submit actor is_endless=True; submit a; starve a; running = a actor
    """)


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


def test_a_worker_that_is_ending_is_company():
    w = World(cpus=2, exits=False).play("submit a; submit b max_calls=1")
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
    World(cpus=3).play("""
        submit a b; starve a; submit c d e f; finish b; running = a
        finish a; running = c d e
    """)


def test_one_whose_worker_never_starts_has_had_its_turn():
    w = World(cpus=2).play("submit a; submit b max_calls=1; starve a")
    w.starts = False
    w.play("finish b; submit c environment=X:1; starting = a; die a; starting = a c")


def test_it_holds_up_no_child_because_of_a_task_like_it():
    """That task is another program's, and its turn comes before."""
    w = World(cpus=2)
    for client in (1, 2):
        w.join(client)
    w.play("submit parent a client=1; starve a; submit other client=2")
    for name in ("first child", "second child"):
        w.submit(name, parent="parent", client=1)
    assert w.running == {"parent", "first child"}
    w.finish("first child")
    assert (w.running, w.waiting) == ({"parent", "second child"}, {"other"})
