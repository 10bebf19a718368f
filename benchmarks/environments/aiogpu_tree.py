"""Tasks that start tasks, in aiogpu's words. Workers import it by name."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiogpu

# Not known to type checkers before it exists.
_get: Final[Any] = getattr(aiogpu, "get", None)


@aiogpu.remote
def leaf(number: int) -> int:
    """Do nothing."""
    return 0


@aiogpu.remote
def branch(width: int) -> int:
    """Start leaves and wait for them."""
    below: list[int] = _get([leaf.remote(number) for number in range(width)])
    return width + sum(below)


@aiogpu.remote
def root(width: int) -> int:
    """Start branches and wait for them."""
    below: list[int] = _get([branch.remote(width - 1) for _ in range(width)])
    return width + sum(below)


@aiogpu.remote
async def async_branch(width: int) -> int:
    """The same as a coroutine."""
    below = await asyncio.gather(*(leaf.remote(number) for number in range(width)))
    return width + sum(below)


@aiogpu.remote
async def async_root(width: int) -> int:
    """The same as a coroutine."""
    below = await asyncio.gather(
        *(async_branch.remote(width - 1) for _ in range(width))
    )
    return width + sum(below)
