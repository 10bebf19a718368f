"""Nobody waits for ever while others go past: what is kept, for whom, how long.

All of it is [B24].
"""

from collections import deque
from math import inf

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Device, DeviceSelector, Request, Shape, TaskSpec
from aiogpu.core.model.units import GPU, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.reservation import STANDS, STANDS_LONGEST, reserve
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, finish, pass_over, submit

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


def test_without_it_the_stream_would_go_past_for_ever():
    w = World(cpus=64, gpus=4, config=SchedulerConfig(reserve_after=inf))
    stream = Stream(w)
    w.submit("big", num_gpus=4)
    for _ in range(100):
        stream.step()
    assert "big" in w.waiting


def test_nothing_is_kept_before_its_time():
    w = World(gpus=2, config=PATIENCE).play("""
        submit long gpus=1; submit big gpus=2; pass_over
    """)
    w.play(f"""
        advance {AFTER - STEP}; pass_over; kept = None
        advance {STEP}; pass_over; kept = big
        submit small gpus=0.25; waiting = big small
        finish long; gpus_of big = 0 1
    """)


def test_nothing_is_kept_for_those_behind_the_first_of_their_shape():
    """A backlog goes on at full speed, however long it has waited."""
    w = World(cpus=1, config=PATIENCE)
    submit(w, [f"t{n}" for n in range(100)])
    for number in range(50):
        w.advance(0.5)
        w.finish(f"t{number}")
        w.play("pass_over; kept = None")


def test_only_as_much_is_kept_as_is_needed():
    w = World(gpus=3, config=PATIENCE)
    submit(w, [f"half {n}" for n in range(3)], num_gpus=0.75)
    w.play(f"submit whole gpus=1; pass_over; advance {AFTER}; pass_over")
    assert w.scheduler.reservation.barred == {"GPU": 0b001}
    submit(w, "a b c", num_gpus=0.25)
    assert [w.gpus_of(name) for name in "ab"] == [[1], [2]]
    assert w.waiting == {"whole", "c"}
    w.finish("half 0")
    assert w.gpus_of("whole") == [0]


def test_the_one_for_whom_it_is_kept_takes_whatever_fits_first():
    w = World(gpus=2, config=PATIENCE).play("""
        submit a b gpus=1; submit half gpus=0.5; pass_over
    """)
    w.play(f"advance {AFTER}; pass_over")
    assert w.scheduler.reservation.barred == {"GPU": 0b01}
    w.play("finish b; gpus_of half = 1; kept = None")


@pytest.mark.parametrize(
    ("timeout", "passes"), [(4.0, True), (7.0, True), (7.5, False), (None, False)]
)
def test_who_gives_back_in_time_goes_past(timeout, passes):
    """ "long" has ended at 10 + 2 s, so now, at 3 s, there are 9 s less the grace."""
    w = ready_for_two(timeout=10.0).play("pass_over")
    assert w.scheduler.reservation.until == 12.0
    w.advance(2.0)
    w.submit("small", num_gpus=0.5, timeout=timeout)
    assert ("small" in w.running) == passes
    assert w.waiting == ({"big"} if passes else {"big", "small"})


def test_nobody_goes_past_where_nobody_knows_how_long_it_takes():
    w = ready_for_two().play("pass_over")
    assert w.scheduler.reservation.until == inf
    w.play("submit small gpus=0.5 timeout=0.5; waiting = big small")


def test_who_was_let_past_does_not_put_off_what_was_promised():
    w = ready_for_two(timeout=10.0).play("""
        pass_over; advance 1.0; submit small gpus=0.5 timeout=7.5; running = long small
        advance 1.0; pass_over
    """)
    assert w.scheduler.reservation.until == 12.0
    w.finish("long")
    assert w.scheduler.reservation.until <= 12.0
    w.play("advance 9.0; told has small:expired; running = big")
    assert w.now <= 12.0


def test_what_was_promised_stands_though_an_urgent_task_came_between():
    w = ready_for_two(timeout=10.0).play("pass_over; submit urgent gpus=0.5 priority=1")
    w.play(f"advance {STANDS}; pass_over")
    assert w.scheduler.reservation.until == 12.0
    w.play("submit small gpus=0.5 timeout=4.0; running = long small urgent")


