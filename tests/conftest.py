"""Fixtures and rules for all tests: which cases run, and that nothing is left."""

from __future__ import annotations

import asyncio
import compileall
import gc
import os
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
from aiogpu.runtime.zygote.learning import VARIABLE as CACHE_VARIABLE
from tests.support.forked_zygotes import Forker
from tests.support.gate import Gate
from tests.support.sampling import CHANGE, Value, covering, values

pytest_plugins = ["aiogpu.testing.fixtures"]
settings.load_profile(CHANGE)  # unless --hypothesis-profile says otherwise

LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the full check."""
    text = "start the interpreter of each zygote; see tests/support/forked_zygotes.py"
    parser.addoption("--fresh", action="store_true", help=text)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], object]]:
    """Every asynchronous test runs on asyncio's loop and on uvloop."""
    return dict(LOOPS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark cases that are not drawn as slow: only the full check runs them."""
    if any("[" in argument for argument in config.args):
        return  # a case that is named always runs
    _draw_loops(items)
    _draw_cases(items)


def _draw_loops(items: list[pytest.Item]) -> None:
    """Cases of `either_loop` run on one loop; the full check runs them on both."""
    for item in items:
        if item.get_closest_marker("either_loop"):
            test, _, rest = item.nodeid.partition("[")
            loop, _, case = rest.rstrip("]").partition("-")
            drawn = crc32(f"{test.rpartition('/')[2]} {case}".encode()) % len(LOOPS)
            if loop in LOOPS and loop != list(LOOPS)[drawn]:
                item.add_marker(pytest.mark.slow)


def _draw_cases(items: list[pytest.Item]) -> None:
    """Draw cases of tests that start processes, so that each value is in a case."""
    tests: dict[str, dict[str, frozenset[Value]]] = defaultdict(dict)
    for item in items:
        test, _, case = item.nodeid.rpartition("/")[2].partition("[")
        if case and _is_drawn(item):
            tests[test][item.nodeid] = values(item)
    drawn = {name for cases in tests.values() for name in covering(cases)}
    left = {name for cases in tests.values() for name in cases} - drawn
    for item in items:
        if item.nodeid in left and not _is_inline(item):
            item.add_marker(pytest.mark.slow)


def _is_drawn(item: pytest.Item) -> bool:
    """True if a test would run, opens nodes, and is not marked `whole`."""
    others = "slow", "gpu", "ray", "skip", "whole"
    return "no_leaks" in item.fixturenames and not any(
        item.get_closest_marker(name) for name in others
    )


def _is_inline(item: pytest.Item) -> bool:
    """True if a case uses the inline engine, which starts no processes."""
    return item.callspec.params.get("address") == "inline"


def pytest_configure(config: pytest.Config) -> None:
    """Compile once the modules that a thousand interpreters will import.

    With `PYTHONDONTWRITEBYTECODE`, which many containers set, each would compile them.
    """
    sys.dont_write_bytecode = False  # or each run would compile the tests
    # A test must not know what another test has imported.
    os.environ[CACHE_VARIABLE] = "off"
    if not hasattr(config, "workerinput"):
        is_test = re.compile(r"/test_[^/]*$")
        for folder in ("aiogpu", "benchmarks", "tests"):
            compileall.compile_dir(config.rootpath / folder, rx=is_test, quiet=2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Share the compilation of the tests among pytest's processes."""
    gc.disable()  # collecting tests makes no garbage
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args == config.getini("testpaths"):
        own = int(worker["workerid"].removeprefix("gw"))
        paths = sorted((config.rootpath / "tests").rglob("test_*.py"))
        for path in paths[own :: worker["workercount"]]:
            sys.path.insert(0, str(path.parent))
            with suppress(Exception, pytest.skip.Exception):  # pytest reports it later
                import_module(path.stem)


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from garbage collection."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zygote_forker() -> Iterator[Forker]:
    """The forker of all zygotes of this process's tests."""
    forker = Forker()
    yield forker
    assert forker.close() == ""


@pytest.fixture
def forked_zygotes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fork the zygotes of a test's nodes; see `tests.support.forked_zygotes`."""
    is_fresh = request.node.get_closest_marker("fresh") is not None
    if not (is_fresh or request.config.getoption("--fresh")):
        forker = request.getfixturevalue("zygote_forker")
        monkeypatch.setattr(zygote_config, "start_interpreter", forker.start)


@pytest.fixture
def no_leaks(forked_zygotes: None, no_leaks: None) -> None:
    """The public fixture; the forker, which outlives the test, starts before it."""


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    """A gate at which tasks report and wait."""
    async with Gate.open() as gate:
        yield gate
