"""Tasks whose time is limited: light to import, as workers do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiogpu
from tests.contract import tasks
from tests.support.gate import pass_gate_softly


@aiogpu.remote
async def items(path: str, name: str) -> AsyncIterator[int]:
    yield 0
    await pass_gate_softly(path, name)


@aiogpu.remote
async def each(path: str) -> int:
    await pass_gate_softly(path, "in")
    return 1


@aiogpu.remote(num_cpus=0)
async def parent(path: str, name: str, options: dict[str, Any]) -> None:
    await tasks.gated_coroutine.options(**options).remote(path, name)
