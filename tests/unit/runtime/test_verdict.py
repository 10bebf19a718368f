"""The rule of clearance as a table: what was there, what is there, what follows."""

from __future__ import annotations

import pytest

from aiogpu.accelerators.base import Sample
from aiogpu.runtime.devices.release import (
    FREE,
    TOLERANCE,
    UNVERIFIED,
    State,
    verdict,
)

MINE, CHILD, OTHER = 100, 101, 200
"""The worker, a descendant that nobody knows by name, and somebody who lives."""
GIB = 1 << 30
IDLE = Sample({}, reads_pids=True, used=GIB)
HELD, LOST = State.HELD, State.LOST


def host(
    *pids: int, living: tuple[int, ...] = (OTHER,), used: int | None = 2 * GIB
) -> Sample:
    """What a driver says whose process ids are ours."""
    return Sample(dict.fromkeys(pids, GIB), frozenset(living), True, used)


def foreign(*pids: int, used: int | None = 2 * GIB) -> Sample:
    """What a driver says from out of another namespace."""
    return Sample(dict.fromkeys(pids, GIB), frozenset(), False, used)


@pytest.mark.parametrize(
    ("before", "now", "whole", "fraction"),
    [
        # Process ids can be read.
        (IDLE, host(), FREE, FREE),
        (IDLE, host(MINE), HELD, HELD),
        (IDLE, host(CHILD), HELD, HELD),
        (IDLE, host(OTHER), FREE, FREE),
        (IDLE, host(OTHER, CHILD), HELD, HELD),
        (IDLE, host(MINE, living=(MINE,)), HELD, HELD),  # its id was given anew
        (host(CHILD, used=GIB), host(CHILD), FREE, FREE),  # a phantom of earlier
        (host(MINE, used=GIB), host(MINE), HELD, HELD),  # an earlier one of that id
        (IDLE, host(MINE, used=GIB), FREE, HELD),
        (IDLE, host(MINE, used=GIB + TOLERANCE), FREE, HELD),
        (IDLE, host(MINE, used=GIB + TOLERANCE + 1), HELD, HELD),
        (IDLE, host(MINE, used=0), FREE, HELD),
        (IDLE, host(MINE, used=None), HELD, HELD),
        (Sample(), host(), FREE, FREE),
        (Sample(), host(MINE), HELD, HELD),
        # They cannot, and somebody is listed: the list is complete.
        (foreign(used=GIB), foreign(9001), HELD, UNVERIFIED),
        (foreign(9001, used=GIB), foreign(9001), FREE, FREE),
        (foreign(9001, used=GIB), foreign(), FREE, FREE),
        (foreign(9001, used=GIB), foreign(9001, 9002), HELD, UNVERIFIED),
        (foreign(used=GIB), foreign(9001, used=GIB), FREE, UNVERIFIED),
        (foreign(used=GIB), foreign(MINE), HELD, HELD),
        # They cannot, and nobody is ever listed: the list may be blind.
        (foreign(used=GIB), foreign(), HELD, UNVERIFIED),
        (foreign(used=GIB), foreign(used=GIB), FREE, UNVERIFIED),
        (foreign(used=None), foreign(used=None), UNVERIFIED, UNVERIFIED),
        # There is no list.
        (Sample(used=GIB), Sample(used=GIB), FREE, UNVERIFIED),
        (Sample(used=GIB), Sample(used=2 * GIB), HELD, UNVERIFIED),
        (Sample(used=GIB), Sample(), UNVERIFIED, UNVERIFIED),
        (Sample(), Sample(used=GIB), UNVERIFIED, UNVERIFIED),
        # The driver fails.
        (IDLE, Sample(problem="Unknown Error"), UNVERIFIED, UNVERIFIED),
        (IDLE, Sample(problem="GPU is lost", is_lost=True), LOST, LOST),
    ],
)
def test_the_rule(before: Sample, now: Sample, whole: object, fraction: object) -> None:
    for is_whole, expected in ((True, whole), (False, fraction)):
        found = verdict(before, now, {MINE}, is_whole=is_whole)
        assert (found if found.reason == "" else found.state) == expected, is_whole


def reason(before: Sample, now: Sample, *, is_whole: bool = True) -> str:
    return verdict(before, now, {MINE}, is_whole=is_whole).reason


def test_a_reason_names_processes_and_bytes() -> None:
    still = "of what has ended, the driver still lists "
    assert (
        reason(IDLE, host(MINE)) == f"{still}pid 100 with 1024 MiB (1073741824 bytes)"
    )
    unknown = Sample({MINE: None}, reads_pids=True, used=2 * GIB)
    assert reason(IDLE, unknown) == f"{still}pid 100"
    many = Sample(dict.fromkeys(range(300, 305)), reads_pids=True, used=2 * GIB)
    assert reason(IDLE, many) == f"{still}pid 300, pid 301, pid 302 and 2 more"
    # Of its own process and others that have ended, its own is told of.
    assert reason(IDLE, host(CHILD, MINE)).startswith(f"{still}pid 100 with")


def test_a_reason_by_memory_and_by_loss() -> None:
    assert reason(Sample(used=0), Sample(used=GIB)) == (
        "1024 MiB (1073741824 bytes) more are in use than before the task"
    )
    lost = Sample(problem="GPU is lost", is_lost=True)
    assert reason(IDLE, lost) == "the driver calls it lost (GPU is lost)"
