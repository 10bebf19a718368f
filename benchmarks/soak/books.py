"""Whether a node's books balance when nobody wants anything of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiogpu
from benchmarks.soak.operation import LIMIT

EVERY: Final = 0.05
"""Seconds between two looks."""


async def settled(look: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """What still does not balance after the longest that may pass."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + LIMIT
    while wrong := await look():
        if loop.time() > ends:
            return wrong
        gc.collect()
        await asyncio.sleep(EVERY)
    return []


async def public() -> list[str]:
    """What the public interface shows that a node without work has not."""
    status = await aiogpu.status()
    wrong = [
        f"{name}: {status.available[name]:g} of {total:g} is free"
        for name, total in status.total.items()
        if status.available[name] != total
    ]
    wrong += [f"a task is there: {task}" for task in status.tasks]
    wrong += [f"an actor is there: {actor}" for actor in status.actors]
    wrong += [f"a placement is there: {group}" for group in status.placements]
    if status.waiting_count:
        wrong.append(f"{status.waiting_count} tasks wait")
    wrong += [
        f"device {device.id} is held or out of use: {device}"
        for device in status.devices
        if device.holders
    ]
    return wrong


def inner(engine: Any) -> Callable[[], Awaitable[list[str]]]:
    """The same of an embedded node, with all that it keeps for itself."""

    async def look() -> list[str]:
        driver = engine._open_driver
        scheduler = driver.scheduler
        wrong = await public()
        scheduler.check()
        kept = {
            "tasks": len(scheduler.tasks),
            "leases": len(scheduler.ledger.leases),
            "calls": len(driver._calls),
            "actors": len(list(driver.actors.all())),
        }
        # A task keeps the last view that it was given in its worker, for good.
        kept_by_tasks = len(scheduler.workers)
        if len(engine.store._segments) > kept_by_tasks:
            kept["segments"] = len(engine.store._segments)
        return wrong + [
            f"{count} {what} are kept" for what, count in kept.items() if count
        ]

    return look
