"""What is said of very many waiting tasks, and that looking at them leaves nothing."""

import gc
import os
import socket

import pytest

from benchmarks.backlog import look
from benchmarks.environments import ENVIRONMENTS
from benchmarks.method import FULL
from benchmarks.workloads.backlog import _rows

pytestmark = pytest.mark.either_loop

MS = 1_000_000
STAGES = [
    "submitting",
    "status",
    "cancelling at once",
    "cancelling in portions",
    "finishing",
    "shutdown",
]


def found(longest_ms, on_cpu_ms, size=1000.0):
    """What the program finds, for one stage."""
    hold = {
        "longest": longest_ms * MS,
        "on_cpu": on_cpu_ms * MS,
        "collecting": 0,
        "calls": 10**9,
        "whole": 2 * 10**9,
    }
    return {"weight": {"bytes": size, "tracked": 5.0}, "holds": {"submitting": hold}}


@pytest.mark.parametrize(
    ("longest", "on_cpu", "verdict"),
    [
        (20, 20, "met"),
        (20, 1, "met"),
        (21, 21, "not met"),
        (21, 2, "INVALID: it ran 2.0 ms of these; the machine is busy"),
    ],
)
def test_a_hold_is_judged_where_the_thread_had_the_core(longest, on_cpu, verdict):
    *_, row = _rows(found(longest, on_cpu), FULL)
    assert (row.name, row.verdict) == ("backlog: submitting", verdict)
    assert row.note.endswith("; 1.0 us a call")


@pytest.mark.parametrize(("size", "verdict"), [(1024.0, "met"), (1025.0, "not met")])
def test_a_waiting_task_weighs_at_most_a_kilobyte(size, verdict):
    row, *_ = _rows(found(1, 1, size), FULL)
    assert (row.p50, row.verdict) == (size, verdict)


async def test_each_stage_is_seen_and_nothing_is_left():
    callbacks = len(gc.callbacks)
    seen = await look(ENVIRONMENTS["aiogpu"](), 100)
    assert list(seen["holds"]) == STAGES
    for hold in seen["holds"].values():
        assert 0 < hold["longest"] <= hold["whole"]
    assert seen["weight"]["tracked"] >= 1
    assert len(gc.callbacks) == callbacks
    with socket.socket(socket.AF_UNIX) as again:
        again.bind(f"\0aiogpu-benchmarks-{os.getpid()}")
