"""Run a trace under a policy in simulated time, and summarise the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from statistics import mean
from typing import Any, Final, NamedTuple

from aiogpu.core.model.units import UNIT
from benchmarks.simulation.policies import Policy
from benchmarks.simulation.trace import Trace
from benchmarks.timing import percentile

SAMPLES: Final = 1_000
"""How often all GPUs are sampled while tasks arrive."""
WARM_UP: Final = 0.2
"""The share of the samples that is dropped: at first everything is free."""
GROUPS: Final = (
    ("a part", 0.0, 0.5),
    ("1", 1.0, 1.0),
    ("2 and 4", 2.0, 4.0),
    ("8", 8.0, 8.0),
    ("16 and 32", 16.0, 32.0),
)
"""Sizes that are reported together: name, and least and most GPUs."""


class Sample(NamedTuple):
    """All GPUs at one moment.

    Attributes:
        allocated: the share of all GPUs that tasks hold.
        fragmented: the share that is free on partly held GPUs.
        waiting: the number of tasks that wait.
    """

    allocated: float
    fragmented: float
    waiting: int


@dataclass(slots=True)
class Outcome:
    """The outcome of a trace under a policy.

    Attributes:
        policy: name of the policy.
        waits: waiting time of each task in seconds, in the order of arrival.
        samples: samples of all GPUs while tasks arrive.
        ended: end of the last task in seconds.
    """

    policy: str
    waits: list[float]
    samples: list[Sample] = field(default_factory=list)
    ended: float = 0.0


def simulate(trace: Trace, policy: Policy) -> Outcome:
    """Run all tasks of a trace, from the first arrival to the last end."""
    total = len(trace)
    outcome = Outcome(policy.name, [-1.0] * total)
    ends: list[tuple[float, int]] = []
    arrived = waiting = 0
    step = trace.span / SAMPLES
    sample_at = step * SAMPLES * WARM_UP
    while arrived < total or ends:
        arrival = trace.arrivals[arrived] if arrived < total else inf
        ending = ends[0][0] if ends else inf
        now = min(arrival, ending)
        while sample_at <= now and sample_at < trace.span:
            outcome.samples.append(_sample(policy.free, waiting))
            sample_at += step
        if ending <= arrival:
            started = policy.end(heappop(ends)[1], now)
        else:
            started = policy.submit(arrived, trace.sizes[arrived], now)
            arrived += 1
            waiting += 1
        for task in started:
            assert outcome.waits[task] < 0, f"{policy.name} starts {task} twice"
            outcome.waits[task] = now - trace.arrivals[task]
            heappush(ends, (now + trace.durations[task], task))
        waiting -= len(started)
        outcome.ended = now
    assert waiting == 0, f"{policy.name} left {waiting} tasks waiting"
    return outcome


def _sample(free: Sequence[int], waiting: int) -> Sample:
    left = sum(free)
    fragmented = left - UNIT * sum(1 for each in free if each == UNIT)
    capacity = UNIT * len(free)
    return Sample(1 - left / capacity, fragmented / capacity, waiting)


def waits_by_size(trace: Trace, outcome: Outcome) -> dict[str, dict[str, float]]:
    """Summarise the waiting times of each group of sizes, in seconds."""
    gpus = [float(each.name) for each in trace.classes]
    groups = {}
    for name, least, most in GROUPS:
        waits = [
            wait
            for wait, size in zip(outcome.waits, trace.sizes, strict=True)
            if least <= gpus[size] <= most
        ]
        if waits:
            groups[name] = figures(waits)
    return groups


def figures(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, the median, the 99th percentile and the maximum."""
    p50, p99 = (percentile([values], each) for each in (50, 99))
    return {"mean": mean(values), "p50": p50, "p99": p99, "max": max(values)}


def summary(trace: Trace, outcome: Outcome) -> dict[str, Any]:
    """Return all figures of one policy."""
    allocated, fragmented, waiting = zip(*outcome.samples, strict=True)
    return {
        "policy": outcome.policy,
        "allocated": mean(allocated),
        "fragmented": figures(fragmented),
        "waiting": figures(waiting),
        "waits": waits_by_size(trace, outcome),
    }
