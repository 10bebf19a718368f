"""Ways to watch a node's zygotes."""

from __future__ import annotations

import asyncio

import aiogpu
from aiogpu.runtime.zygote.generations import ZygoteGenerations, Zygotes


def zygotes_of(session: aiogpu.types.Node) -> Zygotes:
    """All zygotes of a node."""
    zygotes = session._session._engine._supervisor._parts.driver.pool.zygotes  # type: ignore[attr-defined]
    assert isinstance(zygotes, Zygotes)
    return zygotes


async def next_generation(lineage: ZygoteGenerations, served: int) -> None:
    """Wait until another zygote serves than that of this number."""
    async with asyncio.timeout(60):
        while lineage.current.generation == served or lineage.current.ready is None:
            await asyncio.sleep(0)


async def learnt(lineage: ZygoteGenerations, module: str) -> None:
    """Wait until a zygote serves that was to import this module, too."""
    async with asyncio.timeout(60):
        while module not in lineage.current.learnt or lineage.current.ready is None:
            await asyncio.sleep(0)
