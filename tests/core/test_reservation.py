"""Nobody waits for ever while others go past him: what is kept, for whom, how long.

All of it is [B24].
"""

from collections import deque
from math import inf

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import GPU, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.reservation import STANDS, STANDS_LONGEST, reserve
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World
from tests.core.placement_group_world import GangWorld

AFTER = 1.0
PATIENCE = SchedulerConfig(reserve_after=AFTER, cancel_grace=2.0)
STEP = 0.125
LASTS = 2.0
"""Seconds that each quarter task of the stream runs."""


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


def ready_for_two(**options) -> World:
    """On two GPUs "long" holds one and "big" waits for both; its second is over."""
    w = World(gpus=2, config=PATIENCE)
    w.submit("long", num_gpus=1, **options)
    w.submit("big", num_gpus=2)
    pass_over(w)
    w.advance(AFTER)
    return w


def pass_over(w: World) -> None:
    """A small task comes and goes, past all that wait."""
    name = f"small {len(w.tasks)}"
    w.submit(name, num_cpus=0)
    w.finish(name)


def kept_for(w: World) -> str | None:
    """For whom something is kept."""
    reservation = w.scheduler.reservation
    return reservation.record.spec.name if reservation else None


def test_four_gpus_come_free_under_an_endless_stream_of_quarters():
    """It waits for its second, for the next end, and for what runs then."""
    w = World(cpus=64, gpus=4, config=PATIENCE)
    stream = Stream(w)
    w.submit("big", num_gpus=4)
    bound = STEP + AFTER + STEP + LASTS
    while "big" not in w.running:
        assert w.now <= bound
        stream.step()
    assert w.now > AFTER
    assert w.gpus_of("big") == [0, 1, 2, 3]
    waiting = w.waiting
    w.finish("big")
    assert w.running <= waiting
    assert len(w.running) == 16


def test_without_it_the_stream_would_go_past_for_ever():
    w = World(cpus=64, gpus=4, config=SchedulerConfig(reserve_after=inf))
    stream = Stream(w)
    w.submit("big", num_gpus=4)
    for _ in range(400):
        stream.step()
    assert "big" in w.waiting


def test_one_big_task_after_the_other_runs():
    w = World(cpus=64, gpus=4, config=PATIENCE)
    stream = Stream(w)
    for number in range(3):
        w.submit(f"big {number}", num_gpus=4)
    for number in range(3):
        began = w.now
        while f"big {number}" not in w.running:
            assert w.now - began <= STEP + AFTER + STEP + LASTS
            stream.step()
        w.finish(f"big {number}")


def test_nothing_is_kept_before_its_time():
    w = World(gpus=2, config=PATIENCE)
    w.submit("long", num_gpus=1)
    w.submit("big", num_gpus=2)
    pass_over(w)
    w.advance(AFTER - STEP)
    pass_over(w)
    assert kept_for(w) is None
    w.advance(STEP)
    pass_over(w)
    assert kept_for(w) == "big"
    w.submit("small", num_gpus=0.25)
    assert w.waiting == {"big", "small"}
    w.finish("long")
    assert w.gpus_of("big") == [0, 1]


def test_nothing_is_kept_for_those_behind_the_first_of_their_kind():
    """A backlog goes on at full speed, however long it has waited."""
    w = World(cpus=1, config=PATIENCE)
    for number in range(100):
        w.submit(f"t{number}")
    for number in range(50):
        w.advance(0.5)
        w.finish(f"t{number}")
        pass_over(w)
        assert kept_for(w) is None


def test_what_is_left_goes_to_others():
    w = World(cpus=8, gpus=3, config=PATIENCE)
    w.submit("long", num_gpus=1)
    w.submit("half", num_gpus=0.5)
    w.submit("big", num_gpus=2)
    w.finish("long")
    w.submit("bigger", num_gpus=3)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert kept_for(w) == "bigger"
    w.cancel("bigger")
    assert kept_for(w) is None
    w.submit("quarter", num_gpus=0.25)
    assert w.running >= {"half", "big", "quarter"}


