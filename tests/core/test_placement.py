"""What waits meets what is free: order, shares, and the memory of devices."""

import pytest

from aiogpu.core.model.request import Device, DeviceSelector
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import (
    A100,
    GIB,
    H100,
    PLAIN,
    World,
    box,
    status_of,
    submit,
    why_of,
)


def submit_all(w: World, *fractions: float) -> list[str]:
    """Submit a task for each share; their names in order."""
    names = [f"t{number}" for number in range(len(fractions))]
    for name, fraction in zip(names, fractions, strict=True):
        w.submit(name, num_gpus=fraction)
    return names


@pytest.mark.parametrize(
    ("fractions", "devices"),
    [
        ((0.7, 0.5, 0.2, 0.3, 0.5), [0, 1, 0, 1, 2]),
        ((0.1,) * 11, [0] * 10 + [1]),
        ((0.5, 1, 0.5, 1), [0, 1, 0, 2]),
    ],
)
def test_shares_are_packed_as_ray_packs_them(fractions, devices):
    w = World(gpus=3)
    names = submit_all(w, *fractions)
    assert [w.gpus_of(name) for name in names] == [[device] for device in devices]


def test_each_task_has_its_strategy():
    """[B24]"""
    w = World(gpus=3)
    for number, strategy in enumerate(["pack", "spread", "spread", "pack", "spread"]):
        w.submit(f"t{number}", num_gpus=0.25, strategy=strategy)
    assert [w.gpus_of(f"t{n}") for n in range(5)] == [[0], [1], [2], [0], [1]]


def test_a_share_waits_where_only_the_sum_would_do():
    w = World(gpus=3)
    submit_all(w, 0.6, 0.6, 0.6, 0.5)
    w.play("free_gpus = 0.4 0.4 0.4; waiting = t3; finish t1; gpus_of t3 = 1")


def test_a_whole_device_waits_while_every_device_is_partly_used():
    w = World(gpus=2)
    submit_all(w, 0.6, 0.6, 1)
    w.play("waiting = t2; finish t0; gpus_of t2 = 0")


def test_the_order_is_priority_and_arrival_over_all_shapes():
    w = World(cpus=1, resources={"license": 1}).play("""
        submit running first second; submit urgent resources=license:1 priority=1
        submit least priority=-1
    """)
    for name in ("running", "urgent", "first", "second", "least"):
        assert w.running == {name}
        w.finish(name)


def test_one_that_does_not_fit_holds_up_its_own_shape_only():
    w = World(cpus=2).play("submit one; submit two cpus=2")
    w.play("""
        submit two-again cpus=2; submit one-more; submit nothing cpus=0
        running = nothing one one-more; waiting = two two-again
    """)


def test_one_end_lets_several_begin():
    w = World(cpus=4).play("submit all cpus=4")
    submit(w, [f"one {n}" for n in range(5)])
    w.finish("all")
    assert w.running == {f"one {number}" for number in range(4)}


def test_cpu_custom_resources_and_gpus_are_taken_together():
    w = World(cpus=1, gpus=1, resources={"license": 0.5})
    w.submit("a", num_cpus=0.5, num_gpus=0.25, resources={"license": 0.25})
    assert w.free == {"CPU": 0.5, "license": 0.25, "GPU": 0.75}
    w.submit("b", num_cpus=0.5, num_gpus=0.25, resources={"license": 0.5})
    assert (w.waiting, w.free) == ({"b"}, {"CPU": 0.5, "license": 0.25, "GPU": 0.75})
    w.play("finish a; free = CPU:0.5 license:0.0 GPU:0.75")


def test_who_waits_for_such_a_device_holds_up_nobody_else():
    w = World(devices=[A100, H100, PLAIN])
    fast = DeviceSelector(least_capability=(9, 0))
    submit(w, "a b", num_gpus=1, where=fast)
    w.play("submit c gpus=2; gpus_of a = 1; waiting = b")
    shown = str(status_of(w))
    assert "1 x {CPU: 1, GPU: 1} of compute capability 9.0 or more: b first" in shown
    w.play("gpus_of c = 0 2; finish c; waiting = b; finish a; gpus_of b = 1")


def test_a_request_without_devices_has_no_conditions():
    w = World(devices=[A100])
    w.submit("a", where=DeviceSelector(least_memory=1 << 50))
    assert w.running == {"a"}


# [B44] Memory of devices.


def reason(w: World) -> str:
    """Why the first of those that wait does, in a line."""
    return status_of(w).shapes[0].reason


def test_a_task_that_asks_for_memory_waits_for_it_and_says_who_holds_it():
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


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        (
            {"gpu_memory": "60GiB"},
            {"num_gpus": 0.5},
            "waits for GPU memory 40GiB (free by device: 0: 20GiB)",
        ),
        (
            {"gpu_memory": "1GiB"},
            {"num_gpus": 1},
            "waits for GPU memory 80GiB (free by device: 0: 79GiB)",
        ),
        (
            {"num_gpus": 0.7, "gpu_memory": "1GiB"},
            {"num_gpus": 0.5, "gpu_memory": "1GiB"},
            "waits for GPU 0.5 (free by device: 0: 0.3)",
        ),
    ],
    ids=["a share", "a whole device", "a share that is short"],
)
def test_shares_and_bytes_are_both_waited_for(held, asked, expected):
    w = World(gpus=1, gpu_memory="80GiB")
    w.submit("a", **held)
    w.submit("b", **asked)
    assert reason(w) == expected
    w.play("finish a; running = b")


