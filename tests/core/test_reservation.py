"""Reservations: no task waits for ever while others overtake it."""

from collections import deque

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.contention.reservation import REPLAN_AFTER, reserve
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.state import STALLED_AFTER
from tests.core.builders import (
    World,
    pass_over,
    status_of,
    submit,
    why_of,
)

pytestmark = pytest.mark.usefixtures("few")

AFTER = 1.0


PATIENCE = SchedulerConfig(reserve_after=AFTER, cancel_grace=2.0)


STEP = 0.125


LASTS = 2.0


class Stream:
    """An endless stream of quarter-GPU tasks; 16 run on four GPUs."""

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
        """Advance by 1/8 s and finish the oldest task."""
        self.w.advance(STEP)
        if self._running[0] in self.w.running:
            self.w.finish(self._running.popleft())
        self._submit()


def kept_after(w: World, seconds: float = AFTER) -> dict[str, int] | None:
    """Return the reserved devices after the waiting tasks have waited long."""
    pass_over(w)
    w.advance(seconds)
    pass_over(w)
    reservation = w.scheduler.reservation
    return reservation.barred if reservation else None


def ready_for_two(**options) -> World:
    """Two GPUs: "long" holds one, "big" has waited a second for both."""
    w = World(gpus=2, config=PATIENCE)
    w.submit("long", num_gpus=1, **options)
    w.play(f"submit big gpus=2; pass_over; advance {AFTER}")
    return w


def test_big_tasks_run_under_an_endless_stream_of_small_ones():
    """Each waits one second, for the next end, and for the tasks that run then."""
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


@pytest.mark.parametrize(
    ("timeout", "passes"), [(4.0, True), (7.0, True), (7.5, False), (None, False)]
)
def test_task_that_ends_in_time_passes_the_reservation(timeout, passes):
    """ "long" ends at 12 s at the latest; at 3 s, 9 s minus the grace remain."""
    w = ready_for_two(timeout=10.0).play("pass_over")
    assert w.scheduler.reservation.until == 12.0
    w.advance(2.0)
    w.submit("small", num_gpus=0.5, timeout=timeout)
    assert ("small" in w.running) == passes
    assert w.waiting == ({"big"} if passes else {"big", "small"})


def test_renewed_reservation_keeps_its_promised_time():
    w = ready_for_two(timeout=10.0).play("pass_over; submit urgent gpus=0.5 priority=1")
    w.play(f"advance {REPLAN_AFTER}; pass_over")
    assert w.scheduler.reservation.until == 12.0
    w.play("submit small gpus=0.5 timeout=4.0; running = long small urgent")


def test_plan_is_kept_for_a_while():
    """Planning costs O(workers), so it is not repeated at every event."""
    w = ready_for_two().play("pass_over")
    plan = w.scheduler.reservation
    w.play(f"advance {REPLAN_AFTER / 2}; pass_over")
    assert w.scheduler.reservation is plan
    w.play(f"advance {REPLAN_AFTER}; pass_over")
    assert w.scheduler.reservation is not plan
    assert w.kept == "big"


def test_no_reservation_for_resources_held_by_endless_tasks():
    w = ready_for_two(is_endless=True).play("pass_over")
    w.play("kept = None; submit small gpus=0.5; running = long small")
    w = World(cpus=3, gpus=2, config=PATIENCE).play("""
        submit actor gpus=1 is_endless=True; submit no-hope gpus=2 cpus=0
        submit all-cpus cpus=3; submit a; submit b cpus=2
    """)
    assert kept_after(w) == {}
    w.play("kept = b (the others do not stand in its way); finish actor")
    w.play(f"advance {STEP}; pass_over; kept = all-cpus")


def test_plan_ends_with_the_latest_needed_lease():
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


def test_each_kind_of_device_is_reserved_separately():
    kinds = [DeviceSet(kind, [Device(0), Device(1)]) for kind in ("GPU", "NPU")]
    scheduler = Scheduler(Ledger({}, kinds))
    for number, (gpus, npus) in enumerate([(5_000, UNIT), (UNIT, 0), (0, 2 * UNIT)]):
        request = Request.of({}, {"GPU": gpus, "NPU": npus})
        spec = TaskSpec(f"t{number}", Shape(request), timeout=10.0 * number)
        scheduler.submit(0.0, TaskId(number), spec)
    reservation = reserve(scheduler, scheduler.tasks[TaskId(2)])
    assert reservation is not None
    assert (reservation.barred, reservation.until) == ({"NPU": 0b11}, 2.0)


def test_priority_passes_the_reservation():
    ready_for_two().play("""
        pass_over; submit small gpus=0.5; submit cpu; submit urgent gpus=0.5 priority=1
        running = long urgent cpu; waiting = big small
    """)


def test_child_passes_the_reservation_while_the_reservation_waits_for_its_parent():
    ready_for_two().play("""
        pass_over; submit child gpus=0.5 parent=long; submit cpu parent=long
        waiting = big child; wait_for long child; waiting = big; running has child
        finish child cpu long; running = big
    """)


def test_grandchild_passes_the_reservation_as_well():
    ready_for_two().play("""
        pass_over; submit child parent=long; wait_for long child
        submit below gpus=0.5 parent=child; waiting = big below
        wait_for child below; running has below
    """)


def test_child_of_a_task_without_reserved_resources_waits():
    w = World(gpus=2, config=PATIENCE).play("submit parent; submit long gpus=1")
    w.play(f"submit big gpus=2; pass_over; advance {AFTER}; pass_over; kept = big")
    w.play("submit child gpus=0.5 parent=parent; wait_for parent child")
    w.play("waiting = big child; finish long; running = big parent; finish big")
    w.play("running = parent child")


