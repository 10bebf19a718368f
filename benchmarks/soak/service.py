"""The half in which the node is a service, and programs come, go and are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import aiogpu
from benchmarks.soak import books
from benchmarks.soak.box import Box, box
from benchmarks.soak.client import Client
from benchmarks.soak.faults import Faults
from benchmarks.soak.half import (
    BALANCED,
    ENDS,
    NOTHING_LEFT,
    enter,
    finish,
    hear_complaints,
    storm_of,
    under_fire,
)
from benchmarks.soak.record import Record
from benchmarks.soak.watch import Watch

WHAT: Final = "service"
CLIENTS: Final = 3
IN_FLIGHT: Final = 8
LIVES: Final = (2.0, 8.0)
"""Seconds for which a program works before it goes or is killed."""
KILLED: Final = 0.3
"""The part of the programs that is killed."""


class Crowd:
    """Programs that share a node: so many at a time, each for a while."""

    def __init__(self, place: Box, record: Record, seed: str) -> None:
        self._place = place
        self._record = record
        self._seed = seed
        self._hand = random.Random(f"{seed}/clients")
        self._started = 0
        self.begun = 0

    async def run(self, seconds: float) -> None:
        """For so long; then until the last one has gone."""
        ends = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._one_after_the_other(ends))

    async def _one_after_the_other(self, ends: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < ends:
            self._started += 1
            life = min(self._hand.uniform(*LIVES), max(1.0, ends - loop.time()))
            is_killed = self._hand.random() < KILLED
            await self._live(f"client-{self._started}", life, is_killed)

    async def _live(self, name: str, life: float, is_killed: bool) -> None:
        address = self._place.address
        client = await Client.start(self._place, name, address, self._seed, IN_FLIGHT)
        await client.heard("ready")
        client.say("storm")
        try:
            await asyncio.sleep(life)
        except asyncio.CancelledError:
            enter(self._record, WHAT, client.told)
            raise
        if is_killed:
            await client.kill()
            self._record.add(f"{WHAT}: faults", {"kill programs": 1})
            enter(self._record, f"{WHAT}, programs killed", client.told)
        else:
            await finish(self._record, WHAT, client)
        self.begun += client.told.get("begun", 0)


async def soak(
    record: Record, seed: str, seconds: float, progress: Callable[[str], None]
) -> None:
    """A service that lasts, with its programs, and beside it others that are ended."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    with box() as place:
        await place.start_service()
        node = next(each for each in place.processes() if each.part == "nodes")
        faults, watch = Faults(place, f"{seed}/faults"), Watch(place, WHAT, record)
        crowd, hand = Crowd(place, record, seed), random.Random(f"{seed}/brief")
        while loop.time() < ends:
            brief = asyncio.create_task(_brief(record, seed, hand))
            async with under_fire(place, faults, watch):
                storm = asyncio.create_task(crowd.run(storm_of(seconds)))
                while not storm.done():
                    await asyncio.wait([storm], timeout=1)
                    progress(f"{crowd.begun} handles, {watch.latest}")
                await storm
            await brief
            record.look(BALANCED, [f"{WHAT}: {each}" for each in await _idle(place)])
            watch.weigh(node.pid)
        await place.stop_service(drain=5)
        record.look(NOTHING_LEFT, await place.left(but_logs=True))
        hear_complaints(record, place)
        record.add(f"{WHAT}: faults", faults.dealt)
        watch.judge()


async def _idle(place: Box) -> list[str]:
    """What of a service that nobody uses does not balance."""
    async with aiogpu.init(address=place.address, log_to_driver=False):
        return await books.settled(books.public)


async def _brief(record: Record, seed: str, hand: random.Random) -> None:
    """A service that is killed or stopped under a program, which is told so."""
    with box() as place:
        name = f"brief-{hand.randrange(1 << 30)}"
        await place.start_service()
        client = await Client.start(place, name, place.address, seed, 8, is_mortal=True)
        await client.heard("ready")
        client.say("storm")
        await asyncio.sleep(hand.uniform(*LIVES))
        is_killed = hand.random() < 0.5
        if is_killed:
            node = next(each for each in place.processes() if each.part == "nodes")
            with suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGKILL)
        else:
            await place.stop_service(drain=0)
        await finish(record, f"{WHAT} that is ended", client)
        found = await place.left(but_logs=True)
        if is_killed:  # what it is met at stays, until the next start
            found = [each for each in found if "node." not in each]
        record.look(NOTHING_LEFT, [f"{name}: {each}" for each in found])
        hear_complaints(record, place)
        record.check(ENDS, True)
        record.add(f"{WHAT}: faults", {"kill nodes" if is_killed else "stop nodes": 1})
