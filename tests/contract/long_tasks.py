"""Tasks that take one large value after the other, and then wait to end."""

from __future__ import annotations

from collections.abc import Iterator

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly


@aiogpu.remote(num_cpus=0.1)
def yield_many(count: int, size: int) -> Iterator[memoryview]:
    """So many of that size."""
    for _ in range(count):
        yield memoryview(bytes(size))


@aiogpu.remote(num_cpus=0.1)
def make(size: int) -> memoryview:
    """One of that size."""
    return memoryview(bytes(size))


@aiogpu.remote(num_cpus=0.1)
class Idle:
    """An actor that does nothing."""

    def ping(self) -> None:
        """Answer."""


def _take_one(size: int) -> int:
    return len(aiogpu.get(make.remote(size)))


@aiogpu.remote(num_cpus=0.1)
def take(path: str, way: str, count: int, size: int) -> None:
    """Take them and let each one go."""
    if way == "items":
        for item in yield_many.options(max_buffered=1).remote(count, size):
            del item
    for _ in range(count):
        if way == "results":
            _take_one(size)
        elif way == "values":
            len(aiogpu.get(aiogpu.get(aiogpu.put(memoryview(bytes(size))))))
    aiogpu.get(make.remote(1))
    pass_gate(path, "taken")


@aiogpu.remote(num_cpus=0.1)
async def take_softly(path: str, way: str, count: int, size: int) -> None:
    """The same in a coroutine."""
    if way == "items":
        async for item in yield_many.options(max_buffered=1).remote(count, size):
            del item
    for _ in range(count):
        if way == "results":
            await make.remote(size)
        elif way == "values":
            await (await aiogpu.put(memoryview(bytes(size))))
    await make.remote(1)
    await pass_gate_softly(path, "taken")


@aiogpu.remote(num_cpus=0.1)
def drop_an_actor(path: str) -> None:
    """Have one for a moment."""
    idle = Idle.remote()
    aiogpu.get(idle.ping.remote())
    del idle
    aiogpu.get(make.remote(1))
    pass_gate(path, "taken")
