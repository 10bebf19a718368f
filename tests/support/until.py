"""Waiting for what comes by itself, where no gate can be placed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT = 20.0


async def until(is_so: Callable[[], object]) -> None:
    """Let the loop run until something is so; `TimeoutError` after a long while."""
    async with asyncio.timeout(LIMIT):
        while not is_so():
            await asyncio.sleep(0)
