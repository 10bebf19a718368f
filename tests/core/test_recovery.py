"""Retries, restarts and exclusive retries; sick and settling devices."""

from __future__ import annotations

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import WorkerId
from aiogpu.core.records import Memory
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, record_of, status_of, why_of


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize(
    "fails", [False, True], ids=["worker dies", "fails, then dies"]
)
def test_task_is_retried_up_to_max_retries(retries, fails):
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


def test_three_failed_starts_fail_the_task_without_retries():
    w = World(starts=False).play("submit a max_retries=1")
    for starts in (True, False):
        for _ in range(2):
            w.play("die a; starting = a")
        if starts:
            w.play("start a; running = a; die a")
    w.play("die a; told = a:lost; worker_count = 0")


# Restarts of actors.


PATIENCE = SchedulerConfig(retry_after=1.0, max_retry_delay=8.0, restarts_in_a_row=5)


def endless(max_retries: int = -1) -> World:
    world = World(cpus=1, config=PATIENCE)
    world.submit("actor", max_calls=1, max_retries=max_retries, is_endless=True)
    return world


def pause(world: World) -> float:
    """Return the seconds until the restart of an actor that has just died."""
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


def test_restart_delays_grow_until_the_actor_is_given_up() -> None:
    world = endless()
    assert die_and_wait(world, 6) == [0, 1, 2, 4, 8, -1]
    assert world.tasks["actor"].news == "lost"
    assert not world.scheduler.restarts
    world.scheduler.check()


def test_stable_actor_restarts_at_once() -> None:
    world = endless()
    assert die_and_wait(world, 4) == [0, 1, 2, 4]
    assert die_and_wait(world, 8, lived=PATIENCE.stable_after) == [0] * 8
    assert die_and_wait(world, 3) == [1, 2, 4]


@pytest.mark.parametrize("phase", ["queued", "expecting", "starting", "paused"])
def test_a_kill_before_the_process_uses_up_a_restart(phase: str) -> None:
    world = World(cpus=1, config=PATIENCE, starts=phase != "starting")
    if phase == "queued":
        world.submit("before")
    actor = {"max_calls": 1, "is_endless": True, "max_retries": 1}
    if phase == "paused":
        actor["max_retries"] = 3
    needs = ["argument"] if phase == "expecting" else None
    if needs:
        world.submit("argument")
    world.submit("actor", needs=needs, **actor)
    if phase == "paused":
        world.die("actor")
        world.die("actor")
    kill = Scheduler.use_restart, world.tasks["actor"].id
    world.tell(*kill)
    assert world.tasks["actor"].news is None
    world.tell(*kill)
    assert world.tasks["actor"].news == "killed"
    world.tell(*kill)
    world.scheduler.check()
    assert world.tasks["actor"].id not in world.scheduler.tasks


# Retry of an out-of-memory task with a whole device.


def outgrow(w: World, name: str) -> None:
    """Kill a task because it exceeds its reserved device memory."""
    w.tell(Scheduler.kill_for_memory, w.worker_of(name), Memory.DEVICE)


def asks_for(w: World, name: str) -> str:
    """Return the present request of a task."""
    return str(w.scheduler.tasks[w.tasks[name].id].spec.shape.request)


def fail(w: World, name: str, how: str) -> None:
    """Fail a task because device memory ran out, in one of two ways."""
    if how == "raises":
        w.finish(name, ran_out=True)
    else:
        outgrow(w, name)


HOWS = pytest.mark.parametrize("how", ["raises", "is ended"])


