"""A stream to its end, where that is an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any


async def drained(stream: AsyncIterator[Any]) -> tuple[list[Any], Exception]:
    """Its items, and the error after them."""
    found: list[Any] = []
    try:
        async for item in stream:
            found.append(item)  # noqa: PERF401 - those before an error
    except Exception as error:
        return found, error
    raise AssertionError("it has come to its end")
