"""Tasks and actors for tests of options. Light to import, since workers import them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, Final

import aiogpu
from tests.contract import tasks
from tests.contract.actor_classes import Plain
from tests.support.gate import pass_gate, pass_gate_softly, say


@aiogpu.remote
async def pass_and_say(path: str, name: str) -> None:
    """Wait at the gate, then say `name-done`."""
    await pass_gate_softly(path, name)
    say(path, f"{name}-done")


@aiogpu.remote
async def start_child(path: str, lifetime: Any) -> None:
    """Start a child with this lifetime, and end without waiting for it."""
    child = pass_and_say.options(lifetime=lifetime).remote(path, "child")
    await pass_gate_softly(path, "parent")
    del child


@aiogpu.remote
async def ignore_cancel(path: str, name: str) -> None:
    """Go on after each cancel, until the gate lets it pass."""
    import asyncio

    passing = asyncio.ensure_future(pass_gate_softly(path, name))
    while not passing.done():
        try:
            await asyncio.shield(passing)
        except asyncio.CancelledError:
            continue


@aiogpu.remote
def yield_and_swallow(path: str, name: str) -> Iterator[int]:
    """Yield once, then go on after each interrupt."""
    yield 0
    is_said = False
    while True:
        with suppress(BaseException):
            if not is_said:
                say(path, name)
                is_said = True
            while True:
                pass


class Subject(Plain):
    """The class behind `Actor`."""

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @aiogpu.method(num_returns=2)
    def pair(self) -> tuple[int, int]:
        return 1, 2

    @aiogpu.method(max_buffered=2)
    def endless(self, path: str) -> Iterator[int]:
        number = 0
        while True:
            say(path, f"begun-{number}")
            yield number
            number += 1


Actor = aiogpu.remote(Subject)


@aiogpu.remote(concurrency_groups={"io": 2})
class Grouped(Plain):
    """One group of two, beside the default one."""

    @aiogpu.method(concurrency_group="io")
    def read(self, path: str, name: str) -> str:
        return pass_gate(path, name)


COUNT: Final = 2**31 - 1
TIME: Final = 10**9


@aiogpu.remote(
    max_calls=COUNT, max_retries=COUNT, priority=COUNT, timeout=TIME, cancel_grace=TIME
)
def give(number: int) -> int:
    return number


@aiogpu.remote(max_buffered=COUNT, priority=-COUNT)
def count(last: int) -> Iterator[int]:
    yield from range(last)


@aiogpu.remote(num_returns=1000)
def many() -> tuple[int, ...]:
    return tuple(range(1000))


@aiogpu.remote(
    max_restarts=COUNT, max_task_retries=COUNT, concurrency_groups={"io": COUNT}
)
class Patient:
    """Has methods of all kinds."""

    async def give(self, number: int) -> int:
        return number

    @aiogpu.method(max_buffered=COUNT, concurrency_group="io")
    async def count(self, last: int) -> Any:
        for number in range(last):
            yield number


@aiogpu.remote(max_concurrency=COUNT)
class Interleaved:
    async def give(self, number: int) -> int:
        return number


@aiogpu.remote
def give_below(number: int) -> list[int]:
    """Wait for a child with the longest timeout, in plain code."""
    ready, _ = aiogpu.wait([give.remote(number)], timeout=TIME)
    return [aiogpu.get(ready[0], timeout=TIME), *count.remote(3)]


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

    @aiogpu.method(run_timeout=1e-4)
    async def brief(self, path: str, name: str) -> str:
        return await pass_gate_softly(path, name)


@aiogpu.remote(num_cpus=0)
async def caller(actor: Any, method: str, path: str, name: str) -> None:
    await getattr(actor, method).remote(path, name)


def is_stopping() -> bool:
    return aiogpu.get_runtime_context().is_stopping


@aiogpu.remote
async def save(path: str, name: str) -> None:
    """Work until the task is asked to stop, then save."""
    import asyncio

    say(path, f"{name}-{is_stopping()}")
    while not is_stopping():
        await asyncio.sleep(0)
    await pass_gate_softly(path, f"{name}-told")
    say(path, f"{name}-saved")


@aiogpu.remote
def save_plainly(path: str, name: str) -> None:
    """Do the same in plain code."""
    say(path, f"{name}-{is_stopping()}")
    while not is_stopping():
        pass
    pass_gate(path, f"{name}-told")
    say(path, f"{name}-saved")


async def wait_and_look(path: str, name: str) -> None:
    """Wait at the gate; say at the end if the task was asked to stop."""
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


@aiogpu.remote
async def held(path: str = "", name: str = "") -> dict[str, float]:
    """Return what the task holds; first wait at the gate, if there is one."""
    if path:
        await pass_gate_softly(path, name)
    return aiogpu.get_runtime_context().get_assigned_resources()


@aiogpu.remote(num_cpus=0)
async def start_held(entries: Any) -> dict[str, float]:
    """Return what a child holds that asks for any of these."""
    return await held.options(any_of=entries).remote()
