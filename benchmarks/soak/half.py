"""What both halves of the soak have in common: what they claim of their programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from benchmarks.soak.box import Box
from benchmarks.soak.client import Client
from benchmarks.soak.faults import Faults
from benchmarks.soak.record import Record
from benchmarks.soak.watch import Watch

LEGAL: Final = "every handle ends once, in a legal way"
NONE_HANGS: Final = "no handle hangs"
BALANCED: Final = "the books balance at rest"
ENDS: Final = "each program ends by itself, and leaves nothing in its process"
NOTHING_LEFT: Final = "no process and no file is left"
NO_COMPLAINT: Final = "no program complains of aiogpu"
COMPLAINTS: Final = (
    *("was not carried out", "never awaited", "Warning: "),
    "refused shared memory",
)
COMPLAINTS_TOLD: Final = 2000
"""Lines of their stderr that are printed where something has hung, the last ones."""
STORM: Final = (5.0, 30.0)
"""Seconds from one rest to the next, at least and at most."""
RESTS: Final = 8
"""That a half has about, if it is short."""


def storm_of(seconds: float) -> float:
    """How long it storms between two rests."""
    least, most = STORM
    return min(most, max(least, seconds / RESTS))


def enter(record: Record, what: str, told: dict[str, Any]) -> None:
    """Claim what a program says of its account, of its whole life."""
    if not told:
        return
    record.look(LEGAL, [f"{what}: {each}" for each in told["wrong"]])
    record.look(NONE_HANGS, [f"{what}: {each}" for each in told["hung"]])
    record.add(f"{what}: operations", told["operations"])
    record.add(f"{what}: ends of handles", {"begun": told["begun"], **told["ends"]})


async def finish(record: Record, what: str, client: Client) -> None:
    """End a program in order, and claim how it does."""
    client.say("end")
    told = await client.heard("ended")
    status = await client.ended()
    record.check(ENDS, status == 0, f"{client.name} ended with {status}")
    record.look(ENDS, [f"{client.name}: {each}" for each in told["left"]])
    enter(record, what, told)


def hear_complaints(record: Record, box: Box) -> None:
    """Claim that nothing is on their stderr that nobody has caused."""
    lines = box.all_complaints().splitlines()
    found = [index for index, line in enumerate(lines) if _is_complaint(line)]
    told = ["\n".join(lines[max(0, index - 3) : index + 40]) for index in found]
    record.look(NO_COMPLAINT, told)
    if (claim := record.claims.get(NONE_HANGS)) and claim.failures:
        print("\n".join(lines[-COMPLAINTS_TOLD:]), flush=True)


def _is_complaint(line: str) -> bool:
    return line.startswith("Traceback") or any(word in line for word in COMPLAINTS)


@asynccontextmanager
async def under_fire(box: Box, faults: Faults, watch: Watch) -> AsyncIterator[None]:
    """Faults, and looks at what they do, for the time of the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in (faults.run(), watch.run())]
        yield
        for task in tasks:
            task.cancel()
