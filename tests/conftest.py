"""Fixtures that hold every test to the same: nothing may be left behind."""

from __future__ import annotations

import asyncio
import compileall
import gc
import re
from collections.abc import AsyncIterator, Callable
from typing import Final
from zlib import crc32

import pytest
import uvloop

from tests.gate import Gate

pytest_plugins = ["aiogpu.testing.fixtures"]


LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], object]]:
    """Every test that awaits runs on the stock loop and on uvloop."""
    return dict(LOOPS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Each case of `either_loop` runs on one loop, and on the other if all is run."""
    if any("[" in argument for argument in config.args):
        return  # who names a case shall have it
    for item in items:
        if item.get_closest_marker("either_loop"):
            test, _, rest = item.nodeid.partition("[")
            loop, _, case = rest.rstrip("]").partition("-")
            drawn = crc32(f"{test.rpartition('/')[2]} {case}".encode()) % len(LOOPS)
            if loop in LOOPS and loop != list(LOOPS)[drawn]:
                item.add_marker(pytest.mark.slow)


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
