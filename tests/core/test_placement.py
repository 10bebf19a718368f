"""What waits meets what is free: order, shares, and the memory of devices."""

import pytest

from tests.core.builders import (
    World,
    status_of,
)


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


# [B44] Memory of devices.


def reason(w: World) -> str:
    """Why the first of those that wait does, in a line."""
    return status_of(w).shapes[0].reason


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
