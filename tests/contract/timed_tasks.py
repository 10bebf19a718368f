"""Tasks whose time is limited: light to import, as workers do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiogpu
from tests.contract import tasks
from tests.support.gate import pass_gate, pass_gate_softly, say


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


def is_stopping() -> bool:
    return aiogpu.get_runtime_context().is_stopping


@aiogpu.remote
async def save(path: str, name: str) -> None:
    """Work until it is told that all stops, then take the time to save."""
    import asyncio

    say(path, f"{name}-{is_stopping()}")
    while not is_stopping():
        await asyncio.sleep(0)
    await pass_gate_softly(path, f"{name}-told")
    say(path, f"{name}-saved")


@aiogpu.remote
def save_plainly(path: str, name: str) -> None:
    """The same in plain code."""
    say(path, f"{name}-{is_stopping()}")
    while not is_stopping():
        pass
    pass_gate(path, f"{name}-told")
    say(path, f"{name}-saved")


async def wait_and_look(path: str, name: str) -> None:
    """Say, when it is stopped, whether it knows."""
    try:
        await pass_gate_softly(path, name)
    finally:
        say(path, f"{name}-{is_stopping()}")


@aiogpu.remote
async def look_as_task(path: str, name: str) -> None:
    await wait_and_look(path, name)


@aiogpu.remote
class Looking:
    async def look(self, path: str, name: str) -> None:
        await wait_and_look(path, name)

    def is_stopping(self) -> bool:
        return is_stopping()
