"""Waiting tasks with many different requests: which may go before others."""

import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import UNIT
from aiogpu.core.queue import ready
from tests.core.builders import GIB, World


@pytest.fixture(autouse=True)
def index(monkeypatch) -> None:
    """Let programs with few different requests have an index, too."""
    monkeypatch.setattr(ready, "FEW", 0)


def test_task_that_the_end_of_a_lease_does_not_help_is_passed_over():
    """The device has shares left but no memory."""
    World(gpus=1, cpus=2, gpu_memory=10 * GIB).play("""
        submit holder cpus=0 gpus=0.1 gpu_memory=8GiB; submit a b
        submit large gpus=0.1 gpu_memory=5GiB; submit c; running = holder a b
        finish a; running = holder b c
    """)


def test_member_of_a_placement_group_does_not_hold_up_other_leases():
    w = World(gpus=1, cpus=2)
    w.placement_group("p", {"GPU": 1})
    w.play("submit a")
    for name in "mn":
        w.submit_in("p", name, 0, request=Request.of({}, {"GPU": UNIT}))
    w.play("submit b; submit c; running = a b m; finish a; running = b c m")


def test_earlier_member_of_a_bundle_goes_first():
    w = World(gpus=1, cpus=2)
    w.placement_group("p", {"GPU": 1})
    for name, share in ("m", 0.6), ("n", 1), ("o", 0.6):
        request = Request.of({}, {"GPU": int(share * UNIT)})
        w.submit_in("p", name, 0, request=request)
    w.play("running = m; finish m; running = n; finish n; running = o")


def test_request_that_does_not_fit_one_program_is_not_tried_for_another():
    """One device has the memory, the other the shares."""
    w = World(gpus=2, cpus=4, gpu_memory=10 * GIB)
    w.play("""
        join 1 2
        submit shares cpus=0 gpus=0.9 gpu_memory=1GiB client=1
        submit memory cpus=0 gpus=0.2 gpu_memory=9GiB client=1
        submit x1 cpus=0 gpus=0.5 gpu_memory=5GiB client=1
        submit x2 cpus=0 gpus=0.5 gpu_memory=5GiB client=2
        submit y client=2; finish y; waiting = x1 x2
    """)


def test_a_less_urgent_task_with_the_same_request_holds_nobody_up():
    """`first` and `later` are one group of the index, whose turn is that of `first`."""
    World(gpus=1, cpus=1).play("""
        submit holder
        submit first gpus=0.25; submit second gpus=0.1
        submit later gpus=0.25 priority=-1
        finish holder; running = first; finish first; running = second
        finish second; running = later
    """)
