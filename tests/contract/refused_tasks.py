"""What a thread may not call: light to import, since workers import it."""

from __future__ import annotations

from collections.abc import Iterator

import aiogpu


@aiogpu.remote
def count(end: int) -> Iterator[int]:
    yield from range(end)


@aiogpu.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def add(self, number: int = 1) -> int:
        self.calls += number
        return self.calls

    async def add_softly(self) -> int:
        return self.add()

    @aiogpu.method(num_returns=2)
    def pair(self) -> tuple[int, int]:
        return self.add(), 2

    def each(self, end: int) -> Iterator[int]:
        yield from range(end)
