"""Nobody waits for ever while others go past: what is kept, for whom, how long.

All of it is [B24].
"""

from collections import deque

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.reservation import STANDS, reserve
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, pass_over, submit

AFTER = 1.0


PATIENCE = SchedulerConfig(reserve_after=AFTER, cancel_grace=2.0)


STEP = 0.125


LASTS = 2.0


class Stream:
    """Quarter tasks without end: as one ends, another comes; 16 run on four GPUs."""

    def __init__(self, w: World, **options) -> None:
        self.w = w
        self._options = options
        self._running = deque()
        self._count = 0
        for _ in range(16):
            self._submit()

    def _submit(self) -> None:
        name = f"q{self._count}"
        self._count += 1
        self.w.submit(name, num_gpus=0.25, **self._options)
        self._running.append(name)

    def step(self) -> None:
        """An eighth of a second passes, and with it the oldest task."""
        self.w.advance(STEP)
        if self._running[0] in self.w.running:
            self.w.finish(self._running.popleft())
        self._submit()


def kept_after(w: World, seconds: float = AFTER) -> dict[str, int] | None:
    """The devices that are kept, once those that wait now have done so for long."""
    pass_over(w)
    w.advance(seconds)
    pass_over(w)
    reservation = w.scheduler.reservation
    return reservation.barred if reservation else None


def ready_for_two(**options) -> World:
    """On two GPUs "long" holds one and "big" waits for both; its second is over."""
    w = World(gpus=2, config=PATIENCE)
    w.submit("long", num_gpus=1, **options)
    w.play(f"submit big gpus=2; pass_over; advance {AFTER}")
    return w


def test_big_tasks_run_one_after_the_other_under_an_endless_stream_of_quarters():
    """Each waits for its second, for the next end, and for what runs then."""
    w = World(cpus=64, gpus=4, config=PATIENCE)
    stream = Stream(w)
    submit(w, [f"big {n}" for n in range(3)], num_gpus=4)
    for number in range(3):
        began = w.now
        while f"big {number}" not in w.running:
            assert w.now - began <= STEP + AFTER + STEP + LASTS
            stream.step()
        assert w.gpus_of(f"big {number}") == [0, 1, 2, 3]
        w.finish(f"big {number}")
    assert len(w.running) == 16


def test_what_was_promised_stands_though_an_urgent_task_came_between():
    w = ready_for_two(timeout=10.0).play("pass_over; submit urgent gpus=0.5 priority=1")
    w.play(f"advance {STANDS}; pass_over")
    assert w.scheduler.reservation.until == 12.0
    w.play("submit small gpus=0.5 timeout=4.0; running = long small urgent")


def test_what_is_held_for_life_is_never_waited_for():
    w = ready_for_two(is_endless=True).play("pass_over")
    w.play("kept = None; submit small gpus=0.5; running = long small")
    w = World(cpus=3, gpus=2, config=PATIENCE).play("""
        submit actor gpus=1 is_endless=True; submit no-hope gpus=2 cpus=0
        submit all-cpus cpus=3; submit a; submit b cpus=2
    """)
    assert kept_after(w) == {}
    w.play("kept = b (the others do not stand in its way); finish actor")
    w.play(f"advance {STEP}; pass_over; kept = all-cpus")


def test_the_latest_end_that_is_needed_counts_and_the_device_that_serves_sooner():
    w = World(cpus=4, gpus=2, config=PATIENCE)
    for seconds in (30.0, 10.0, 20.0):
        w.submit(f"{seconds:g}", timeout=seconds)
    w.submit("three", num_cpus=3)
    assert kept_after(w) == {}
    assert w.scheduler.reservation.until == 22.0
    w = World(gpus=2, config=PATIENCE)
    w.submit("30", num_gpus=1, timeout=30.0)
    w.submit("10", num_gpus=1, timeout=10.0)
    w.submit("next", num_gpus=1)
    assert kept_after(w) == {"GPU": 0b10}
    assert w.scheduler.reservation.until == 12.0
    w = World(gpus=2, exits=False, config=PATIENCE).play("""
        submit ends gpus=1 max_calls=1; submit long gpus=1 timeout=30.0; finish ends
        submit next gpus=1
    """)
    assert kept_after(w) == {"GPU": 0b01}, "it gives back at once"


def test_each_kind_of_device_is_kept_by_itself():
    kinds = [DeviceSet(kind, [Device(0), Device(1)]) for kind in ("GPU", "NPU")]
    scheduler = Scheduler(Ledger({}, kinds))
    for number, (gpus, npus) in enumerate([(5_000, UNIT), (UNIT, 0), (0, 2 * UNIT)]):
        request = Request.of({}, {"GPU": gpus, "NPU": npus})
        spec = TaskSpec(f"t{number}", Shape(request), timeout=10.0 * number)
        scheduler.submit(0.0, TaskId(number), spec)
    reservation = reserve(scheduler, scheduler.tasks[TaskId(2)])
    assert reservation is not None
    assert (reservation.barred, reservation.until) == ({"NPU": 0b11}, 2.0)


@pytest.mark.parametrize(
    "options", [{"priority": 1}, {"priority": -7, "parent": "long"}]
)
def test_higher_priority_and_children_of_those_that_run_take_what_is_kept(options):
    """Their parents may be the ones that are waited for."""
    w = ready_for_two().play("pass_over; submit small gpus=0.5; submit cpu")
    w.submit("urgent", num_gpus=0.5, **options)
    assert (w.running, w.waiting) == ({"long", "urgent", "cpu"}, {"big", "small"})


def test_cpus_serve_others_while_devices_are_awaited():
    """A GPU may be held for an hour; who needs CPUs alone shall not wait for that."""
    w = World(cpus=2, gpus=1).play("submit training gpus=1")
    w.submit("next-training", num_gpus=1)
    w.play("submit step; finish step; advance 60; submit first; finish first")
    assert w.scheduler.reservation is not None
    w.play("submit second; running has second")
