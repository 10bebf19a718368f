"""Whose the processes are that drivers list: the rule, on plain data."""

from __future__ import annotations

import os

import pytest

from aiogpu.accelerators.base import Sample
from aiogpu.linux.procfs import Origin
from aiogpu.observe.status import OtherProcess
from aiogpu.runtime.devices.memory_guard import (
    FOREIGN_IDS,
    THIS_PROGRAM,
    UNLISTED,
    ProcessAttribution,
    Sorted,
    Use,
)

GIB = 1 << 30
KEEPER, WORKER, CHILD, ORPHAN, OTHER, ENDED = 50, 100, 101, 102, 200, 300
ROOTS = {KEEPER: 1, WORKER: 1}
ORIGINS = {
    WORKER: Origin("python", (KEEPER, 10)),
    CHILD: Origin("sh", (WORKER, KEEPER, 10)),
    ORPHAN: Origin("sh", (KEEPER, 10)),
    OTHER: Origin("Xorg", (2,)),
    os.getpid(): Origin("python", (2,)),
}


def listed(*pids: int, reads_pids: bool = True) -> Sample:
    return Sample(dict.fromkeys(pids, GIB), frozenset(), reads_pids, 9 * GIB)


def sort(owners: ProcessAttribution, sample: Sample) -> Sorted:
    return owners.sort("GPU", sample, ORIGINS, ROOTS)


def test_what_descends_from_a_worker_or_its_keeper_is_the_workers() -> None:
    found = sort(ProcessAttribution(), listed(WORKER, CHILD, ORPHAN))
    assert found == Sorted({1: Use(3 * GIB, 3)}, (), None)


def test_all_else_that_lives_is_somebody_elses() -> None:
    found = sort(ProcessAttribution(), listed(WORKER, OTHER, os.getpid()))
    xorg = OtherProcess(OTHER, "Xorg", GIB)
    driver = OtherProcess(os.getpid(), THIS_PROGRAM, GIB)
    assert found == Sorted({1: Use(GIB, 1)}, (xorg, driver))


def test_what_has_ended_is_nobodys_where_ids_are_those_seen_here() -> None:
    owners = ProcessAttribution()
    for _ in range(3):
        assert sort(owners, listed(ENDED)) == Sorted()
        owners.end_round({ENDED})


def test_what_has_ended_stays_whose_it_was() -> None:
    owners = ProcessAttribution()
    sort(owners, listed(WORKER))
    owners.end_round({WORKER})
    assert owners.sort("GPU", listed(WORKER), {}, {}).workers == {1: Use(GIB, 1)}
    owners.end_round(())
    assert owners.sort("GPU", listed(WORKER), {}, {}).workers == {}, "forgotten"


def test_an_id_that_is_used_again_is_looked_at_anew() -> None:
    owners = ProcessAttribution()
    sort(owners, listed(WORKER))
    found = owners.sort("GPU", listed(WORKER), {WORKER: Origin("x", ())}, {})
    assert found.others == (OtherProcess(WORKER, "x", GIB),)
    assert owners.sort("GPU", listed(WORKER), {}, {}) == Sorted()


def test_foreign_ids_are_called_that_until_one_of_ours_is_listed() -> None:
    owners = ProcessAttribution()
    theirs, ours = (listed(pid, reads_pids=False) for pid in (OTHER, WORKER))
    assert sort(owners, theirs) == Sorted({}, None, FOREIGN_IDS)
    assert sort(owners, ours) == Sorted({1: Use(GIB, 1)}, ())
    assert sort(owners, theirs).others == (OtherProcess(OTHER, "Xorg", GIB),)
    assert owners.sort("TPU", theirs, ORIGINS, ROOTS).unknown == FOREIGN_IDS


def test_in_a_container_one_that_is_not_seen_may_live_elsewhere() -> None:
    owners = ProcessAttribution()
    sample = listed(WORKER, ENDED, reads_pids=False)
    assert sort(owners, sample).others == (), "or has ended just now"
    owners.end_round({WORKER, ENDED})
    assert sort(owners, sample).others == (OtherProcess(ENDED, "", GIB),)


@pytest.mark.parametrize(
    ("sample", "unknown"),
    [
        (Sample(problem="Unknown Error"), "what is on it (Unknown Error)"),
        (Sample(used=5), UNLISTED),
    ],
)
def test_what_the_driver_does_not_tell_is_not_known(
    sample: Sample, unknown: str
) -> None:
    assert sort(ProcessAttribution(), sample) == Sorted({}, None, unknown)


@pytest.mark.parametrize("memory", [None, 0])
def test_a_worker_of_which_no_memory_is_told_is_left_out(memory: int | None) -> None:
    sample = Sample({WORKER: memory}, frozenset(), True, GIB)
    assert sort(ProcessAttribution(), sample) == Sorted()
