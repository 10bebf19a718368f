"""[B44] GPU memory is kept for those who ask for it: who waits, why, and until when."""

from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.observe.status import report
from aiogpu.testing import World

GIB = 1 << 30


def told(w: World, name: str) -> str:
    """Why a task waits."""
    record = w.scheduler.tasks[w.tasks[name].id]
    return str(why(w.scheduler, record, {}, w.now))


def reason(w: World) -> str:
    """Why the first of those that wait does, in a line."""
    return snapshot(w.scheduler, {}, w.now).shapes[0].reason


def test_a_task_that_asks_for_memory_waits_for_it():
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("zeroth", num_cpus=0)
    w.submit("a", gpu_memory="60GiB")
    w.submit("b", gpu_memory="70GiB")
    w.submit("c", gpu_memory="40GiB")
    assert [w.gpus_of(name) for name in "ab"] == [[0], [1]]
    assert w.waiting == {"c"}
    short = "waits for GPU memory 40GiB (free by device: 0: 20GiB, 1: 10GiB)"
    assert reason(w) == short
    assert told(w, "c") == (
        "c (task 3) has waited 0.0 s for {CPU: 1, gpu_memory: 40GiB}\n"
        "  GPU memory 40GiB: 30GiB of 160GiB free (0: 20GiB, 1: 10GiB)\n"
        "    60GiB of GPU 0: held by a (its worker is being forked, for 0.0 s)\n"
        "    70GiB of GPU 1: held by b (its worker is being forked, for 0.0 s)"
    )
    w.finish("b")
    assert w.gpus_of("c") == [1]


def test_a_share_waits_for_its_part_of_the_memory():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", gpu_memory="60GiB")
    w.submit("b", num_gpus=0.5)
    assert reason(w) == "waits for GPU memory 40GiB (free by device: 0: 20GiB)"
    w.submit("c", num_gpus=0.25)
    assert w.running == {"a", "c"}
    w.finish("a")
    assert w.running == {"b", "c"}


def test_a_whole_device_waits_until_nobody_has_any_of_its_memory():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", gpu_memory="1GiB")
    w.submit("b", num_gpus=1)
    assert reason(w) == "waits for GPU memory 80GiB (free by device: 0: 79GiB)"
    w.finish("a")
    assert w.running == {"b"}


def test_shares_are_told_where_those_are_short():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", num_gpus=0.7, gpu_memory="1GiB")
    w.submit("b", num_gpus=0.5, gpu_memory="1GiB")
    assert reason(w) == "waits for GPU 0.5 (free by device: 0: 0.3)"


def test_only_devices_that_could_serve_it_are_told():
    cards = [Device(0, memory=16 * GIB), Device(1, memory=80 * GIB), Device(2)]
    w = World(devices=cards)
    w.submit("a", num_gpus=0.5, gpu_memory="70GiB")
    w.submit("b", num_gpus=0.5, gpu_memory="20GiB")
    assert reason(w) == "waits for GPU memory 20GiB (free by device: 1: 10GiB)"
    w.tell(Scheduler.device_changed, "GPU", 1, Cause.SICK, "XID 79")
    assert reason(w) == "waits for GPU 0.5 (free by device: 1: set aside)"


def test_status_shows_who_has_reserved_how_much():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", gpu_memory="20GiB")
    w.submit("b", num_gpus=0.25)
    status = snapshot(w.scheduler, {}, w.now)
    (device,) = status.devices
    assert (device.free, device.memory_reserved) == (0.75, 40 * GIB)
    assert [one.memory for one in device.holders] == [20 * GIB, 20 * GIB]
    assert (status.total["gpu_memory"], status.available["gpu_memory"]) == (
        80 * GIB,
        40 * GIB,
    )
    shown = report(status)
    assert "gpu_memory  40GiB of 80GiB free" in shown
    assert "\n  20GiB  a  " in shown
    assert "\n  0.25   b  " in shown
    w.finish("a")
    w.finish("b")
    assert "gpu_memory" not in report(snapshot(w.scheduler, {}, w.now))


def test_memory_is_held_until_the_device_is_seen_free():
    w = World(gpus=1, gpu_memory="80GiB")
    w.settles = True
    w.submit("a", gpu_memory="60GiB", max_calls=1)
    w.finish("a")
    w.submit("b", gpu_memory="30GiB")
    assert w.waiting == {"b"}
    assert "60GiB  (ended)" in report(snapshot(w.scheduler, {}, w.now))
    w.run_dry()
    assert w.told == {"a": "settled", "b": "settled"}


def test_what_a_large_one_needs_is_kept_for_it():
    """[B24]"""
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("a", gpu_memory="30GiB", timeout=60, cancel_grace=0)
    w.submit("b", gpu_memory="30GiB", timeout=20, cancel_grace=0)
    w.submit("other", gpu_memory="30GiB", timeout=90, cancel_grace=0)
    assert [w.gpus_of(name) for name in ("a", "b", "other")] == [[0], [0], [1]]
    w.submit("large", gpu_memory="60GiB")
    w.advance(2)
    w.submit("late", gpu_memory="20GiB")
    reservation = w.scheduler.reservation
    assert (reservation.barred, reservation.until) == ({"GPU": 0b01}, 60)
    assert w.gpus_of("late") == [1]
    w.submit("later", gpu_memory="31GiB")
    assert w.waiting == {"large", "later"}
    w.advance(19)  # what is left of "b" is not enough
    assert w.waiting == {"large", "later"}
    w.finish("a")
    assert w.gpus_of("large") == [0]


