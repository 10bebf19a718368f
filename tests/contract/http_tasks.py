"""The tasks of the tests of `aiogpu.fastapi`, which import no web framework."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiogpu
from tests.support.gate import pass_gate_softly, say


@aiogpu.remote
def items(given: list[Any]) -> Iterator[Any]:
    for item in given:
        if isinstance(item, Exception):
            raise item
        yield item


@aiogpu.remote
async def waiting(path: str, name: str) -> str:
    return await pass_gate_softly(path, name)


@aiogpu.remote
async def stopping(path: str) -> AsyncIterator[str]:
    yield "first"
    import asyncio

    try:
        await asyncio.Event().wait()
    finally:
        say(path, "stopped")


@aiogpu.remote
def echo(text: str) -> str:
    return text
