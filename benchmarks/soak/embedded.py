"""The half in which the node lives in a program."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from benchmarks.soak.box import box
from benchmarks.soak.client import Client
from benchmarks.soak.faults import Faults
from benchmarks.soak.half import (
    BALANCED,
    NOTHING_LEFT,
    enter,
    finish,
    hear_complaints,
    storm_of,
    under_fire,
)
from benchmarks.soak.record import Record
from benchmarks.soak.watch import Watch

WHAT: Final = "embedded"
IN_FLIGHT: Final = 20
OF_BRIEF: Final = 8
BRIEFLY: Final = (1.0, 6.0)
"""Seconds for which a program lives that is killed with its node."""


async def soak(
    record: Record, seed: str, seconds: float, progress: Callable[[str], None]
) -> None:
    """One program that lasts, and beside it others that are killed."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    with box() as place:
        faults, watch = Faults(place, f"{seed}/faults"), Watch(place, WHAT, record)
        client = await Client.start(place, WHAT, "local", seed, IN_FLIGHT)
        await client.heard("ready")
        hand = random.Random(f"{seed}/brief")
        try:
            while loop.time() < ends:
                client.say("storm")
                brief = asyncio.create_task(_brief(record, seed, hand))
                async with under_fire(place, faults, watch):
                    for _ in range(round(storm_of(seconds))):
                        await asyncio.sleep(1)
                        begun = client.told.get("begun", 0)
                        progress(f"{begun} handles, {watch.latest}")
                await brief
                client.say("rest")
                told = await client.heard("rested")
                record.look(
                    BALANCED, [f"{WHAT}: {each}" for each in told["unbalanced"]]
                )
                watch.weigh(client.pid)
        except BaseException:
            enter(record, WHAT, client.told)
            raise
        await finish(record, WHAT, client)
        record.look(NOTHING_LEFT, await place.left())
        hear_complaints(record, place)
        record.add(f"{WHAT}: faults", faults.dealt)
        watch.judge()


async def _brief(record: Record, seed: str, hand: random.Random) -> None:
    """A program that is killed amid its work; its node goes with it."""
    name, life = f"brief-{hand.randrange(1 << 30)}", hand.uniform(*BRIEFLY)
    with box() as place:
        client = await Client.start(place, name, "local", seed, OF_BRIEF)
        await client.heard("ready")
        client.say("storm")
        await asyncio.sleep(life)
        await client.kill()
        enter(record, f"{WHAT}, programs killed", client.told)
        left = await place.left()
        record.look(NOTHING_LEFT, [f"killed {name}: {each}" for each in left])
        record.add(f"{WHAT}: faults", {"kill programs": 1})
