"""Tasks with a `setup`. Light to import, since workers import them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiogpu

loaded: list[int] = []


def load() -> None:
    """Note this process, as a model would be loaded."""
    loaded.append(os.getpid())


@aiogpu.remote(setup=load)
def count(_: object = None) -> tuple[int, list[int]]:
    """Return this process, and in which processes the setup has run."""
    return os.getpid(), loaded


@aiogpu.remote(setup=load, max_buffered=1)
def counts() -> Iterator[tuple[int, list[int]]]:
    """Yield the same."""
    yield os.getpid(), loaded


@aiogpu.remote(setup=load)
async def count_async() -> tuple[int, list[int]]:
    """Return the same."""
    return os.getpid(), loaded


def fail_first() -> None:
    """Fail unless a file exists; make it."""
    path = Path(os.environ["AIOGPU_TEST_SETUP"])
    if not path.exists():
        path.touch()
        raise ConnectionError("no database")


@aiogpu.remote(setup=fail_first)
def answer() -> int:
    """Return a number."""
    return 42


def start_a_task() -> None:
    """Start a task, as user code may."""
    from aiogpu import sync

    loaded.append(sync.get(child.remote()))


@aiogpu.remote
def child() -> Any:
    """Return a number."""
    return 7