@HOWS
@pytest.mark.parametrize("asked", [{"num_gpus": 0.25}, {"gpu_memory": "10GiB"}])
def test_out_of_memory_task_gets_one_retry_with_a_whole_device(how, asked):
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
@pytest.mark.parametrize(
    ("asked", "doubled"),
    [
        ({"num_gpus": 0.25}, "{CPU: 1, GPU: 0.5}"),
        ({"gpu_memory": "10GiB"}, "{CPU: 1, gpu_memory: 20GiB}"),
    ],
)
def test_out_of_memory_task_gets_twice_its_share_and_then_a_device(how, asked, doubled):
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", retries_oom=True, doubles_share=True, max_retries=0, **asked)
    w.submit("b", num_gpus=0.75)
    fail(w, "a", how)
    assert asks_for(w, "a") == doubled
    w.play("finish b; running = a")
    fail(w, "a", how)
    assert asks_for(w, "a") == "{CPU: 1, GPU: 1}"
    fail(w, "a", how)
    assert w.told["a"] == ("settled" if how == "raises" else "lost")


@HOWS
@pytest.mark.parametrize("asked", [{"num_gpus": 0.5}, {"gpu_memory": "50GiB"}])
def test_twice_a_share_that_no_device_has_is_a_device(how, asked):
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", retries_oom=True, doubles_share=True, max_retries=0, **asked)
    w.submit("b", num_gpus=0.25)
    fail(w, "a", how)
    assert asks_for(w, "a") == "{CPU: 1, GPU: 1}"
    w.play("finish b; running = a")
    fail(w, "a", how)
    assert w.told["a"] == ("settled" if how == "raises" else "lost")


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
def test_no_oom_retry_without_the_option_or_a_share(how, options):
    """Without the option; with whole devices; without devices."""
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("a", **options)
    fail(w, "a", how)
    assert w.told == {"a": "settled" if how == "raises" else "lost"}
    w.run_dry()


@HOWS
@pytest.mark.parametrize("gpus", [1, 2])
def test_no_oom_retry_that_would_deadlock(how, gpus):
    """The retry would wait for ever; on another device it is possible."""
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


# Exclusive retry of a task that was killed for host memory.


def test_exclusive_retry_waits_for_others_and_others_for_it():
    World(cpus=4).play("""
        submit a b c; starve a; running = b c; submit d; waiting = d
        finish b; running = c; finish c; running = a; waiting = d
        finish a; running = d; told = a:settled b:settled c:settled
    """)


def test_exclusive_retry_needs_max_retries():
    w = World()
    assert repr(w.scheduler.exclusive) == "<ExclusiveRetries None, then 0>"
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


def test_exclusive_retry_delays_others_for_a_limited_time():
    World(cpus=4).play("""
        submit a long; starve a; submit later; advance 29; running = long
        advance 2; running = a later long
    """)


def test_exclusive_retry_that_was_not_alone_is_an_ordinary_one():
    """It was once failed as if it had been alone, with retries left."""
    World(cpus=4).play("""
        submit a long; starve a; advance 31; running = a long
        starve a; told =; submit later; waiting = later; advance 31
        running = a later long; starve a; told =
        finish long later; running = a; starve a; told has a:lost
    """)
    World(cpus=4).play("""
        submit a long max_retries=1; starve a; advance 31; running = a long
        starve a; told has a:lost
    """)


def test_exclusive_retry_beside_a_child_of_another_task_is_an_ordinary_one():
    World(cpus=4, gpus=1).play("""
        submit actor gpus=1 cpus=0 is_endless=True
        submit parent a; starve a; submit child gpus=1 parent=parent
        wait_for parent child; running = a actor parent
        finish actor; running = a child parent
        starve a; told = actor:settled
    """)


def test_exclusive_retries_without_limit_let_others_start():
    w = World(cpus=4).play("submit a max_retries=-1; submit long; starve a")
    for number in range(5):
        w.submit(f"later{number}")
        w.play(f"waiting = later{number}; advance 31; running has later{number} a")
        w.play(f"finish later{number}; starve a; told has later{number}:settled")


def test_exclusive_retry_waits_for_its_device():
    w = World(cpus=2, gpus=1).play("let settles=True; submit a gpus=1")
    worker = w.worker_of("a")
    w.play("starve a; submit b; running =")
    w.tell(Scheduler.devices_free, worker)
    assert w.running == {"a"}
    w.play("let settles=False; advance 31; running = a (his time was up while he ran)")


