"""Generators as tasks and as methods: light to import, since workers import them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from typing import Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly, say


@aiogpu.remote
def numbers(end: int) -> Iterator[int]:
    yield from range(end)


@aiogpu.remote
async def numbers_softly(end: int) -> AsyncIterator[int]:
    for number in range(end):
        yield number


KINDS = [numbers, numbers_softly]


@aiogpu.remote
def endless(path: str) -> Iterator[int]:
    """Say "begun-N" before each number, and "closed" at the end."""
    number = 0
    try:
        while True:
            say(path, f"begun-{number}")
            yield number
            number += 1
    except GeneratorExit:
        say(path, "exit")
        raise
    finally:
        say(path, "closed")


@aiogpu.remote
async def endless_softly(path: str) -> AsyncIterator[int]:
    """Do the same as a coroutine."""
    number = 0
    try:
        while True:
            say(path, f"begun-{number}")
            yield number
            number += 1
    except GeneratorExit:
        say(path, "exit")
        raise
    finally:
        say(path, "closed")


ENDLESS = [endless, endless_softly]


@aiogpu.remote
def gated(path: str) -> Iterator[int]:
    """Yield, wait at the gate, yield again; say "interrupted" if interrupted there."""
    yield 1
    try:
        pass_gate(path, "inside")
    except KeyboardInterrupt:
        say(path, "interrupted")
        raise
    yield 2


@aiogpu.remote
async def gated_softly(path: str) -> AsyncIterator[int]:
    """Do the same as a coroutine; say "inside-cancelled" if cancelled there."""
    yield 1
    await pass_gate_softly(path, "inside")
    yield 2


GATED = [gated, gated_softly]


@aiogpu.remote
def fails_after(good: int, kind: type[Exception] = ZeroDivisionError) -> Iterator[int]:
    yield from range(good)
    raise kind("after", good)


@aiogpu.remote
async def fails_softly(
    good: int, kind: type[Exception] = ZeroDivisionError
) -> AsyncIterator[int]:
    for number in range(good):
        yield number
    raise kind("after", good)


FAILING = [fails_after, fails_softly]


@aiogpu.remote
def fails_at_its_end(path: str) -> Iterator[int]:
    try:
        yield 1
        yield 2
    finally:
        say(path, "finally")
        raise ValueError("in its finally")


@aiogpu.remote
def unsendable(path: str) -> Iterator[object]:
    try:
        yield 1
        yield (number for number in ())
        yield 3
    finally:
        say(path, "closed")


@aiogpu.remote
def unreadable(path: str) -> Iterator[object]:
    from tests.contract.tasks import UnreadableResult

    try:
        yield UnreadableResult("1/0")
        yield from range(10**9)
    finally:
        say(path, "closed")


@aiogpu.remote(retry_exceptions=[OSError], max_retries=2)
def flaky(path: str) -> Iterator[int]:
    from pathlib import Path

    lives = Path(path)
    lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
    for number in range(90):
        yield number
        if number == 40 * len(lives.read_text()):
            raise OSError("again")


@aiogpu.remote
def dies_after(good: int, path: str) -> Iterator[int]:
    """Kill the process in two lives, at different items; yield all in the third."""
    from pathlib import Path

    lives = Path(path)
    lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
    life = len(lives.read_text())
    for number in range(good):
        yield number
        if number == 10 * life and life < 3:
            os.kill(os.getpid(), signal.SIGKILL)


@aiogpu.remote
def total(end: int) -> int:
    """Consume a child's stream in plain code."""
    return sum(numbers.remote(end))  # type: ignore[arg-type]


@aiogpu.remote
async def total_softly(end: int) -> int:
    """Do the same in a coroutine."""
    return sum([number async for number in numbers_softly.remote(end)])


@aiogpu.remote
def first_of_endless(path: str) -> int:
    """Leave a child's stream early, then wait at the gate."""
    for number in endless.remote(path):
        if number == 3:
            break
    pass_gate(path, "parent")
    return number


@aiogpu.remote
async def first_of_endless_softly(path: str) -> int:
    """Do the same in a coroutine."""
    async for number in endless_softly.remote(path):
        if number == 3:
            break
    await pass_gate_softly(path, "parent")
    return number


@aiogpu.remote
def doubled(end: int) -> Iterator[int]:
    """A stream of a stream."""
    for number in numbers.remote(end):
        yield 2 * number


@aiogpu.remote
async def doubled_softly(end: int) -> AsyncIterator[int]:
    """Do the same as a coroutine."""
    async for number in numbers_softly.remote(end):
        yield 2 * number


@aiogpu.remote
def misuses() -> list[str]:
    """Use a stream as a handle in plain code; return the errors, and what is left."""
    from aiogpu import get
    from aiogpu.errors import MisuseError

    messages = []
    with closing(numbers.remote(3)) as stream:  # type: ignore[type-var]
        for use in (bool, get, lambda s: s.__aiter__(), lambda s: s.__reduce__()):
            try:
                use(stream)
            except MisuseError as error:
                messages.append(str(error))
    messages.append(repr(list(stream)))  # type: ignore[call-overload]
    return messages


@aiogpu.remote(cancel_grace=0.1)
def deaf(path: str) -> Iterator[int]:
    """Wait at the gate after the first item, and ignore every interrupt."""
    yield 1
    while True:
        with suppress(KeyboardInterrupt):
            pass_gate(path, "deaf")


class Counting:
    """Stream numbers, and remember which streams have ended."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.ended: list[str] = []

    def count(self, end: int) -> Iterator[int]:
        try:
            yield from range(end)
        finally:
            self.ended.append("count")
            if self.path:
                say(self.path, "count")

    @aiogpu.method(max_buffered=1)
    def slowly(self) -> Iterator[int]:
        number = 0
        while True:
            say(self.path, f"begun-{number}")
            yield number
            number += 1

    def fail(self, good: int) -> Iterator[int]:
        yield from range(good)
        raise ZeroDivisionError("after", good)

    def has_ended(self) -> list[str]:
        return self.ended

    def leave(self) -> None:
        aiogpu.exit_actor()


@aiogpu.remote(num_cpus=0)
class Serial(Counting):
    """One call at a time."""


@aiogpu.remote(num_cpus=0, max_concurrency=4)
class Threaded(Counting):
    """Four calls at once, in threads."""


@aiogpu.remote(num_cpus=0)
class Async(Counting):
    """Calls interleave on a loop."""

    async def count_softly(self, end: int) -> AsyncIterator[int]:
        try:
            for number in range(end):
                yield number
        finally:
            self.ended.append("softly")
            if self.path:
                say(self.path, "softly")


@aiogpu.remote
def sum_of(actor: Any) -> int:
    """Consume an actor's stream in plain code."""
    return sum(actor.count.remote(500))


@aiogpu.remote
async def sum_softly(actor: Any) -> int:
    """Do the same in a coroutine, after leaving another stream early."""
    async for number in actor.count.remote(10**9):
        if number == 5:
            break
    return sum([number async for number in actor.count.remote(500)])


@aiogpu.remote(num_cpus=0)
async def asks(actor: Any, times: int) -> AsyncIterator[list[str]]:
    """Call an actor whose only handle is this generator's argument."""
    for _ in range(times):
        yield await actor.has_ended.remote()


@aiogpu.remote
async def makes(number: int) -> AsyncIterator[Any]:
    """Yield handles of actors that this task has made."""
    for _ in range(number):
        yield Async.remote()


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