def test_a_plan_stands_for_a_while():
    """It looks at all workers, so it is not made anew at every event."""
    w = ready_for_two().play("pass_over")
    plan = w.scheduler.reservation
    w.play(f"advance {STANDS / 2}; pass_over")
    assert w.scheduler.reservation is plan
    w.play(f"advance {STANDS}; pass_over")
    assert w.scheduler.reservation is not plan
    assert w.kept == "big"


def test_that_nothing_can_be_planned_stands_for_a_while():
    w = ready_for_two(is_endless=True).play("pass_over")
    [group] = w.scheduler.ready.groups()
    assert group.reserve_at == w.now + STANDS


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


def test_what_others_hold_is_kept_beside_what_is_held_for_life():
    w = World(gpus=3, config=PATIENCE).play("""
        submit actor gpus=1 is_endless=True; submit a gpus=0.5; submit big gpus=2
        pass_over
    """)
    w.play(f"advance {AFTER}; pass_over")
    assert w.scheduler.reservation.barred == {"GPU": 0b110}
    w.play("submit small gpus=0.5; finish a; gpus_of big = 1 2")


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


def test_only_devices_that_fulfil_type_and_conditions_are_kept():
    w = World(gpu_types=["T4", "A100", "A100"], config=PATIENCE)
    submit(w, "a b", num_gpus=0.5, accelerator_type="A100")
    w.submit("both", num_gpus=2, accelerator_type="A100")
    assert kept_after(w) == {"GPU": 0b110}
    w.play("submit on-T4 gpus=0.5; gpus_of on-T4 = 0")
    cards = [Device(0), Device(1, compute_capability=(9, 0))]
    w = World(devices=cards, config=PATIENCE)
    fast = DeviceSelector(least_capability=(9, 0))
    w.submit("c", num_gpus=0.5, where=fast)
    w.submit("d", num_gpus=1, where=fast)
    assert kept_after(w) == {"GPU": 0b10}


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


@pytest.mark.parametrize("how", ["cancelled", "expired", "granted"])
def test_what_was_kept_is_free_when_the_task_is_gone_or_runs(how):
    w = World(gpus=2, config=PATIENCE)
    w.play("submit long gpus=1; submit big gpus=2 timeout=2.0")
    assert kept_after(w) == {"GPU": 0b11}
    w.play("submit small gpus=0.5; waiting = big small")
    if how == "cancelled":
        w.cancel("big")
    elif how == "expired":
        w.advance(5.0)
    else:
        w.play("finish long; running = big; finish big")
    w.play("kept = None; running has small")


def test_cpus_serve_others_while_devices_are_awaited():
    """A GPU may be held for an hour; who needs CPUs alone shall not wait for that."""
    w = World(cpus=2, gpus=1).play("submit training gpus=1")
    w.submit("next-training", num_gpus=1)
    w.play("submit step; finish step; advance 60; submit first; finish first")
    assert w.scheduler.reservation is not None
    w.play("submit second; running has second")


def test_they_are_kept_once_the_devices_are_there():
    World(cpus=2, gpus=1).play("""
        submit long cpus=1; submit wide cpus=2 gpus=1; submit step; finish step
        advance 2; submit late; waiting = late wide
        finish long; running = wide
    """)


def test_a_plan_stands_for_longer_where_nothing_has_come_back():
    w = ready_for_two().play("pass_over")
    w.advance(2 * STANDS)
    w.tell(Scheduler.wake)
    plan = w.scheduler.reservation
    w.advance(2 * STANDS)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation is plan
    w.advance(STANDS_LONGEST)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation is not plan
    assert w.kept == "big"


def test_what_is_only_tried_does_not_change_a_plan():
    """A group that does not fit takes one bundle and gives it back, at each look."""
    w = World(gpus=3, config=PATIENCE)
    w.play("submit long gpus=1; placement_group gang GPU:0.7 GPU:0.7 GPU:0.6")
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
    finish(w, "t90", after=2 * STANDS)
    assert w.scheduler.reservation.barred == {GPU: 1 << 90 | 1 << 50}
    w.play("finish t99; running has wide")


def test_one_that_could_begin_sooner_is_found_among_those_that_are_compared():
    w = World(cpus=200, gpus=60, config=SchedulerConfig(reserve_after=0.0))
    for number in range(60):
        timeout = 5.0 if number == 20 else None
        w.submit(f"t{number}", num_gpus=1, timeout=timeout)
    w.submit("wide", num_gpus=2)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation.barred == {GPU: 1 << 20 | 1}
