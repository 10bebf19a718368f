"""Fixtures for the tests of the API: a fake engine, fake actors, a fake worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aiogpu.client.current import Context, current
from tests.support.waits import no_complaints
from tests.unit.api.fakes import (
    FakeActors,
    FakeChannel,
    FakeEngine,
    opened,
    task_client_on,
)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """The engine of the running loop's open session."""
    engine = FakeEngine()
    async with no_complaints():
        session = await opened(engine)
        yield engine
        await session.shutdown()
        engine.receivers.clear()


@pytest.fixture
async def actors() -> AsyncIterator[FakeActors]:
    """A factory of actors for pools."""
    async with no_complaints():
        yield FakeActors()


@pytest.fixture
async def complaints() -> list[str]:
    """The errors that asyncio reports to the loop's exception handler."""
    reports: list[str] = []

    def note(_: object, context: dict[str, Any]) -> None:
        reports.append(f"{context['message']}: {context.get('exception')}")

    asyncio.get_running_loop().set_exception_handler(note)
    return reports


@pytest.fixture
def channel() -> Iterator[FakeChannel]:
    """The channel of a worker that runs task 3, a plain function."""
    before = {name: getattr(current, name) for name in Context.__slots__}
    channel = FakeChannel()
    current.task, current.client = 3, task_client_on(channel)
    yield channel
    for name, value in before.items():
        setattr(current, name, value)
    channel.close()


@pytest.fixture
async def loop_channel(channel: FakeChannel) -> AsyncIterator[FakeChannel]:
    """The channel of a worker that runs task 3, a coroutine on this loop."""
    yield channel
    asyncio.get_running_loop().remove_reader(channel.fileno())
