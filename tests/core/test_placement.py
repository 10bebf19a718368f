"""What waits meets what is free, in order of priority and submission."""

import pytest

from aiogpu.errors import InfeasibleError
from aiogpu.testing import World


def submit_all(w: World, *fractions: float) -> list[str]:
    """Submit a task for each share; their names in order."""
    names = [f"t{number}" for number in range(len(fractions))]
    for name, fraction in zip(names, fractions, strict=True):
        w.submit(name, num_gpus=fraction)
    return names


@pytest.mark.parametrize(
    ("fractions", "devices"),
    [
        ((0.5, 0.5, 0.5, 0.3, 0.3), [0, 0, 1, 1, 2]),
        ((0.7, 0.5, 0.2, 0.3, 0.5), [0, 1, 0, 1, 2]),
        ((1 / 3, 1 / 3, 1 / 3, 1 / 3), [0, 0, 0, 1]),
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
    assert w.free_gpus == [0.4, 0.4, 0.4]
    assert w.waiting == {"t3"}
    w.finish("t1")
    assert w.gpus_of("t3") == [1]


def test_a_whole_device_waits_while_every_device_is_partly_used():
    w = World(gpus=2)
    submit_all(w, 0.6, 0.6, 1)
    assert w.waiting == {"t2"}
    w.finish("t0")
    assert w.gpus_of("t2") == [0]


def test_two_whole_devices_go_round_a_shared_one():
    w = World(gpus=3)
    submit_all(w, 1, 0.5)
    w.finish("t0")
    w.submit("two", num_gpus=2)
    w.submit("half", num_gpus=0.5)
    assert w.gpus_of("two") == [0, 2]
    assert w.gpus_of("half") == [1]


def test_the_lowest_device_that_came_free_is_used_first():
    w = World(gpus=3)
    submit_all(w, 1, 1, 1)
    w.finish("t2")
    w.finish("t0")
    w.submit("next", num_gpus=1)
    assert w.gpus_of("next") == [0]


def test_a_type_is_honoured():
    w = World(gpu_types=["T4", "A100"])
    w.submit("a", num_gpus=0.5, accelerator_type="A100")
    w.submit("b", num_gpus=1, accelerator_type="A100")
    assert w.gpus_of("a") == [1]
    assert w.waiting == {"b"}
    with pytest.raises(InfeasibleError, match="GPU 2 of 1 of type A100"):
        w.submit("c", num_gpus=2, accelerator_type="A100")
    with pytest.raises(InfeasibleError, match="no GPU of type 'H200'"):
        w.submit("d", num_gpus=1, accelerator_type="H200")


def test_first_come_first_served():
    w = World(cpus=1)
    for name in "abc":
        w.submit(name)
    assert w.running == {"a"}
    w.finish("a")
    assert w.running == {"b"}
    w.finish("b")
    assert w.running == {"c"}


def test_higher_priority_goes_first_over_all_shapes():
    w = World(cpus=1, resources={"license": 1})
    w.submit("running")
    w.submit("first come")
    w.submit("urgent", resources={"license": 1}, priority=1)
    w.submit("least", priority=-1)
    w.finish("running")
    assert w.running == {"urgent"}
    w.finish("urgent")
    assert w.running == {"first come"}


def test_one_that_does_not_fit_holds_up_its_own_shape_only():
    w = World(cpus=2)
    w.submit("one")
    w.submit("two", num_cpus=2)
    w.submit("two again", num_cpus=2)
    w.submit("one more")
    assert w.running == {"one", "one more"}
    assert w.waiting == {"two", "two again"}


def test_one_end_lets_several_begin():
    w = World(cpus=4)
    w.submit("all", num_cpus=4)
    for number in range(5):
        w.submit(f"one {number}")
    w.finish("all")
    assert w.running == {f"one {number}" for number in range(4)}


def test_what_asks_for_nothing_never_waits():
    w = World(cpus=0)
    w.submit("a", num_cpus=0)
    w.submit("b", num_cpus=0)
    assert w.running == {"a", "b"}


def test_cpu_custom_resources_and_gpus_are_taken_together():
    w = World(cpus=1, gpus=1, resources={"license": 0.5})
    w.submit("a", num_cpus=0.5, num_gpus=0.25, resources={"license": 0.25})
    assert w.free == {"CPU": 0.5, "license": 0.25, "GPU": 0.75}
    w.submit("b", num_cpus=0.5, num_gpus=0.25, resources={"license": 0.5})
    assert w.waiting == {"b"}
    assert w.free == {"CPU": 0.5, "license": 0.25, "GPU": 0.75}
    w.finish("a")
    assert w.free == {"CPU": 0.5, "license": 0.0, "GPU": 0.75}
