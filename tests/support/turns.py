"""Turns of the event loop, for tests of what asyncio does by and by."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


async def turns(count: int = 5) -> None:
    """Let everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def no_complaints() -> AsyncIterator[None]:
    """Nothing is left in the end of which asyncio complains."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
    yield
    await turns()
    gc.collect()
    await turns()
    assert told == []
