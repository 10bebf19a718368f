"""Three models that take turns on a GPU, beside three that always stay.

python -m benchmarks.eviction [--load 0.5] [--seconds 20]

Each model sleeps `load` seconds in its constructor, as if it loaded weights, and 10 ms
in a call. The traffic is bursts: a client asks one model ten times, pauses, and goes on
to a model drawn by a seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from statistics import quantiles
from typing import Any

import click

import aiogpu

CALL = 0.01
BURST = 10
CLIENTS = 2


class Model:
    """A model that is slow to load."""

    def __init__(self, load: float) -> None:
        time.sleep(load)

    def infer(self) -> None:
        """Answer a request."""
        time.sleep(CALL)


async def traffic(models: list[Any], seconds: float, seed: int) -> list[float]:
    """Ask models in bursts; return the seconds of each call."""
    rng, took = random.Random(seed), []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        model = rng.choice(models)
        for _ in range(BURST):
            start = time.perf_counter()
            await model.infer.remote()
            took.append(time.perf_counter() - start)
        await asyncio.sleep(rng.uniform(0.1, 0.5))
    return took


async def measure(load: float, seconds: float, **options: Any) -> None:
    """Print the figures of three models with these options."""
    async with aiogpu.init(num_cpus=8, num_gpus=1) as node:
        kind = aiogpu.remote(**options)(Model)
        models = [kind.remote(load) for _ in range(3)]
        clients = (traffic(models, seconds, seed) for seed in range(CLIENTS))
        took = [call for calls in await asyncio.gather(*clients) for call in calls]
        moves = sum(actor.evictions for actor in (await node.status()).actors)
    cuts = quantiles(took, n=100)
    words = ", ".join(f"{name}={value:g}" for name, value in options.items())
    click.echo(
        f"{words:32}  {len(took):5} calls  p50 {cuts[49] * 1e3:6.1f} ms  "
        f"p99 {cuts[98] * 1e3:7.1f} ms  {moves:3} evictions"
    )


@click.command()
@click.option("--load", default=0.5, help="Seconds of a constructor.")
@click.option("--seconds", default=20.0, help="Seconds of traffic.")
def main(load: float, seconds: float) -> None:
    """Compare models that take turns with models that stay."""
    for options in (
        {"num_gpus": 0.33},
        {"num_gpus": 0.5, "evict_after": 0},
        {"num_gpus": 0.5, "evict_after": 2},
        {"num_gpus": 0.5, "evict_after": 5},
    ):
        asyncio.run(measure(load, seconds, **options))


if __name__ == "__main__":
    main()
