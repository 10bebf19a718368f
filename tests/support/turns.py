"""Turns of the event loop, for tests of work that asyncio defers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


async def turns(count: int = 5) -> None:
    """Let all callbacks and tasks run that are ready."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def no_complaints() -> AsyncIterator[None]:
    """Check at the end that asyncio has reported no error."""
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    yield
    await turns()
    gc.collect()
    await turns()
    assert errors == []
