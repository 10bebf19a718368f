"""Fixtures for pytest and pytest-asyncio: nodes, and tests that leave nothing behind.

A project enables them by `pytest_plugins = ["aiogpu.testing.fixtures"]` in its top
`conftest.py`. They stand on the public interface alone, as its own tests do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

import aiogpu
from aiogpu.testing.leaks import Resources

if TYPE_CHECKING:
    from aiogpu.types import Node

_DEFAULTS: Final = {"num_cpus": 2, "num_gpus": 1}
_MARKER: Final = (
    "aiogpu(num_cpus=2, num_gpus=1, **options): what `aiogpu_node`, `inline_node` and "
    "`local_node` are to have; options are those of `aiogpu.init`."
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path for the directories of nodes, empty before and after the test."""
    with tempfile.TemporaryDirectory(prefix="agt-", dir="/tmp") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)
        left = os.listdir(place)
        if left:
            pytest.fail(
                f"a node has left its directory behind: {', '.join(left)}. Close it "
                f"in the test: `async with aiogpu.init(...)`.",
                pytrace=False,
            )


@pytest.fixture
def no_leaks(runtime_directory: Path) -> Iterator[None]:
    """Fail if a process, descriptor or mapping of aiogpu outlives the test.

    It must be set up before the node of the test: put it into `pytestmark`, or make it
    the first argument of the fixture that opens the node.
    """
    before = Resources.take()
    yield
    left = Resources.take().since(before)
    if left:
        for directory in runtime_directory.iterdir():
            # Reported here; `runtime_directory` need not report it again.
            left.append(f"directory {directory.name}")
            shutil.rmtree(directory, ignore_errors=True)
        pytest.fail(
            "the test has left behind:\n  "
            + "\n  ".join(left)
            + "\nClose its node: `async with aiogpu.init(...)`, or aiogpu.shutdown().",
            pytrace=False,
        )


@pytest_asyncio.fixture(params=["inline", "local"])
async def aiogpu_node(
    request: pytest.FixtureRequest, no_leaks: None
) -> AsyncIterator[Node]:
    """Run the test twice: on a node in this process, and on one with workers.

    The test's ids end in `[inline]` and `[local]`. Both nodes have 2 CPUs and 1 logical
    GPU; `@pytest.mark.aiogpu(num_gpus=4)` changes that.
    """
    async with aiogpu.init(address=request.param, **_options(request)) as node:
        yield node


@pytest_asyncio.fixture
async def inline_node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """A node that runs tasks in this process, with 2 CPUs and 1 logical GPU.

    `@pytest.mark.aiogpu(num_gpus=4)` changes what it has. The test calls `.remote()`,
    and not `aiogpu.init()`, which would be a second node.
    """
    async with aiogpu.init(address="inline", **_options(request)) as node:
        yield node


@pytest_asyncio.fixture
async def local_node(
    request: pytest.FixtureRequest, no_leaks: None
) -> AsyncIterator[Node]:
    """A node with worker processes, 2 CPUs and 1 logical GPU; it leaves nothing.

    `@pytest.mark.aiogpu(num_gpus=4)` changes what it has.
    """
    async with aiogpu.init(address="local", **_options(request)) as node:
        yield node


def _options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The marker's options; those of a function before those of its module.

    Raises:
        pytest.UsageError: the marker is ill-used, or the test has another event loop.
    """
    _check_loop(request)
    options: dict[str, Any] = dict(_DEFAULTS)
    for mark in reversed(list(request.node.iter_markers("aiogpu"))):
        if mark.args or "address" in mark.kwargs:
            raise pytest.UsageError(
                f"{request.node.nodeid}: @pytest.mark.aiogpu takes options of "
                f"aiogpu.init by name, and no address: the fixture stands for that."
            )
        options.update(mark.kwargs)
    return options


def _check_loop(request: pytest.FixtureRequest) -> None:
    """Refuse a test whose event loop is not its fixtures': it would find no node."""
    config, node = request.config, request.node
    if not config.pluginmanager.hasplugin("asyncio"):
        return  # anyio's plugin alone has one loop for both
    mode = config.getoption("asyncio_mode") or config.getini("asyncio_mode")
    told = f"{node.nodeid} and {request.fixturename} run on different event loops: "
    if "anyio_backend" in request.fixturenames and str(mode) in ("auto", "Mode.AUTO"):
        raise pytest.UsageError(
            f"{told}one on anyio's, one on that of pytest-asyncio in its auto mode. "
            f"Set asyncio_mode=strict."
        )
    option = "asyncio_default_fixture_loop_scope"
    mark = node.get_closest_marker("asyncio")
    of_test = config.getini(option.replace("fixture", "test"))
    if mark is not None:
        of_test = mark.kwargs.get("loop_scope") or of_test
    of_fixture = config.getini(option) or "function"
    if of_fixture == "fixture-scope":
        of_fixture = "function"
    if node.get_closest_marker("anyio") is None and of_test != of_fixture:
        raise pytest.UsageError(
            f"{told}the test's loop_scope is {of_test!r}, {option} is {of_fixture!r}. "
            f"Make them the same."
        )