def test_exclusive_retry_does_not_delay_children_of_running_tasks():
    World(cpus=2).play("""
        submit parent a; starve a; submit child parent=parent; running = child parent
        wait_for parent child; finish child parent; running = a
        submit own parent=a; running = a own
    """)


def test_exclusive_retry_can_be_cancelled():
    World(cpus=2).play("""
        submit a b; starve a; cancel a; submit c; running = b c
        finish b; starve c; submit d; cancel c; running = c
        advance 3; running = d
    """)


def test_why_names_the_exclusive_retry():
    w = World(cpus=2).play("submit a b; starve a; submit c")
    reasons = {task.name: task.reason for task in status_of(w).tasks}
    assert "run alone" in reasons["c"]
    assert "retried soon" in reasons["a"]
    assert "run alone" in str(why_of(w, "c"))


def test_exclusive_retry_that_dies_is_retried_normally():
    World(cpus=2).play("""
        submit a; starve a; submit b; running = a; die a; running = b
        advance 0.2; running = a b
    """)


def test_exclusive_retry_without_a_worker_is_retried_normally():
    w = World(cpus=2).play("submit a; submit b max_calls=1; starve a")
    w.starts = False
    w.play("finish b; submit c environment=X:1; starting = a; die a; starting = a c")


# Devices that settle, are sick, or run foreign processes.

SICK = "XID 79"
WHO = "others are on it: python (pid 4711)"
REASON = "GPU 0: the driver still lists ended processes: pid 7"


def note(w: World, index: int, reason: str | None, cause=Cause.SICK, **how) -> None:
    """Set or end a cause for which a device is set aside."""
    w.tell(Scheduler.device_changed, "GPU", index, cause, reason, **how)


def shown(w: World) -> list[str | None]:
    """Return the reason for which each device is set aside."""
    return [device.aside for device in status_of(w).devices]


def gone(gpus=1, count=2):
    """A world where a task has ended and its devices are settling."""
    w = World(cpus=4, gpus=count).play("let settles=True")
    w.submit("a", num_gpus=gpus, max_calls=1)
    worker = w.worker_of("a")
    w.finish("a")
    return w, worker


def test_result_is_delivered_before_the_share_is_free():
    w, worker = gone()
    w.play("""
        told = a:settled; free = CPU:4.0 GPU:1.0 (its code has ended)
        submit b gpus=2; waiting = b
        advance 60; killed = (it has ended in time)
    """)
    w.tell(Scheduler.devices_free, worker)
    assert w.running == {"b"}
    assert w.scheduler.ledger.device_sets["GPU"].unverified == set()


def test_status_shows_settling_and_unverified_devices():
    w, worker = gone(0.5, count=1)
    (device,) = status_of(w).devices
    (holder,) = device.holders
    assert (holder.is_settling, holder.task, holder.pid) == (True, None, 0)
    assert "  0.5  (ended)    until the driver confirms" in str(status_of(w))
    w.submit("b", num_gpus=1, max_calls=1)
    assert str(why_of(w, "b")).splitlines()[1:] == [
        "  GPU 1: 0.5 of 1 free (0: 0.5)",
        "    0.5 of GPU 0: held until the driver confirms that its process has ended",
    ]
    w.tell(Scheduler.devices_free, worker, is_verified=False)
    (device,) = status_of(w).devices
    assert device.is_unverified
    assert "unverified: ended tasks may have left something" in str(status_of(w))
    worker = w.worker_of("b")
    w.finish("b")
    w.tell(Scheduler.devices_free, worker)
    assert not status_of(w).devices[0].is_unverified


def test_stuck_device_is_set_aside_with_a_reason():
    w, worker = gone()
    w.submit("both", num_gpus=2)
    w.tell(Scheduler.devices_stuck, worker, REASON)
    w.tell(Scheduler.devices_stuck, worker, "said twice")
    assert w.free == {"CPU": 4.0, "GPU": 1.0}
    assert shown(w) == [REASON, None]
    assert f"  set aside: {REASON}" in str(status_of(w)).splitlines()
    assert "set aside" in status_of(w).waiting[0].reason
    w.play("submit b gpus=1; gpus_of b = 1")
    assert f"    set aside: {REASON}" in str(why_of(w, "both")).splitlines()
    w.play("advance 2; kept = None (none counts on it); finish b; run_dry")
    note(w, 0, None, Cause.UNSETTLED)
    assert w.gpus_of("both") == [0, 1]


