"""One of several programs that share a node: `race` for a while, or `wait` in it.

It says "ready" when it has joined, begins at the first line on stdin, says what came
of it, and ends with stdin.
"""

from __future__ import annotations

import asyncio
import sys
from time import monotonic

import aiogpu

IN_FLIGHT = 64
"""Calls that a racer has under way."""


@aiogpu.remote
def noop(number: int) -> None:
    """Do nothing."""


@aiogpu.remote(num_gpus=1)
def wait(number: int) -> None:
    """Never run: the GPU is taken."""


async def race(seconds: float) -> int:
    """How many calls have ended after so long."""
    until, done = monotonic() + seconds, 0

    async def lane() -> None:
        nonlocal done
        while monotonic() < until:
            await noop.remote(1)
            done += 1

    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    return done


async def main(address: str, what: str, amount: float) -> None:
    """Join, do it, and leave."""
    loop = asyncio.get_running_loop()
    async with aiogpu.init(address=address, log_to_driver=False):
        await noop.remote(1) if what == "race" else await aiogpu.cluster_resources()
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        if what == "race":
            print(await race(amount), flush=True)
        else:
            handles = [wait.remote(number) for number in range(int(amount))]
            await aiogpu.cluster_resources()  # the node has heard of all of them
            print(len(handles), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    aiogpu.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
