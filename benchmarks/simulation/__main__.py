"""`python -m benchmarks.simulation [--tasks N --gpus N] [--seed S] ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from benchmarks import report
from benchmarks.simulation.policies import (
    GPUS_PER_NODE,
    FirstFit,
    NodesFirstFit,
    RayPolicy,
)
from benchmarks.simulation.scheduler import AiogpuPolicy
from benchmarks.simulation.simulate import simulate, summary
from benchmarks.simulation.trace import draw

SIZES: Final = (1_000_000, 10_000), (100_000, 1_000)
"""Tasks and GPUs of the two runs of a full simulation."""
QUICK: Final = 2_000, 64
DAY: Final = 86_400.0
HEAD: Final = [
    *("policy", "allocated", "fragmented: mean", "p99", "max"),
    *("waiting: mean", "max"),
]


@click.command()
@click.option("--tasks", type=click.IntRange(1), help="Number of tasks; needs --gpus.")
@click.option(
    "--gpus", type=click.IntRange(GPUS_PER_NODE), help="Number of GPUs; needs --tasks."
)
@click.option("--seed", type=int, default=1, show_default=True)
@report.options
def main(
    tasks: int | None,
    gpus: int | None,
    seed: int,
    file: Path | None,
    keep: bool,
    quick: bool,
) -> None:
    """Compare scheduling policies on a random trace of tasks, in simulated time.

    Prints the shares of the GPUs that each policy allocates and fragments, the waiting
    times of each size, and the speed of aiogpu's scheduler. The same seed gives the
    same figures, except for the speed. Without --tasks and --gpus there are two runs: a
    million tasks on 10 000 GPUs, and a tenth of both.
    """
    if (tasks is None) != (gpus is None):
        raise click.UsageError("--tasks and --gpus go together: give both or none.")
    if (gpus or 0) % GPUS_PER_NODE:
        raise click.BadParameter(f"--gpus={gpus} is not a multiple of {GPUS_PER_NODE}.")
    sizes = (QUICK,) if quick else ((tasks, gpus),) if tasks and gpus else SIZES
    runs = [compare(*size, seed) for size in sizes]
    text = "\n\n".join(map(render, runs))
    click.echo(text)
    page = report.RESULTS / "simulation.md"
    report.keep_run(page, text, {"runs": runs}, file, keep)


def compare(tasks: int, gpus: int, seed: int) -> dict[str, Any]:
    """Run all policies, one after the other, on the same trace."""
    trace = draw(tasks, gpus, seed)
    aiogpu = AiogpuPolicy(trace)
    results = []
    for policy in (aiogpu, FirstFit(trace), NodesFirstFit(trace), RayPolicy(trace)):
        click.echo(f"{policy.name} ...", err=True)
        results.append(summary(trace, simulate(trace, policy)))
    return {
        "tasks": tasks,
        "gpus": gpus,
        "seed": seed,
        "days": trace.span / DAY,
        "events": aiogpu.node.events,
        "seconds": aiogpu.node.spent / 1e9,
        "longest_ms": aiogpu.node.longest / 1e6,
        "policies": results,
    }


def render(run: dict[str, Any]) -> str:
    """Render one run as Markdown."""
    tasks, policies, seconds = run["tasks"], run["policies"], run["seconds"]
    waits = ["waited: mean / p50 / p99 / max, s"]
    rows, waited = [HEAD], [waits + [f"{name} GPUs" for name in policies[0]["waits"]]]
    for each in policies:
        parts = [f"{each['fragmented'][key]:.3%}" for key in ("mean", "p99", "max")]
        mean, most = (each["waiting"][key] for key in ("mean", "max"))
        cells = f"{each['allocated']:.2%}", *parts, f"{mean:,.0f}", f"{most:,}"
        rows.append([each["policy"], *cells])
        groups = [group.values() for group in each["waits"].values()]
        texts = [" / ".join(f"{value:,.0f}" for value in group) for group in groups]
        waited.append([each["policy"], *texts])
    return (
        f"{tasks:,} tasks on {run['gpus']:,} GPUs in {run['days']:.1f} days, seed "
        f"{run['seed']}.\n\nThe scheduler handled {run['events']:,} events in "
        f"{seconds:.1f} s of one core: {run['events'] / seconds:,.0f} events/s, "
        f"{tasks / seconds:,.0f} tasks/s; the longest took {run['longest_ms']:.1f} ms."
        f"\n\n{report.markdown(rows)}\n\n{report.markdown(waited)}"
    )


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.simulation")
