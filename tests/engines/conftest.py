"""Which engines a test is for, and what each of them cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final
from zlib import crc32

import pytest

from aiogpu.api import session
from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.engines.registry import create_engine
from tests.engines import served as serving
from tests.engines.served import ServedEngine

ENGINES: Final = ("local", "inline", "node")
LACKS: Final = {
    "local": {},
    "node": {
        "same turn": "the node is another process, and goes on while it is asked",
    },
    "inline": {
        "processes": "all tasks are in this process, and none can be ended with it",
        "modules": "a task finds the modules that the program has imported",
        "at once": "tasks run one after the other",
        "priority": "tasks run in the order of submission",
        "threads": "all code runs in the thread of the loop",
        "interrupts": "code that blocks has the loop's thread, so nobody else acts",
    },
}
"""What an engine lacks by its nature, and why. `@pytest.mark.needs(...)` names it."""


DRAWN: Final = 12
"""Of so many cases on a service one is run, and all in the full check."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """What an engine lacks is skipped; a service for each case takes its time."""
    for item in items:
        spec = getattr(item, "callspec", None)
        engine = spec.params.get("address") if spec is not None else None
        for mark in item.iter_markers("needs"):
            for ability in mark.args:
                if engine in LACKS and ability in LACKS[engine]:
                    reason = f"{engine}: {LACKS[engine][ability]}"
                    item.add_marker(pytest.mark.skip(reason=reason))
    if any("[" in argument for argument in config.args):
        return  # who names a case shall have it
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is not None and spec.params.get("address") == "node":
            name = item.nodeid.rpartition("/")[2]
            if crc32(name.encode()) % DRAWN:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=ENGINES)
def address(request: pytest.FixtureRequest) -> str:
    """The engines that must pass; each issue that builds one adds its address."""
    engine = str(request.param)
    if engine == "node":
        request.getfixturevalue("served")
    return engine


@pytest.fixture(scope="session")
def service_forker() -> Iterator[None]:
    """Has a service forked for each test that wants one."""
    serving.forker = serving.Forker()
    yield
    serving.forker.close()


@pytest.fixture
def served(service_forker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init(address="node")` starts a service of its own, and joins it."""

    def create(
        address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> Engine:
        if address == "node":
            return ServedEngine(options, loop)
        return create_engine(address, options, loop)

    monkeypatch.setattr(session, "create_engine", create)


@pytest.fixture
def each_engine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for tests that open their node without an address."""
    monkeypatch.setenv("AIOGPU_ADDRESS", address)