def test_causes_are_independent_and_named_once():
    w, worker = gone(0.5, count=2)
    note(w, 0, "it is lost; XID 79")
    w.tell(Scheduler.devices_stuck, worker, "GPU 0: it is lost (no answer)")
    assert shown(w)[0] == "GPU 0: it is lost (no answer); XID 79"
    note(w, 0, WHO, Cause.FOREIGN)
    note(w, 0, None, Cause.UNSETTLED)
    note(w, 0, None, Cause.UNSETTLED)
    assert shown(w)[0] == f"it is lost; XID 79; {WHO}"
    note(w, 0, "XID 48")
    note(w, 1, "GPU 1: XID 79")
    w.submit("b", num_gpus=1)
    assert str(why_of(w, "b")).splitlines()[1:] == [
        "  GPU 1: 0 of 2 free (0: set aside, 1: set aside)",
        f"    set aside: GPU 0: XID 48; {WHO}",
        "    set aside: GPU 1: XID 79",
    ]
    for cause in (Cause.SICK, Cause.FOREIGN):
        assert w.waiting == {"b"}
        note(w, 0, None, cause)
    assert w.running == {"b"}


def test_lent_cpus_are_freed_with_the_lease():
    w = World(cpus=1, gpus=1)
    w.settles = True
    w.submit("parent", num_gpus=1, max_retries=0)
    w.play("submit child parent=parent; wait_for parent child")
    worker = w.worker_of("parent")
    w.play("die parent; cancel child; run_dry")
    w.tell(Scheduler.devices_free, worker)
    assert w.free == {"CPU": 1.0, "GPU": 1.0}


def test_close_does_not_wait_for_devices():
    w, _ = gone()
    w.play("close; is_closed = True")


def test_spoilt_worker_exits_after_its_task():
    w = World(gpus=1, took=1e-4).play("submit a b c d gpus=1; finish a")
    worker = w.worker_of("b")
    assert w.queued
    w.play("spoil b; queued =; finish b")
    assert w.running
    assert w.worker_of(next(iter(w.running))) != worker
    assert worker not in w.workers


def test_idle_worker_cannot_be_spoilt():
    w = World().play("submit a")
    worker = w.worker_of("a")
    w.finish("a")
    w.tell(Scheduler.worker_spoilt, worker)
    w.tell(Scheduler.worker_spoilt, 99)
    w.submit("b")
    assert w.worker_of("b") == worker


def test_worker_on_a_sick_device_gets_no_further_task():
    """Neither a waiting task nor a task of its queue."""
    w = World(cpus=1, gpus=1, took=1e-5).play("""
        submit a b c d e f g h gpus=0.5; finish a
    """)
    assert w.queued
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "GPU reset needed")
    w.play("queued =; running = b; finish b; running =; heal 0; run_dry")
    assert set(w.told) == set("abcdefgh")


def test_no_reservation_on_a_sick_device():
    w = World(gpus=2).play("""
        submit a gpus=0.5; submit b gpus=0.5 strategy=spread; submit c gpus=1; advance 2
        submit d gpus=0.25
    """)
    assert w.scheduler.reservation.barred == {"GPU": 0b01}
    w.play("advance 1; sicken 0")
    assert w.scheduler.reservation.barred == {"GPU": 0b10}


def test_worker_bound_to_a_sick_device_is_retired():
    """A reset invalidates its context, and needs the device closed."""
    w = World(gpus=2, exits=False).play("""
        submit a b gpus=0.5; submit c gpus=1; submit d
    """)
    idle, busy, other = (w.worker_of(name) for name in "abc")
    w.play("finish a c d; sicken 0")
    assert w.retired == [idle]
    w.play("finish b; submit e gpus=1")
    assert w.worker_of("e") == other
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, None)
    assert w.retired == [idle, busy]
    w.submit("f", num_gpus=0.5)
    assert w.worker_of("f") not in (idle, busy)


