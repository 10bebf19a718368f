"""[B23] What waits for what is held without end is told of by itself, once."""

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.shortage import LOOKED_AT
from aiogpu.testing import World

AFTER = SchedulerConfig().warn_after


def held() -> World:
    """One GPU, of which an actor holds half."""
    w = World(gpus=1)
    w.submit("server", num_gpus=0.5, is_endless=True)
    w.advance(2 * AFTER)
    return w


def test_a_task_that_needs_more_than_an_actor_has_left():
    w = held()
    w.submit("train", num_gpus=1)
    w.advance(AFTER - 0.01)
    assert w.warnings == []
    w.advance(0.01)
    ((name, text),) = w.warnings
    assert name == "train"
    assert text.startswith(
        "train (task 1) has waited 5.0 s for {CPU: 1, GPU: 1}, and what it needs is "
        "held without end: server holds 0.5 of GPU 0. It can start when a holder ends"
    )
    w.advance(10 * AFTER)
    assert len(w.warnings) == 1
    assert w.scheduler.deadline() is None


def test_a_line_is_warned_once_until_it_is_empty():
    w = held()
    for number in range(3):
        w.submit(f"train {number}", num_gpus=1)
    w.submit("other", num_gpus=0.75)
    w.advance(3 * AFTER)
    assert [name for name, _ in w.warnings] == ["train 0", "other"]
    w.cancel("train 0")
    w.submit("short")
    w.finish("short")
    w.advance(3 * AFTER)
    w.submit("train 3", num_gpus=1)
    w.advance(3 * AFTER)
    assert len(w.warnings) == 2
    for number in range(1, 4):
        w.cancel(f"train {number}")
    w.submit("again", num_gpus=1)
    w.advance(3 * AFTER)
    assert [name for name, _ in w.warnings[2:]] == ["again"]


def test_nobody_is_warned_of_what_ends():
    w = World(gpus=1)
    w.submit("long", num_gpus=1)
    w.submit("train", num_gpus=1)
    w.advance(20 * AFTER)
    assert w.warnings == []
    w.finish("long")
    w.finish("train")
    w.advance(2 * AFTER)
    assert w.scheduler.deadline() is None


def test_a_holder_that_comes_later_is_told_of_when_it_has_held_as_long():
    w = World(gpus=1)
    w.submit("long", num_gpus=0.5)
    w.submit("train", num_gpus=1)
    w.advance(2 * AFTER)
    w.submit("server", num_gpus=0.5, is_endless=True, priority=1)
    assert "server" in w.running
    w.advance(AFTER - 0.01)
    assert w.warnings == []
    w.advance(2 * AFTER)
    ((_, text),) = w.warnings
    assert "server holds 0.5 of GPU 0" in text
    assert "long" not in text


def test_what_is_set_aside_may_come_back():
    w = World(gpus=1)
    w.tell(Scheduler.device_changed, "GPU", 0, Cause.SICK, "XID 79")
    w.submit("train", num_gpus=1)
    w.advance(10 * AFTER)
    assert w.warnings == []
    w.run_dry()
    assert w.waiting == {"train"}


def test_amounts_and_leases_are_named():
    w = World(cpus=4, resources={"license": 1})
    w.submit("server", num_cpus=0, resources={"license": 1}, is_endless=True)
    w.lease("shell", num_cpus=3)
    w.advance(AFTER)
    w.submit("train", num_cpus=2, resources={"license": 1})
    w.advance(AFTER)
    ((_, text),) = w.warnings
    assert "shell holds CPU 3" in text
    assert "server holds license 1" in text


def test_workers_that_are_all_held_are_told_of():
    w = World(cpus=4)
    w.scheduler.worker_limit.bound(1)
    w.submit("server", num_cpus=0, is_endless=True)
    w.advance(AFTER)
    w.submit("train")
    w.advance(AFTER)
    ((_, text),) = w.warnings
    assert text.startswith("train (task 1) has waited 5.0 s for a worker process")
    assert "there are 1, each is held without end" in text


def test_a_programs_own_limit_is_no_stall():
    w = held()
    w.join(7, limits=Limits(max_share={"GPU": 0.5}))
    w.submit("mine", num_gpus=0.5, is_endless=True, client=7)
    w.submit("more", num_gpus=0.25, client=7)
    w.advance(3 * AFTER)
    assert [name for name, _ in w.warnings] == []


def test_a_closing_node_warns_nobody():
    w = held()
    w.submit("train", num_gpus=1)
    w.close()
    w.advance(2 * AFTER)
    assert w.warnings == []


def test_one_alarm_serves_all_that_wait():
    w = held()
    before = len(w.scheduler.timers)
    for number in range(LOOKED_AT + 20):
        w.submit(f"train {number}", num_gpus=1, num_cpus=number / 64)
    assert len(w.scheduler.timers) == before + 1
    w.advance(AFTER)
    assert len(w.warnings) == LOOKED_AT
    w.advance(AFTER)
    assert len(w.warnings) == LOOKED_AT + 20


def test_time_goes_on_where_a_figure_is_rounded():
    w = World(gpus=1)
    w.advance(1 / 3)
    w.submit("long", num_gpus=0.5)
    w.submit("train", num_gpus=1)
    w.advance(1e4)
    w.submit("server", num_gpus=0.5, is_endless=True, priority=1)
    w.advance(AFTER + 1e-6)
    assert len(w.warnings) <= 1
    w.advance(2 * AFTER)
    assert len(w.warnings) == 1


def test_others_wait_for_what_is_not_held_without_end():
    w = World(cpus=4, gpus=1, resources={"license": 1})
    w.submit("server", num_gpus=1, is_endless=True)
    w.submit("long", num_cpus=0, resources={"license": 1})
    w.submit("train", num_cpus=0, resources={"license": 1})
    w.advance(10 * AFTER)
    assert w.warnings == []
    w.submit("other", num_gpus=1)
    w.advance(2 * AFTER)
    assert [name for name, _ in w.warnings] == ["other"]


def test_each_is_warned_of_when_it_has_waited_long_enough():
    w = held()
    w.submit("first", num_gpus=1)
    w.advance(AFTER / 2)
    w.submit("second", num_gpus=0.75)
    w.advance(AFTER / 2)
    assert [name for name, _ in w.warnings] == ["first"]
    w.advance(AFTER / 2)
    assert [name for name, _ in w.warnings] == ["first", "second"]


def test_a_holder_that_is_younger_than_the_wait_is_given_time():
    w = World(cpus=4, gpus=2)
    w.submit("long", num_gpus=2)
    w.submit("server", num_gpus=1, is_endless=True)
    w.submit("train", num_gpus=2, priority=-1)
    w.advance(3 * AFTER)
    w.submit("late", num_cpus=2, num_gpus=2, priority=-1)
    w.advance(AFTER / 2)
    w.finish("long")
    assert "server" in w.running
    w.advance(AFTER - 0.01)
    assert w.warnings == []
    w.advance(AFTER)
    assert {name for name, _ in w.warnings} == {"train", "late"}
