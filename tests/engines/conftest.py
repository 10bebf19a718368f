"""Which engines a test is for, and what each of them cannot do."""

from __future__ import annotations

from typing import Final

import pytest

ENGINES: Final = ("local", "inline")
LACKS: Final = {
    "local": {},
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


@pytest.fixture(params=ENGINES)
def address(request: pytest.FixtureRequest) -> str:
    """The engines that must pass; each issue that builds one adds its address."""
    engine = str(request.param)
    for mark in request.node.iter_markers("needs"):
        for ability in mark.args:
            if ability in LACKS[engine]:
                pytest.skip(f"{engine}: {LACKS[engine][ability]}")
    return engine


@pytest.fixture
def each_engine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for tests that open their node without an address."""
    monkeypatch.setenv("AIOGPU_ADDRESS", address)