def test_a_whole_device_is_kept_where_memory_comes_free_soonest():
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("a", gpu_memory="60GiB", timeout=60, cancel_grace=0)
    w.submit("b", gpu_memory="60GiB", timeout=30, cancel_grace=0)
    w.submit("whole", num_gpus=1)
    w.advance(2)
    w.submit("c", num_gpus=0.1)
    assert w.scheduler.reservation.barred == {"GPU": 0b10}
    assert w.gpus_of("c") == [0]


def test_memory_that_is_held_for_life_is_not_waited_for():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("actor", gpu_memory="60GiB", is_endless=True)
    w.submit("a", gpu_memory="10GiB")
    w.submit("large", gpu_memory="30GiB")
    w.advance(2)
    w.submit("b", gpu_memory="10GiB")
    assert w.scheduler.reservation is None
    assert w.running == {"actor", "a", "b"}
    assert "held without end" in told(w, "large")


def test_a_child_that_needs_the_memory_of_its_parent_can_never_run():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("parent", gpu_memory="60GiB")
    w.submit("small", gpu_memory="20GiB", parent="parent")
    w.wait_for("parent", "small")
    assert w.running == {"parent", "small"}
    w.finish("small")
    w.submit("child", gpu_memory="30GiB", parent="parent")
    w.wait_for("parent", "child")
    assert w.told["child"] == "deadlocked"
    assert w.tasks["child"].reason == (
        "child asks for {CPU: 1, gpu_memory: 30GiB}, and those that wait hold it: "
        "parent holds {CPU: 1, gpu_memory: 60GiB} and waits for child"
    )


def test_a_child_waits_for_memory_that_others_give_back():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("other", gpu_memory="40GiB")
    w.submit("parent", gpu_memory="20GiB")
    w.submit("child", gpu_memory="50GiB", parent="parent")
    w.wait_for("parent", "child")
    assert w.waiting == {"child"}
    w.finish("other")
    assert w.running == {"parent", "child"}


def test_a_worker_is_used_again_by_those_with_its_limit():
    """[B27]"""
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", gpu_memory="10GiB")
    first = w.worker_of("a")
    w.finish("a")
    w.submit("b", gpu_memory="20GiB")
    assert w.worker_of("b") != first
    w.submit("c", gpu_memory="10GiB")
    assert w.worker_of("c") == first
    w.submit("d", num_gpus=0.25, gpu_memory="share")
    by_share = w.worker_of("d")
    w.finish("d")
    w.submit("e", num_gpus=0.5, gpu_memory="share")
    assert w.worker_of("e") not in (first, by_share)
    w.finish("e")
    w.submit("f", num_gpus=0.25)
    assert w.worker_of("f") not in (first, by_share)
    w.submit("g", num_gpus=0.25, gpu_memory="share")
    assert w.worker_of("g") == by_share


def test_a_device_with_a_worker_of_the_same_limit_goes_first():
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("a", num_gpus=1)
    w.submit("b", gpu_memory="10GiB")
    assert w.gpus_of("b") == [1]
    w.finish("b")
    w.finish("a")
    w.submit("c", gpu_memory="20GiB")
    assert w.gpus_of("c") == [0]
    w.finish("c")
    w.submit("d", gpu_memory="10GiB")
    assert (w.gpus_of("d"), w.worker_of("d")) == ([1], 2)


def test_a_worker_hands_its_memory_on_to_the_next_of_its_kind():
    w = World(cpus=4, gpus=1, gpu_memory="80GiB", took=1e-5)
    for number in range(12):
        w.submit(f"t{number}", gpu_memory="30GiB")
    assert len(w.running) == 2
    for _ in range(6):
        w.finish(min(w.running))
        assert w.free["gpu_memory"] == 20 * GIB
    w.run_dry()
    assert w.free["gpu_memory"] == 80 * GIB


def test_who_gives_memory_back_does_so_to_whose_turn_it_is():
    w = World(cpus=4, gpus=1, gpu_memory="80GiB")
    w.submit("a", gpu_memory="50GiB")
    w.submit("urgent", gpu_memory="70GiB", priority=1)
    w.submit("b", gpu_memory="50GiB")
    w.finish("a")
    assert w.running == {"urgent"}
    assert w.waiting == {"b"}


def test_one_for_whom_memory_is_kept_is_named():
    w = World(cpus=8, gpus=1, gpu_memory="80GiB")
    w.submit("a", gpu_memory="40GiB")
    w.submit("large", gpu_memory="60GiB")
    w.advance(2)
    w.submit("small", gpu_memory="10GiB")
    assert w.waiting == {"large", "small"}
    reasons = [one.reason for one in snapshot(w.scheduler, {}, w.now).shapes]
    assert reasons[1] == (
        "waits for GPU memory 10GiB (free by device: 0: 40GiB; kept for large)"
    )


def test_who_has_memory_of_a_device_and_no_share_is_told_as_well():
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("zeroth", num_cpus=0)
    w.submit("a", num_gpus=0.25)
    w.submit("b", gpu_memory="10GiB")
    w.submit("c", num_gpus=1)
    lines = told(w, "c").splitlines()
    assert lines[1] == "  GPU 1: 0.75 of 1 free (0: 0.75)"
    assert [line.split(": ")[0] for line in lines[2:]] == [
        "    0.25 of GPU 0",
        "    10GiB of GPU 0",
    ]