def test_only_as_much_is_kept_as_is_needed():
    w = World(gpus=3, config=PATIENCE)
    for number in range(3):
        w.submit(f"half {number}", num_gpus=0.75)
    w.submit("whole", num_gpus=1)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert w.scheduler.reservation.barred == {"GPU": 0b001}
    w.submit("a", num_gpus=0.25)
    w.submit("b", num_gpus=0.25)
    w.submit("c", num_gpus=0.25)
    assert [w.gpus_of(name) for name in "ab"] == [[1], [2]]
    assert w.waiting == {"whole", "c"}
    w.finish("half 0")
    assert w.gpus_of("whole") == [0]


def test_the_one_for_whom_it_is_kept_takes_whatever_fits_first():
    w = World(gpus=2, config=PATIENCE)
    w.submit("a", num_gpus=1)
    w.submit("b", num_gpus=1)
    w.submit("half", num_gpus=0.5)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert w.scheduler.reservation.barred == {"GPU": 0b01}
    w.finish("b")
    assert w.gpus_of("half") == [1]
    assert kept_for(w) is None


@pytest.mark.parametrize(
    ("timeout", "passes"), [(4.0, True), (7.0, True), (7.5, False), (None, False)]
)
def test_who_gives_back_in_time_goes_past(timeout, passes):
    """ "long" has ended at 10 + 2 s, so now, at 3 s, there are 9 s less the grace."""
    w = ready_for_two(timeout=10.0)
    pass_over(w)
    assert w.scheduler.reservation.until == 12.0
    w.advance(2.0)
    w.submit("small", num_gpus=0.5, timeout=timeout)
    assert ("small" in w.running) == passes
    assert w.waiting == ({"big"} if passes else {"big", "small"})


def test_nobody_goes_past_where_nobody_knows_how_long_it_takes():
    w = ready_for_two()
    pass_over(w)
    assert w.scheduler.reservation.until == inf
    w.submit("small", num_gpus=0.5, timeout=0.5)
    assert w.waiting == {"big", "small"}


def test_who_was_let_past_does_not_put_off_what_was_promised():
    w = ready_for_two(timeout=10.0)
    pass_over(w)
    w.advance(1.0)
    w.submit("small", num_gpus=0.5, timeout=7.5)
    assert w.running == {"long", "small"}
    w.advance(1.0)
    pass_over(w)
    assert w.scheduler.reservation.until == 12.0
    w.finish("long")
    assert w.scheduler.reservation.until <= 12.0
    w.advance(9.0)
    assert w.told["small"] == "expired"
    assert w.running == {"big"}
    assert w.now <= 12.0


def test_what_was_promised_stands_though_an_urgent_task_came_between():
    w = ready_for_two(timeout=10.0)
    pass_over(w)
    w.submit("urgent", num_gpus=0.5, priority=1)
    w.advance(STANDS)
    pass_over(w)
    assert w.scheduler.reservation.until == 12.0
    w.submit("small", num_gpus=0.5, timeout=4.0)
    assert w.running == {"long", "urgent", "small"}


def test_a_plan_stands_for_a_while():
    """It looks at all workers, so it is not made anew at every event."""
    w = ready_for_two()
    pass_over(w)
    plan = w.scheduler.reservation
    w.advance(STANDS / 2)
    pass_over(w)
    assert w.scheduler.reservation is plan
    w.advance(STANDS)
    pass_over(w)
    assert w.scheduler.reservation is not plan
    assert kept_for(w) == "big"


def test_that_nothing_can_be_planned_stands_for_a_while():
    w = ready_for_two(is_endless=True)
    pass_over(w)
    [group] = w.scheduler.ready.groups()
    assert group.reserve_at == w.now + STANDS


def test_what_is_held_for_life_is_never_waited_for():
    w = ready_for_two(is_endless=True)
    for _ in range(20):
        pass_over(w)
        w.advance(STEP)
        assert kept_for(w) is None
    w.submit("small", num_gpus=0.5)
    assert w.running == {"long", "small"}


def test_what_others_hold_is_kept_beside_what_is_held_for_life():
    w = World(gpus=3, config=PATIENCE)
    w.submit("actor", num_gpus=1, is_endless=True)
    w.submit("a", num_gpus=0.5)
    w.submit("big", num_gpus=2)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert w.scheduler.reservation.barred == {"GPU": 0b110}
    w.submit("small", num_gpus=0.5)
    w.finish("a")
    assert w.gpus_of("big") == [1, 2]


