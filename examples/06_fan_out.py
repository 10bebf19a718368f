"""A fan-out over a real computation: primes below a million, by numpy.

Each task holds a quarter of a GPU and sieves one segment; results are taken as
they come. Install numpy by: pip install 'aiogpu[demo]'.
"""

import asyncio
import math
from typing import NamedTuple

import numpy as np

import aiogpu

LIMIT = 1_000_000
SEGMENTS = 20


class Segment(NamedTuple):
    start: int
    primes: int
    gpus: list[int | str]


def sieve(start: int, end: int) -> int:
    is_prime = np.ones(end - start, dtype=bool)
    is_prime[: max(0, 2 - start)] = False
    for factor in range(2, math.isqrt(end) + 1):
        first = max(factor * factor, -(-start // factor) * factor)
        is_prime[first - start :: factor] = False
    return int(is_prime.sum())


@aiogpu.remote(num_gpus=0.25)
def count(start: int, end: int) -> Segment:
    return Segment(start, sieve(start, end), aiogpu.get_gpu_ids())


async def main() -> None:
    step = LIMIT // SEGMENTS
    async with aiogpu.init(num_cpus=8, num_gpus=2, preload=("numpy",)):
        handles = [count.remote(at, at + step) for at in range(0, LIMIT, step)]
        segments = [await done for done in asyncio.as_completed(handles)]
    segments.sort()
    print("first segments:", [segment.primes for segment in segments[:5]])
    print("GPUs used:", sorted({gpu for s in segments for gpu in s.gpus}))
    total = sum(segment.primes for segment in segments)
    print(f"primes below {LIMIT}: {total}; without tasks: {sieve(0, LIMIT)}")


if __name__ == "__main__":
    aiogpu.run(main())
