"""What a call costs in counts: catches a slowdown that is too small for a clock."""

from __future__ import annotations

import json
import sys
from functools import cache

import pytest

from benchmarks.counts import (
    BASELINE,
    NAMES,
    SHOWN,
    Count,
    describe,
    limit,
    load,
    lower,
)
from tests.support.program import environment, run_command

RETRIES = 2
"""Counts that are too high are taken again: on a busy machine a process that comes
late reads items one by one that would have come together."""


@cache
def counted(*names: str, attempt: int = 0) -> dict[str, Count]:
    """Counts, by default all, of a program of their own."""
    command = sys.executable, "-m", "benchmarks.counts", "--json", *names
    ran = run_command(*command, env=environment(), timeout=None)
    assert ran.returncode == 0, ran.stderr
    return {name: Count(*each) for name, each in json.loads(ran.stdout).items()}


def test_the_baseline_has_all_counts() -> None:
    assert list(load()) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_count_does_not_rise(name: str) -> None:
    now, before = counted()[name], load()[name]
    for attempt in range(RETRIES):
        if now.each > limit(before):
            now = lower(now, counted(name, attempt=attempt)[name])
    assert now.each <= limit(before), (
        f"{describe(name, now, before, SHOWN)}\n"
        f"At most {limit(before):.2f} was expected. To see all changes:\n"
        f"  python -m benchmarks.counts {name!r} --all --against {BASELINE.name}\n"
        f"If the change is worth the cost, use `--keep` in place of `--against`."
    )


def test_the_largest_changes_are_shown_first() -> None:
    before = Count(12.0, {"a.py:f": 2.0, "a.py:g": 10.0, "a.py:h": 0.01})
    now = Count(15.0, {"a.py:g": 10.0, "a.py:f": 1.0, "a.py:i > len": 4.0})
    assert describe("one", now, before, 9).splitlines() == [
        "one: 12.0 before, 15.0 now",
        "     +4.00  a.py:i > len",
        "     -1.00  a.py:f",
    ]
    assert describe("one", now, None, 1).splitlines() == [
        "one: 15.0",
        "     10.00  a.py:g",
    ]
