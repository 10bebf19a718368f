"""What a call costs, counted: a guard against what no clock would show for certain."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from benchmarks.counts import KEPT, NAMES, SHOWN, Count, allowed, kept, told
from tests.support.program import environment

AGAIN = 2
"""How often is counted anew what is too much: who comes late to a busy machine reads
items one by one that would have come together."""


@cache
def counted(*names: str, attempt: int = 0) -> dict[str, Count]:
    """Counts, all unless named, of a program of their own: nothing is in its way."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.counts", "--json", *names],
        env=environment(),
        text=True,
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr
    return {name: Count(*each) for name, each in json.loads(ran.stdout).items()}


def each_of(count: Count) -> float:
    return count.each


def test_all_that_is_counted_was_kept() -> None:
    assert list(kept()) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_costs_no_more_than_it_did(name: str) -> None:
    now, before = counted()[name], kept()[name]
    for attempt in range(AGAIN):
        if now.each > allowed(before):
            now = min(now, counted(name, attempt=attempt)[name], key=each_of)
    assert now.each <= allowed(before), (
        f"{told(name, now, before, SHOWN)}\n"
        f"At most {allowed(before):.2f} was expected. All that has changed:\n"
        f"  python -m benchmarks.counts {name!r} --all --against {KEPT.name}\n"
        f"If it is worth that, keep it by `--keep` in place of `--against`."
    )


def test_what_has_changed_is_told_first() -> None:
    before = Count(12.0, {"a.py:f": 2.0, "a.py:g": 10.0, "a.py:h": 0.01})
    now = Count(15.0, {"a.py:g": 10.0, "a.py:f": 1.0, "a.py:i > len": 4.0})
    assert told("one", now, before, 9).splitlines() == [
        "one: 12.0 before, 15.0 now",
        "     +4.00  a.py:i > len",
        "     -1.00  a.py:f",
    ]
    assert told("one", now, None, 1).splitlines() == ["one: 15.0", "     10.00  a.py:g"]
