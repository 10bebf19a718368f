"""Fixtures that hold every test to the same: nothing may be left behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from tests.gate import Gate


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], object]]:
    """Every test that awaits runs on the stock loop and on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short place for nodes' directories, empty before and after."""
    with tempfile.TemporaryDirectory(prefix="agt-", dir="/tmp") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)
        assert os.listdir(place) == [], "a node left its directory behind"


@pytest.fixture
def no_leaks(runtime_directory: Path) -> Iterator[None]:
    """No process, descriptor or mapping of aiogpu's outlives the test."""
    before = descriptors()
    yield
    left = psutil.Process().children(recursive=True)
    assert left == [], f"processes left: {left}"
    assert descriptors() == before, "descriptors left"
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:aiogpu" not in maps, "the control page is still mapped"


def descriptors() -> list[str]:
    """What this process's descriptors of a kind that nodes use lead to."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if "aiogpu-" in target or "pidfd" in target:
            targets.append(target)
    return sorted(targets)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    """A gate at which tasks say that they run, and wait."""
    async with Gate.open() as gate:
        yield gate
