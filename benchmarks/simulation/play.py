"""Lets a trace happen under a rule, and keeps what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final

from aiogpu.core.model.units import UNIT
from benchmarks.simulation.rule import Rule
from benchmarks.simulation.trace import Trace

MOMENTS: Final = 1_000
"""At which all GPUs are looked at, while tasks arrive."""
WARMING: Final = 0.2
"""Of the moments that are not counted: at first all is empty."""


@dataclass(frozen=True, slots=True)
class Moment:
    """All GPUs at one moment, in parts of all that there is.

    Attributes:
        held: what somebody holds.
        broken: what is free, of GPUs that are not entirely free.
        waiting: tasks that wait.
    """

    held: float
    broken: float
    waiting: int


@dataclass(slots=True)
class Outcome:
    """What came of a trace under a rule.

    Attributes:
        rule: its name.
        waits: seconds that each task waited, in the order of their arrival.
        moments: equally far from each other; those while it warmed up are left out.
        ended: when the last task ended.
    """

    rule: str
    waits: list[float]
    moments: list[Moment] = field(default_factory=list)
    ended: float = 0.0


def play(trace: Trace, rule: Rule) -> Outcome:
    """All tasks of a trace, from the first arrival to the last end."""
    total = len(trace)
    outcome = Outcome(rule.name, [-1.0] * total)
    ends: list[tuple[float, int]] = []
    coming = waiting = 0
    step = trace.span / MOMENTS
    look = step * MOMENTS * WARMING
    while coming < total or ends:
        arrival = trace.arrivals[coming] if coming < total else inf
        ending = ends[0][0] if ends else inf
        now = min(arrival, ending)
        while look <= now and look < trace.span:
            outcome.moments.append(_look(rule.free, waiting))
            look += step
        if ending <= arrival:
            begun = rule.end(heappop(ends)[1], now)
        else:
            begun = rule.submit(coming, trace.sizes[coming], now)
            coming += 1
            waiting += 1
        _note(trace, outcome, begun, now, ends)
        waiting -= len(begun)
        outcome.ended = now
    assert waiting == 0, f"{rule.name} has left {waiting} tasks waiting"
    return outcome


def _note(
    trace: Trace,
    outcome: Outcome,
    begun: Iterable[int],
    now: float,
    ends: list[tuple[float, int]],
) -> None:
    for task in begun:
        assert outcome.waits[task] < 0, f"{outcome.rule} begins {task} twice"
        outcome.waits[task] = now - trace.arrivals[task]
        heappush(ends, (now + trace.seconds[task], task))


def _look(free: Sequence[int], waiting: int) -> Moment:
    left = sum(free)
    broken = left - UNIT * sum(1 for each in free if each == UNIT)
    whole = UNIT * len(free)
    return Moment(1 - left / whole, broken / whole, waiting)
