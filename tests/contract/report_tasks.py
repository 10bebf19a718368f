"""Tasks that report, print and log. Light to import, since workers import them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly


@aiogpu.remote
def plain(count: int) -> int:
    for step in range(count):
        aiogpu.report(step=step)
    return count


@aiogpu.remote
async def coroutine(count: int) -> int:
    import asyncio

    for step in range(count):
        # An asyncio task of a task reports for it.
        await asyncio.create_task(later(step))
    return count


async def later(step: int) -> None:
    aiogpu.report(step=step)


@aiogpu.remote
def generator(count: int) -> Iterator[int]:
    for step in range(count):
        aiogpu.report(step=step)
        yield step


@aiogpu.remote
async def async_generator(count: int) -> AsyncIterator[int]:
    for step in range(count):
        aiogpu.report(step=step)
        yield step


@aiogpu.remote(num_returns=2)
def pair(count: int) -> tuple[int, int]:
    for step in range(count):
        aiogpu.report(step=step)
    return count, count


class Plain:
    def run(self, count: int) -> int:
        for step in range(count):
            aiogpu.report(step=step)
        return count


class DiesOnce:
    """An actor whose first call prints, and ends the process."""

    def run(self, marker: str) -> None:
        if not os.path.exists(marker):
            open(marker, "x").close()
            print("dies", flush=True)
            os._exit(1)
        aiogpu.report(step=0)


class Coroutines:
    async def run(self, count: int) -> int:
        import asyncio

        for step in range(count):
            await asyncio.sleep(0)
            aiogpu.report(step=step)
        return count


@aiogpu.remote
def by_child(count: int) -> tuple[list[int], int]:
    handle: Any = plain.remote(count)
    return [report["step"] for report in handle.reports()], aiogpu.get(handle)


@aiogpu.remote
async def by_child_later(count: int) -> tuple[list[int], int]:
    handle = plain.remote(count)
    return [report["step"] async for report in handle.reports()], await handle


@aiogpu.remote
def of_a_thread() -> None:
    thread = threading.Thread(target=aiogpu.report, kwargs={"step": 0})
    thread.start()
    thread.join()


@aiogpu.remote
def gated(path: str, name: str) -> None:
    aiogpu.report(step=0)
    pass_gate(path, name)
    aiogpu.report(step=1)


@aiogpu.remote
async def gated_softly(path: str, name: str) -> None:
    aiogpu.report(step=0)
    await pass_gate_softly(path, name)


@aiogpu.remote(max_retries=1, retry_exceptions=True)
def retried(place: str) -> None:
    attempt = Path(place).exists()
    Path(place).touch()
    aiogpu.report(attempt=int(attempt))
    if not attempt:
        raise OSError("again")


class Figure:
    """Has `item`, like numpy's scalars and arrays."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def item(self) -> float:
        (number,) = self.numbers
        return number


@aiogpu.remote
def refusal(case: str) -> str:
    """Make a report that is refused; return the error."""
    cases: dict[str, dict[str, Any]] = {
        "object": {"loss": object()},
        "array": {"loss": Figure(1.0, 2.0)},
        "within": {"all": [1, {"x": {2}}]},
        "deep": {"all": deep()},
        "large": {"text": "x" * 20_000},
        "nothing": {},
    }
    try:
        aiogpu.report(**cases[case])
    except aiogpu.AiogpuError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def deep() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


@aiogpu.remote
def values() -> None:
    aiogpu.report(
        figure=Figure(0.5), lists=[1, (2.5, None)], table={"x": True}, text="ü", raw=b""
    )


class ReportsAsItIsMade:
    def __init__(self) -> None:
        aiogpu.report(step=0)

    def run(self) -> None:
        """Do nothing."""


@aiogpu.remote
def reports_of(handles: list[Any]) -> None:
    """Read the reports of another task's child."""
    handles[0].reports()


def talk(word: str) -> int:
    print(word)
    print(f"{word} on stderr", file=sys.stderr)
    os.write(1, f"{word} raw\n".encode())
    return os.getpid()


def parent(word: str) -> int:
    pid: int = aiogpu.get(aiogpu.remote(talk).remote(word))
    return pid


def flood(lines: int) -> int:
    for _ in range(lines):
        print("x" * 1000)
    return lines


def fail() -> None:
    raise KeyError("x")


class Strange:
    """Cannot be pickled, and is not a plain value."""

    def __reduce__(self) -> Any:
        raise TypeError

    def __repr__(self) -> str:
        return "<Strange>"


class Logs:
    def talk(self) -> int:
        log = logging.getLogger("lib.part")
        log.warning("%s of %d", "one", 2, extra={"mine": {"a": [1]}})
        log.error("%s", Strange(), extra={"mine": Strange()})
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("failed")
        log.debug("not shown")
        return os.getpid()


def log_by_child() -> int:
    return aiogpu.get(aiogpu.remote(Logs().talk).remote())
