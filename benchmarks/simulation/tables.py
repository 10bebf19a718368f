"""What came of a trace under each rule, as tables for people and as data."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any, Final

from benchmarks.simulation.core import Core
from benchmarks.simulation.play import Outcome
from benchmarks.simulation.trace import DAYS, KINDS, LOAD, LONGEST, SIGMA, WAVE, Trace

DAY: Final = 86_400.0
CLASSES: Final = (
    ("a part", 0.0, 0.5),
    ("1", 1.0, 1.0),
    ("2 and 4", 2.0, 4.0),
    ("8", 8.0, 8.0),
    ("16 and 32", 16.0, 32.0),
)
"""Sizes that are told of together, from and to so many GPUs."""


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest of some values in order; 0 where there are none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def waits_by_class(trace: Trace, outcome: Outcome) -> dict[str, dict[str, float]]:
    """How long tasks of each class waited, in seconds."""
    sizes = [float(kind.name) for kind in trace.kinds]
    found = {}
    for name, least, most in CLASSES:
        waits = sorted(
            wait
            for wait, size in zip(outcome.waits, trace.sizes, strict=True)
            if least <= sizes[size] <= most
        )
        if waits:
            found[name] = {
                "tasks": len(waits),
                "mean": mean(waits),
                "p50": percentile(waits, 50),
                "p99": percentile(waits, 99),
                "max": waits[-1],
            }
    return found


def facts_of(trace: Trace, outcome: Outcome) -> dict[str, Any]:
    """All figures of one rule."""
    held = [moment.held for moment in outcome.moments]
    broken = sorted(moment.broken for moment in outcome.moments)
    queue = sorted(moment.waiting for moment in outcome.moments)
    return {
        "rule": outcome.rule,
        "held": mean(held),
        "broken": mean(broken),
        "broken_p99": percentile(broken, 99),
        "broken_max": broken[-1],
        "waiting": mean(queue),
        "waiting_max": queue[-1],
        "ended_after_days": outcome.ended / DAY,
        "waits": waits_by_class(trace, outcome),
    }


def speed_of(rule: Core, tasks: int) -> dict[str, float]:
    """What the decisions of the core cost, in time of one core."""
    seconds = rule.spent / 1e9
    return {
        "events": rule.told,
        "seconds": seconds,
        "events_per_second": rule.told / seconds,
        "tasks_per_second": tasks / seconds,
        "longest_ms": rule.longest / 1e6,
    }


def facts_of_trace(trace: Trace, seed: int) -> dict[str, Any]:
    """What a reader must know to draw it again."""
    return {
        "tasks": len(trace),
        "gpus": trace.gpus,
        "seed": seed,
        "span_days": trace.span / DAY,
        "load": LOAD,
        "wave": WAVE,
        "waves": DAYS,
        "sigma": SIGMA,
        "longest_task": LONGEST,
        "kinds": {kind.name: (kind.weight, kind.median) for kind in KINDS},
    }


def text(facts: dict[str, Any]) -> str:
    """One run as Markdown."""
    trace, speed = facts["trace"], facts["speed"]
    lines = [
        f"{trace['tasks']:,} tasks on {trace['gpus']:,} GPUs in "
        f"{trace['span_days']:.1f} days, seed {trace['seed']}.",
        "",
        f"The core answered {speed['events']:,} events in {speed['seconds']:.1f} s of "
        f"one core: {speed['events_per_second']:,.0f} events/s, "
        f"{speed['tasks_per_second']:,.0f} tasks/s; the longest took "
        f"{speed['longest_ms']:.1f} ms.",
        "",
        "| rule | held | broken: mean | p99 | max | waiting: mean | max |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {rule['rule']} | {rule['held']:.2%} | {rule['broken']:.3%} "
        f"| {rule['broken_p99']:.3%} | {rule['broken_max']:.3%} "
        f"| {rule['waiting']:,.0f} | {rule['waiting_max']:,} |"
        for rule in facts["rules"]
    ]
    names = list(facts["rules"][0]["waits"])
    head = " | ".join(f"{name} GPUs" for name in names)
    lines += ["", f"| waited: mean / p50 / p99 / max, s | {head} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for rule in facts["rules"]:
        told = (
            " / ".join(f"{waits[key]:,.0f}" for key in ("mean", "p50", "p99", "max"))
            for waits in rule["waits"].values()
        )
        lines.append(f"| {rule['rule']} | {' | '.join(told)} |")
    return "\n".join(lines)
