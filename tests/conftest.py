"""Fixtures that hold every test to the same: nothing may be left behind."""

from __future__ import annotations

import asyncio
import compileall
import gc
import re
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.gate import Gate

pytest_plugins = ["aiogpu.testing.fixtures"]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], object]]:
    """Every test that awaits runs on the stock loop and on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_configure(config: pytest.Config) -> None:
    """Compile once what a thousand interpreters import that are started here.

    `PYTHONDONTWRITEBYTECODE`, which many containers set, would have each compile it.
    """
    if not hasattr(config, "workerinput"):
        is_test = re.compile(r"/test_[^/]*$")
        for folder in ("aiogpu", "benchmarks", "tests"):
            compileall.compile_dir(config.rootpath / folder, rx=is_test, quiet=2)


def pytest_collection_finish() -> None:
    """Have the collector look past the thousands of tests, whenever it is asked."""
    gc.collect()
    gc.freeze()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    """A gate at which tasks say that they run, and wait."""
    async with Gate.open() as gate:
        yield gate