def test_something_is_kept_soon_after_what_was_held_for_life_is_given_up():
    w = World(gpus=3, config=PATIENCE)
    w.submit("actor", num_gpus=1, is_endless=True)
    w.submit("a", num_gpus=0.5)
    w.submit("big", num_gpus=3)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert kept_for(w) is None
    w.finish("actor")
    w.advance(STEP)
    pass_over(w)
    assert kept_for(w) == "big"


def test_cpus_that_are_held_for_life_are_never_waited_for():
    w = World(cpus=2, config=PATIENCE)
    w.submit("actor", is_endless=True)
    w.submit("big", num_cpus=2)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert kept_for(w) is None
    w.submit("small")
    assert w.running == {"actor", "small"}


def test_one_for_whom_nothing_can_be_kept_does_not_stand_in_the_way():
    w = World(cpus=3, gpus=2, config=PATIENCE)
    w.submit("actor", num_gpus=1, num_cpus=0, is_endless=True)
    w.submit("hopeless", num_gpus=2, num_cpus=0)
    w.submit("a", num_cpus=2)
    w.submit("b", num_cpus=3)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert kept_for(w) == "b"


def test_what_is_kept_may_be_no_device():
    w = World(cpus=8, resources={"license": 1}, config=PATIENCE)
    w.submit("half", resources={"license": 0.5})
    w.submit("whole", resources={"license": 1})
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    w.submit("half again", resources={"license": 0.5})
    w.submit("none")
    assert w.running == {"half", "none"}
    w.finish("half")
    assert "whole" in w.running


def test_of_several_ends_the_latest_that_is_needed_counts():
    w = World(cpus=4, config=PATIENCE)
    for seconds in (30.0, 10.0, 20.0):
        w.submit(f"{seconds:g}", timeout=seconds)
    w.submit("three", num_cpus=3)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert w.scheduler.reservation.until == 22.0


def test_a_device_that_serves_sooner_is_kept():
    w = World(gpus=2, config=PATIENCE)
    w.submit("30", num_gpus=1, timeout=30.0)
    w.submit("10", num_gpus=1, timeout=10.0)
    w.submit("next", num_gpus=1)
    w.submit("beside", num_gpus=0.5)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    reservation = w.scheduler.reservation
    assert (reservation.barred, reservation.until) == ({"GPU": 0b10}, 12.0)


def test_a_process_that_ends_gives_back_at_once():
    w = World(gpus=2, exits=False, config=PATIENCE)
    w.submit("ends", num_gpus=1, max_calls=1)
    w.submit("long", num_gpus=1, timeout=30.0)
    w.finish("ends")
    w.submit("next", num_gpus=1)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert w.scheduler.reservation.barred == {"GPU": 0b01}


def test_only_devices_of_the_type_are_kept():
    w = World(gpu_types=["T4", "A100", "A100"], config=PATIENCE)
    w.submit("a", num_gpus=0.5, accelerator_type="A100")
    w.submit("b", num_gpus=0.5, accelerator_type="A100")
    w.submit("both", num_gpus=2, accelerator_type="A100")
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert w.scheduler.reservation.barred == {"GPU": 0b110}
    w.submit("on T4", num_gpus=0.5)
    assert w.gpus_of("on T4") == [0]


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


def test_higher_priority_takes_what_is_kept():
    w = ready_for_two()
    pass_over(w)
    w.submit("small", num_gpus=0.5)
    w.submit("urgent", num_gpus=0.5, priority=1)
    assert w.running == {"long", "urgent"}
    assert w.waiting == {"big", "small"}


def test_the_children_of_those_that_run_take_what_is_kept():
    """Their parents may be the ones that are waited for."""
    w = ready_for_two()
    pass_over(w)
    w.submit("child", num_gpus=0.5, priority=-7, parent="long")
    assert w.running == {"long", "child"}


def test_a_new_task_takes_nothing_of_what_is_kept():
    w = ready_for_two()
    pass_over(w)
    w.submit("small", num_gpus=0.5)
    w.submit("cpu")
    assert w.running == {"long", "cpu"}
    w.finish("cpu")
    w.finish("long")
    assert w.running == {"big"}
    w.finish("big")
    assert w.running == {"small"}


def test_nothing_is_kept_any_more_for_one_that_took_over_a_lease():
    w = World(gpus=1, config=PATIENCE)
    w.submit("a", num_gpus=1)
    w.submit("b", num_gpus=1)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert kept_for(w) == "b"
    w.finish("a")
    assert w.running == {"b"}
    assert kept_for(w) is None


