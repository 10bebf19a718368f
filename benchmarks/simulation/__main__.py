"""`python -m benchmarks.simulation [--tasks N] [--gpus N] [--seed S] [--json FILE]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.simulation.policies import (
    GPUS_PER_NODE,
    FirstFit,
    NodesFirstFit,
    RayPolicy,
)
from benchmarks.simulation.scheduler import AiogpuPolicy
from benchmarks.simulation.simulate import DAY, simulate, summary
from benchmarks.simulation.trace import DAYS, LOAD, SIGMA, WAVE, draw

FULL: Final = 1_000_000, 10_000
QUICK: Final = 2_000, 64


@click.command()
@click.option("--tasks", type=click.IntRange(1), default=FULL[0], show_default=True)
@click.option(
    "--gpus", type=click.IntRange(GPUS_PER_NODE), default=FULL[1], show_default=True
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures to FILE.",
)
@click.option("--quick", is_flag=True, help="Few tasks: shows that all of it runs.")
def main(tasks: int, gpus: int, seed: int, file: Path | None, quick: bool) -> None:
    """Compare scheduling policies on a drawn trace of tasks, in simulated time.

    Prints how much of the GPUs each policy allocates, how much it leaves fragmented and
    how long tasks of each size wait; and how fast aiogpu's scheduler decides. The same
    seed gives the same figures, except for the speed.
    """
    if gpus % GPUS_PER_NODE:
        raise click.BadParameter(f"--gpus={gpus} is no multiple of {GPUS_PER_NODE}.")
    tasks, gpus = QUICK if quick else (tasks, gpus)
    figures = compare(tasks, gpus, seed)
    click.echo(text(figures))
    if file is not None:
        file.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def compare(tasks: int, gpus: int, seed: int) -> dict[str, Any]:
    """Run all policies, one after the other, on the same trace."""
    trace = draw(tasks, gpus, seed)
    aiogpu = AiogpuPolicy(trace)
    results = []
    for policy in (aiogpu, FirstFit(trace), NodesFirstFit(trace), RayPolicy(trace)):
        click.echo(f"{policy.name} ...", err=True)
        results.append(summary(trace, simulate(trace, policy)))
    seconds = aiogpu.node.spent / 1e9
    return {
        "trace": {
            "tasks": tasks,
            "gpus": gpus,
            "seed": seed,
            "span_days": trace.span / DAY,
            "load": LOAD,
            "wave": WAVE,
            "waves": DAYS,
            "sigma": SIGMA,
            "classes": {
                each.name: (each.weight, each.median) for each in trace.classes
            },
        },
        "speed": {
            "events": aiogpu.node.events,
            "seconds": seconds,
            "events_per_second": aiogpu.node.events / seconds,
            "tasks_per_second": tasks / seconds,
            "longest_ms": aiogpu.node.longest / 1e6,
        },
        "policies": results,
    }


def text(figures: dict[str, Any]) -> str:
    """Render one run as Markdown."""
    trace, speed, policies = figures["trace"], figures["speed"], figures["policies"]
    lines = [
        f"{trace['tasks']:,} tasks on {trace['gpus']:,} GPUs in "
        f"{trace['span_days']:.1f} days, seed {trace['seed']}.",
        "",
        f"The scheduler handled {speed['events']:,} events in {speed['seconds']:.1f} s "
        f"of one core: {speed['events_per_second']:,.0f} events/s, "
        f"{speed['tasks_per_second']:,.0f} tasks/s; the longest took "
        f"{speed['longest_ms']:.1f} ms.",
        "",
        "| policy | allocated | fragmented: mean | p99 | max | waiting: mean | max |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['policy']} | {each['allocated']:.2%} | {each['fragmented']:.3%} "
        f"| {each['fragmented_p99']:.3%} | {each['fragmented_max']:.3%} "
        f"| {each['waiting']:,.0f} | {each['waiting_max']:,} |"
        for each in policies
    ]
    names = [f"{name} GPUs" for name in policies[0]["waits"]]
    lines += ["", f"| waited: mean / p50 / p99 / max, s | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for each in policies:
        cells = (
            " / ".join(f"{waits[key]:,.0f}" for key in ("mean", "p50", "p99", "max"))
            for waits in each["waits"].values()
        )
        lines.append(f"| {each['policy']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.simulation")
