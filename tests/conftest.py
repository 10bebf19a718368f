"""Fixtures that hold every test to the same: nothing may be left behind."""

from __future__ import annotations

import asyncio
import compileall
import gc
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Final
from zlib import crc32

import pytest
import uvloop
from hypothesis import settings

from aiogpu.runtime.zygote import config as zygote_config
from tests.support.forked_zygotes import Forker
from tests.support.gate import Gate
from tests.support.sampling import CHANGE, Value, covering, values

pytest_plugins = ["aiogpu.testing.fixtures"]
settings.load_profile(CHANGE)  # unless --hypothesis-profile says otherwise

LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the full check asks for."""
    told = "start the interpreter of each zygote; see tests/support/forked_zygotes.py"
    parser.addoption("--fresh", action="store_true", help=told)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], object]]:
    """Every test that awaits runs on the stock loop and on uvloop."""
    return dict(LOOPS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """What is not drawn is for the full check."""
    if any("[" in argument for argument in config.args):
        return  # who names a case shall have it
    _draw_loops(items)
    _draw_cases(items)


def _draw_loops(items: list[pytest.Item]) -> None:
    """Each case of `either_loop` runs on one loop, and on the other if all is run."""
    for item in items:
        if item.get_closest_marker("either_loop"):
            test, _, rest = item.nodeid.partition("[")
            loop, _, case = rest.rstrip("]").partition("-")
            drawn = crc32(f"{test.rpartition('/')[2]} {case}".encode()) % len(LOOPS)
            if loop in LOOPS and loop != list(LOOPS)[drawn]:
                item.add_marker(pytest.mark.slow)


def _draw_cases(items: list[pytest.Item]) -> None:
    """Of a test that starts processes so many that each value is in one of them."""
    tests: dict[str, dict[str, frozenset[Value]]] = defaultdict(dict)
    for item in items:
        test, _, case = item.nodeid.rpartition("/")[2].partition("[")
        if case and _is_dear(item):
            tests[test][item.nodeid] = values(item)
    drawn = {name for cases in tests.values() for name in covering(cases)}
    left = {name for cases in tests.values() for name in cases} - drawn
    for item in items:
        if item.nodeid in left and not _is_inline(item):
            item.add_marker(pytest.mark.slow)


def _is_dear(item: pytest.Item) -> bool:
    """Whether it would run, opens nodes, and need not run whole."""
    others = "slow", "gpu", "ray", "skip", "whole"
    return "no_leaks" in item.fixturenames and not any(
        item.get_closest_marker(name) for name in others
    )


def _is_inline(item: pytest.Item) -> bool:
    """Whether its node is one without processes, which costs nothing."""
    return item.callspec.params.get("address") == "inline"


def pytest_configure(config: pytest.Config) -> None:
    """Compile once what a thousand interpreters import that are started here.

    `PYTHONDONTWRITEBYTECODE`, which many containers set, would have each compile it.
    """
    sys.dont_write_bytecode = False  # and each run would compile the tests
    if not hasattr(config, "workerinput"):
        is_test = re.compile(r"/test_[^/]*$")
        for folder in ("aiogpu", "benchmarks", "tests"):
            compileall.compile_dir(config.rootpath / folder, rx=is_test, quiet=2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have pytest compile the tests once, not each of its processes all of them."""
    gc.disable()  # nothing of what is collected is garbage
    config = session.config
    whoami = getattr(config, "workerinput", None)
    if whoami is not None and config.args == config.getini("testpaths"):
        own = int(whoami["workerid"].removeprefix("gw"))
        paths = sorted((config.rootpath / "tests").rglob("test_*.py"))
        for path in paths[own :: whoami["workercount"]]:
            sys.path.insert(0, str(path.parent))
            with suppress(Exception, pytest.skip.Exception):  # it is told later
                import_module(path.stem)


def pytest_collection_finish() -> None:
    """Have the collector look past the thousands of tests, whenever it is asked."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zygote_forker() -> Iterator[Forker]:
    """What forks the zygotes of this process's tests."""
    forker = Forker()
    yield forker
    assert forker.close() == ""


@pytest.fixture
def forked_zygotes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of a test have their zygotes forked; see `tests.support.forked_zygotes`."""
    is_fresh = request.node.get_closest_marker("fresh") is not None
    if not (is_fresh or request.config.getoption("--fresh")):
        forker = request.getfixturevalue("zygote_forker")
        monkeypatch.setattr(zygote_config, "start_interpreter", forker.start)


@pytest.fixture
def no_leaks(forked_zygotes: None, no_leaks: None) -> None:
    """As for all users; the forker, which outlives the test, is there before."""


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    """A gate at which tasks say that they run, and wait."""
    async with Gate.open() as gate:
        yield gate
