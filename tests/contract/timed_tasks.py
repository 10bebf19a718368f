"""Tasks whose time is limited: light to import, as workers do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
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


class Timed:
    """An actor each of whose methods may run for a short time."""

    @aiogpu.method(run_timeout=0.2)
    def plain(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    @aiogpu.method(run_timeout=0.2)
    def items(self, path: str, name: str) -> Iterator[int]:
        yield 0
        pass_gate(path, name)

    @aiogpu.method(run_timeout=0.2)
    def each(self, path: str) -> str:
        return pass_gate(path, "each")

    @aiogpu.method(run_timeout=0.2)
    def quick(self) -> str:
        return "quick"


class TimedCoroutines(Timed):
    @aiogpu.method(run_timeout=0.2)
    async def coroutine(self, path: str, name: str) -> str:
        return await pass_gate_softly(path, name)


@aiogpu.remote(num_cpus=0)
async def caller(actor: Any, method: str, path: str, name: str) -> None:
    await getattr(actor, method).remote(path, name)


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
