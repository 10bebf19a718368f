"""Fixtures that hold every test to the same: nothing may be left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.gate import Gate

pytest_plugins = ["aiogpu.testing.fixtures"]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], object]]:
    """Every test that awaits runs on the stock loop and on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    """A gate at which tasks say that they run, and wait."""
    async with Gate.open() as gate:
        yield gate