def test_what_is_kept_for_a_task_that_is_gone_is_free():
    w = ready_for_two()
    pass_over(w)
    w.submit("small", num_gpus=0.5)
    assert w.waiting == {"big", "small"}
    w.cancel("big")
    assert kept_for(w) is None
    assert w.running == {"long", "small"}


def test_what_is_kept_for_a_task_whose_time_is_up_is_free():
    w = World(gpus=2, config=PATIENCE)
    w.submit("long", num_gpus=1)
    w.submit("big", num_gpus=2, timeout=2.0)
    w.submit("small", num_gpus=0.5)
    w.advance(AFTER)
    pass_over(w)
    w.finish("small")
    w.submit("small again", num_gpus=0.5)
    w.advance(5.0)
    assert w.told["big"] == "expired"
    assert w.running == {"long", "small again"}


def test_one_reservation_at_a_time():
    w = World(gpus=2, config=PATIENCE)
    w.submit("long", num_gpus=1)
    w.submit("big", num_gpus=2)
    w.submit("half", num_gpus=0.5)
    w.submit("whole", num_gpus=1)
    pass_over(w)
    w.advance(AFTER)
    pass_over(w)
    assert kept_for(w) == "big"
    w.finish("half")
    assert w.waiting == {"big", "whole"}
    w.finish("long")
    assert w.running == {"big"}


def test_cpus_serve_others_while_devices_are_awaited():
    """A GPU may be held for an hour; who needs CPUs alone shall not wait for that."""
    w = World(cpus=2, gpus=1)
    w.submit("training", num_gpus=1)
    w.submit("next training", num_gpus=1)
    w.submit("step")
    w.finish("step")
    w.advance(60)
    w.submit("first")
    w.finish("first")
    assert w.scheduler.reservation is not None
    w.submit("second")
    assert "second" in w.running


def test_they_are_kept_once_the_devices_are_there():
    w = World(cpus=2, gpus=1)
    w.submit("long", num_cpus=1)
    w.submit("wide", num_cpus=2, num_gpus=1)
    w.submit("step")
    w.finish("step")
    w.advance(2)
    w.submit("late")
    assert w.waiting == {"wide", "late"}
    w.finish("long")
    assert w.running == {"wide"}


def test_a_plan_stands_for_longer_where_nothing_has_come_back():
    w = ready_for_two()
    pass_over(w)
    w.advance(2 * STANDS)
    w.tell(Scheduler.wake)
    plan = w.scheduler.reservation
    w.advance(2 * STANDS)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation is plan
    w.advance(STANDS_LONGEST)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation is not plan
    assert kept_for(w) == "big"


def test_what_is_only_tried_does_not_change_a_plan():
    """A group that does not fit takes one bundle and gives it back, at each look."""
    w = GangWorld(gpus=3, config=PATIENCE)
    w.submit("long", num_gpus=1)
    w.placement_group("gang", {"GPU": 0.7}, {"GPU": 0.7}, {"GPU": 0.6})
    w.advance(AFTER)
    w.tell(Scheduler.wake)
    plan = w.scheduler.reservation
    assert plan is not None
    w.advance(2 * STANDS)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation is plan


def test_of_very_many_devices_the_first_that_end_some_time_are_kept():
    """Not all are compared; those that are held for life do not count."""
    w = World(cpus=200, gpus=100, config=SchedulerConfig(reserve_after=0.0))
    for number in range(100):
        is_endless = number < 50
        w.submit(f"t{number}", num_gpus=1, is_endless=is_endless, max_calls=1)
    w.submit("wide", num_gpus=2)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation.barred == {GPU: 3 << 50}
    w.advance(2 * STANDS)
    w.finish("t90")
    assert w.scheduler.reservation.barred == {GPU: 1 << 90 | 1 << 50}
    w.finish("t99")
    assert "wide" in w.running


def test_one_that_could_begin_sooner_is_found_among_those_that_are_compared():
    w = World(cpus=200, gpus=60, config=SchedulerConfig(reserve_after=0.0))
    for number in range(60):
        timeout = 5.0 if number == 20 else None
        w.submit(f"t{number}", num_gpus=1, timeout=timeout)
    w.submit("wide", num_gpus=2)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation.barred == {GPU: 1 << 20 | 1}