@pytest.mark.parametrize("cause", [Cause.SICK, Cause.FOREIGN, Cause.UNSETTLED])
def test_starting_task_leaves_a_sick_device(cause):
    w, worker = gone(0.5)
    w.play("let starts=False; submit b gpus=0.5")
    if cause is Cause.UNSETTLED:
        w.tell(Scheduler.devices_stuck, worker, SICK)
    else:
        note(w, 0, SICK, cause)
    w.play("start b; gpus_of b = 1")
    assert w.worker_count == 1, "the same worker, which had no device yet"


def test_busy_worker_on_a_sick_device_is_retired_later():
    """The worker's context is older than the device's recovery."""
    w = World(gpus=1, exits=False).play("submit a b gpus=0.5")
    worker = w.worker_of("a")
    w.play("sicken 0; heal 0; retired =; submit c gpus=0.5; finish a")
    assert w.retired == [worker]
    assert w.waiting == {"c"}, "it has its share until it has ended"


def test_avoided_device_is_taken_last():
    w = World(gpus=3)
    note(w, 0, WHO, Cause.FOREIGN, is_avoided=True)
    w.play("submit a gpus=0.5; submit b c gpus=1")
    assert [w.gpus_of(name) for name in "abc"] == [[1], [2], [0]]
    w.play("finish a b c")
    for count, devices in ((2, [1, 2]), (3, [0, 1, 2])):
        w.submit(f"of {count}", num_gpus=count)
        assert w.gpus_of(f"of {count}") == devices
        w.finish(f"of {count}")
    note(w, 0, None, Cause.FOREIGN, is_avoided=True)
    w.play("submit d gpus=1 environment=X:1; gpus_of d = 0")


# A killed worker of which a process has not ended.


def left_behind(w: World, name: str) -> WorkerId:
    """Let a task's worker count as gone while a process of it lives on."""
    worker, task = WorkerId(w.worker_of(name)), record_of(w, name).id
    w.tell(Scheduler.worker_gone, worker, task, is_left=True)
    return worker


@pytest.mark.parametrize("settles", [False, True])
def test_a_worker_that_is_left_keeps_all_that_it_holds(settles):
    w = World(cpus=2, gpus=2)
    w.submit("a", num_gpus=1, max_retries=0)
    worker = left_behind(w, "a")
    assert w.told == {"a": "lost"}
    assert (w.free_gpus, w.scheduler.ledger.available()["CPU"]) == ([0, 1], 1)
    w.submit("both", num_gpus=2)
    w.play("advance 60; waiting = both")
    assert w.scheduler.reservation is None, "nobody knows when it ends"
    assert len(w.warned) == 1
    w.submit("other", num_gpus=1)
    assert w.running == {"other"}
    w.finish("other")
    w.tell(Scheduler.worker_ended, worker, settles)
    if settles:
        assert (w.waiting, w.free_gpus) == ({"both"}, [0, 1])
        w.tell(Scheduler.devices_free, worker)
    w.tell(Scheduler.worker_ended, worker, settles)
    assert w.running == {"both"}


def test_a_blocked_task_whose_worker_is_left_holds_no_cpu():
    w = World(cpus=1, gpus=1).play("""
        submit parent gpus=1 max_retries=0; submit child parent=parent
        wait_for parent child; running = child parent
    """)
    worker = left_behind(w, "parent")
    w.play("finish child; free = CPU:1.0 GPU:0.0; submit next; running = next")
    w.tell(Scheduler.worker_ended, worker)
    w.play("finish next; free = CPU:1.0 GPU:1.0")


def test_a_node_closes_although_a_worker_is_left():
    w = World(gpus=1).play("submit a gpus=1 max_retries=0; submit b gpus=1")
    worker = left_behind(w, "a")
    w.close()
    w.tell(Scheduler.worker_ended, worker)
    assert w.is_closed