@pytest.mark.parametrize("is_late", [False, True])
def test_child_passes_a_reservation_that_waits_in_vain(is_late):
    """The holder waits for an actor, which waits for the child: nobody tells."""
    w = World(gpus=2, config=PATIENCE)
    w.submit("actor", num_cpus=0, is_endless=True, max_calls=1)
    w.play(f"submit long gpus=1; submit big gpus=2; pass_over; advance {AFTER}")
    w.play("pass_over; kept = big")
    w.tell(Scheduler.wait_for, w.tasks["long"].id, (), elsewhere=True)
    w.play("submit child gpus=1 parent=actor; waiting = big child")
    if is_late:
        w.advance(STALLED_AFTER)
        w.play("pass_over; running has child; finish child long; running has big")
    else:
        w.play("finish long; running has big; waiting = child")


@pytest.mark.parametrize("amounts", [{"num_cpus": 2}, {"num_gpus": 1}])
@pytest.mark.parametrize("is_endless", [False, True], ids=["task", "actor"])
def test_reservation_holds_against_an_endless_stream_of_children(is_endless, amounts):
    w = World(cpus=2, gpus=1, config=PATIENCE)
    w.submit("pump", num_cpus=0, is_endless=is_endless, max_calls=int(is_endless))
    count, running = 0, deque()

    def refill() -> None:
        nonlocal count
        while len(w.waiting) < 5:
            count += 1
            w.submit(f"child {count}", num_gpus=0.5, parent="pump")
            running.append(f"child {count}")
        if not is_endless:
            w.wait_for("pump", *running)

    refill()
    w.submit("big", **amounts)
    began = w.now
    while "big" not in w.running:
        assert w.now - began <= AFTER + 3 * STEP
        w.advance(STEP)
        first = next(name for name in running if name in w.running)
        running.remove(first)
        w.finish(first)
        refill()


@pytest.mark.parametrize("how", ["cancelled", "expired", "granted"])
def test_reservation_ends_with_its_task(how):
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


def test_cpus_are_not_reserved_while_devices_are_awaited():
    """A GPU may be held for an hour; tasks that need only CPUs must not wait for it."""
    w = World(cpus=2, gpus=1).play("submit training gpus=1")
    w.submit("next-training", num_gpus=1)
    w.play("submit step; finish step; advance 60; submit first; finish first")
    assert w.scheduler.reservation is not None
    w.play("submit second; running has second")


def test_cpus_are_reserved_once_the_devices_are_free():
    World(cpus=2, gpus=1).play("""
        submit long cpus=1; submit wide cpus=2 gpus=1; submit step; finish step
        advance 2; submit late; waiting = late wide
        finish long; running = wide
    """)


def test_failed_trials_do_not_change_a_plan():
    """A group that does not fit takes and returns a bundle at each attempt."""
    w = World(gpus=3, config=PATIENCE)
    w.play("submit long gpus=1; placement_group gang GPU:0.7 GPU:0.7 GPU:0.6")
    w.advance(AFTER)
    w.tell(Scheduler.wake)
    plan = w.scheduler.reservation
    assert plan is not None
    w.advance(2 * REPLAN_AFTER)
    w.tell(Scheduler.wake)
    assert w.scheduler.reservation is plan


# Placement: order, shares, and device memory.


def test_order_over_shapes_is_priority_then_arrival():
    w = World(cpus=1, resources={"license": 1}).play("""
        submit running first second; submit urgent resources=license:1 priority=1
        submit least priority=-1
    """)
    for name in ("running", "urgent", "first", "second", "least"):
        assert w.running == {name}
        w.finish(name)


def test_task_that_does_not_fit_blocks_only_its_shape():
    w = World(cpus=2).play("submit one; submit two cpus=2")
    w.play("""
        submit two-again cpus=2; submit one-more; submit nothing cpus=0
        running = nothing one one-more; waiting = two two-again
    """)


# Device memory.


def reason(w: World) -> str:
    """Return the reason of the first waiting task."""
    return status_of(w).shapes[0].reason


def test_why_names_the_holders_of_gpu_memory():
    w = World(gpus=2, gpu_memory="80GiB").play("""
        submit zeroth cpus=0; submit a gpu_memory=60GiB
        submit b gpus=0.25 gpu_memory=70GiB; submit c gpu_memory=40GiB
    """)
    assert [w.gpus_of(name) for name in "ab"] == [[0], [1]]
    short = "waits for GPU memory 40GiB (free by device: 0: 20GiB, 1: 10GiB)"
    assert reason(w) == short
    assert str(why_of(w, "c")) == (
        "c (task 3) has waited 0.0 s for {CPU: 1, gpu_memory: 40GiB}\n"
        "  GPU memory 40GiB: 30GiB of 160GiB free (0: 20GiB, 1: 10GiB)\n"
        "    60GiB of GPU 0: held by a (pid 102, for 0.0 s)\n"
        "    70GiB of GPU 1: held by b (pid 103, for 0.0 s)"
    )
    w.play("finish b; gpus_of c = 1")


BYTES = {
    "GPU memory 40GiB (free by device: 0: 20GiB)": ("gpu_memory=60GiB", "gpus=0.5"),
    "GPU memory 80GiB (free by device: 0: 79GiB)": ("gpu_memory=1GiB", "gpus=1"),
    "GPU 0.5 (free by device: 0: 0.3)": (
        *("gpus=0.7 gpu_memory=1GiB", "gpus=0.5 gpu_memory=1GiB"),
    ),
}


@pytest.mark.parametrize("short", BYTES)
def test_task_waits_for_shares_and_memory(short):
    held, asked = BYTES[short]
    w = World(gpus=1, gpu_memory="80GiB").play(f"submit a {held}; submit b {asked}")
    assert reason(w) == f"waits for {short}"
    w.play("finish a; running = b")