def test_only_devices_that_could_serve_it_are_named():
    cards = [Device(0, memory=16 * GIB), Device(1, memory=80 * GIB), Device(2)]
    w = World(devices=cards)
    w.play("submit a gpus=0.5 gpu_memory=70GiB; submit b gpus=0.5 gpu_memory=20GiB")
    assert reason(w) == "waits for GPU memory 20GiB (free by device: 1: 10GiB)"
    w.tell(Scheduler.device_changed, "GPU", 1, Cause.SICK, "XID 79")
    assert reason(w) == "waits for GPU 0.5 (free by device: 1: set aside)"


def test_status_shows_who_has_reserved_how_much_until_the_device_is_seen_free():
    w = World(gpus=1, gpu_memory="80GiB")
    w.settles = True
    w.play("submit a gpu_memory=20GiB max_calls=1; submit b gpus=0.25")
    status = status_of(w)
    (device,) = status.devices
    assert (device.free, device.memory_reserved) == (0.75, 40 * GIB)
    assert [one.memory for one in device.holders] == [20 * GIB, 20 * GIB]
    assert (status.total["gpu_memory"], status.available["gpu_memory"]) == (
        80 * GIB,
        40 * GIB,
    )
    for line in ("gpu_memory  40GiB of 80GiB free", "\n  20GiB  a  ", "\n  0.25   b  "):
        assert line in str(status)
    w.play("finish a; submit c gpu_memory=50GiB; waiting = c")
    assert "20GiB  (ended)" in str(status_of(w))
    w.run_dry()
    assert set(w.told.values()) == {"settled"}
    assert "gpu_memory" not in str(status_of(w))


def test_what_a_large_one_needs_is_kept_for_it():
    """[B24]"""
    w = World(gpus=2, gpu_memory="80GiB")
    w.submit("a", gpu_memory="30GiB", timeout=60, cancel_grace=0)
    w.submit("b", gpu_memory="30GiB", timeout=20, cancel_grace=0)
    w.submit("other", gpu_memory="30GiB", timeout=90, cancel_grace=0)
    assert [w.gpus_of(name) for name in ("a", "b", "other")] == [[0], [0], [1]]
    w.play("submit large gpu_memory=60GiB; advance 2; submit late gpu_memory=20GiB")
    reservation = w.scheduler.reservation
    assert (reservation.barred, reservation.until) == ({"GPU": 0b01}, 60)
    w.play("gpus_of late = 1; submit later gpu_memory=31GiB; waiting = large later")
    w.advance(19)  # what is left of "b" is not enough
    w.play("waiting = large later; finish a; gpus_of large = 0")


def test_a_whole_device_is_kept_where_memory_comes_free_soonest():
    w = World(gpus=2, gpu_memory="80GiB").play("""
        submit a gpu_memory=60GiB timeout=60 cancel_grace=0
        submit b gpu_memory=60GiB timeout=30 cancel_grace=0; submit whole gpus=1
        advance 2; submit c gpus=0.1
    """)
    assert w.scheduler.reservation.barred == {"GPU": 0b10}
    assert w.gpus_of("c") == [0]


def test_memory_that_is_held_for_life_is_not_waited_for():
    """[B24]"""
    w = World(gpus=1, gpu_memory="80GiB").play("""
        submit actor gpu_memory=60GiB is_endless=True; submit a gpu_memory=10GiB
        submit large gpu_memory=30GiB; advance 2; submit b gpu_memory=10GiB
    """)
    w.play("kept = None; running = a actor b")
    assert "held without end" in str(why_of(w, "large"))


def test_a_child_that_needs_the_memory_of_its_parent_can_never_run():
    w = World(gpus=1, gpu_memory="80GiB").play("""
        submit parent gpu_memory=60GiB; submit small gpu_memory=20GiB parent=parent
        wait_for parent small; running = parent small
        finish small; submit child gpu_memory=30GiB parent=parent; wait_for parent child
        told has child:deadlocked
    """)
    assert w.tasks["child"].reason == (
        "child asks for {CPU: 1, gpu_memory: 30GiB}, and those that wait hold it: "
        "parent holds {CPU: 1, gpu_memory: 60GiB} and waits for child"
    )


def test_a_worker_is_used_again_by_those_with_its_limit():
    """[B27]"""
    w = World(gpus=1, gpu_memory="80GiB").play("submit a gpu_memory=10GiB")
    first = w.worker_of("a")
    w.play("finish a; submit b gpu_memory=20GiB")
    assert w.worker_of("b") != first
    w.submit("c", gpu_memory="10GiB")
    assert w.worker_of("c") == first
    w.submit("d", num_gpus=0.25, gpu_memory="share")
    by_share = w.worker_of("d")
    w.play("finish d; submit e gpus=0.5 gpu_memory=share")
    assert w.worker_of("e") not in (first, by_share)
    w.play("finish e; submit f gpus=0.25")
    assert w.worker_of("f") not in (first, by_share)
    w.submit("g", num_gpus=0.25, gpu_memory="share")
    assert w.worker_of("g") == by_share


def test_who_wants_two_waits_for_what_is_no_mig_instance():
    w = World(devices=box(4, parents={0: "GPU-a", 1: "GPU-a"})).play("""
        submit a gpus=0.5; submit b c gpus=1; submit d gpus=2; gpus_of a = 0
        gpus_of b = 1; gpus_of c = 2; advance 2; submit e gpus=0.1
    """)
    assert w.scheduler.reservation.barred == {"GPU": 0b1100}
    w.play("gpus_of e = 0; finish c; gpus_of d = 2 3")
