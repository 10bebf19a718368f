"""Fixtures for pytest and pytest-asyncio: nodes, and tests that leave nothing behind.

A project enables them by `pytest_plugins = ["aiogpu.testing.fixtures"]` in its top
`conftest.py`. They use only the public interface.
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
    "aiogpu(num_cpus=2, num_gpus=1, **options): resources of `aiogpu_node`, "
    "`inline_node` and `local_node`; options are those of `aiogpu.init`."
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short path for nodes, empty before and after the test."""
    with tempfile.TemporaryDirectory(prefix="agt-", dir="/tmp") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)
        leftovers = os.listdir(place)
        if leftovers:
            pytest.fail(
                f"a node has left its directory behind: {', '.join(leftovers)}. Close "
                f"the node in the test: `async with aiogpu.init(...)`.",
                pytrace=False,
            )


@pytest.fixture
def no_leaks(runtime_directory: Path) -> Iterator[None]:
    """Fail if a process, descriptor or mapping of aiogpu outlives the test.

    It must be set up before the test's node: put it into `pytestmark`, or make it the
    first argument of the fixture that opens the node.
    """
    before = Resources.take()
    yield
    leftovers = Resources.take().since(before)
    if leftovers:
        for directory in runtime_directory.iterdir():
            # Reported here, so `runtime_directory` need not report it again.
            leftovers.append(f"directory {directory.name}")
            shutil.rmtree(directory, ignore_errors=True)
        pytest.fail(
            "the test has left behind:\n  "
            + "\n  ".join(leftovers)
            + "\nClose its node: `async with aiogpu.init(...)`, or aiogpu.shutdown().",
            pytrace=False,
        )


@pytest_asyncio.fixture(params=["inline", "local"])
async def aiogpu_node(
    request: pytest.FixtureRequest, no_leaks: None
) -> AsyncIterator[Node]:
    """Run the test on an inline node and on a node with workers.

    The test's ids end in `[inline]` and `[local]`. Both nodes have 2 CPUs and 1 logical
    GPU; `@pytest.mark.aiogpu(num_gpus=4)` changes that.
    """
    async with aiogpu.init(address=request.param, **_options(request)) as node:
        yield node


@pytest_asyncio.fixture
async def inline_node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """A node that runs tasks in this process, with 2 CPUs and 1 logical GPU.

    `@pytest.mark.aiogpu(num_gpus=4)` changes this. The test calls `.remote()` and not
    `aiogpu.init()`, which would open a second node.
    """
    async with aiogpu.init(address="inline", **_options(request)) as node:
        yield node


@pytest_asyncio.fixture
async def local_node(
    request: pytest.FixtureRequest, no_leaks: None
) -> AsyncIterator[Node]:
    """A node with worker processes, 2 CPUs and 1 logical GPU; checks for leaks.

    `@pytest.mark.aiogpu(num_gpus=4)` changes this.
    """
    async with aiogpu.init(address="local", **_options(request)) as node:
        yield node


def _options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the marker's options; a function's options override its module's.

    Raises:
        pytest.UsageError: the marker is misused, or the test has another event loop.
    """
    _check_loop(request)
    options: dict[str, Any] = dict(_DEFAULTS)
    for mark in reversed(list(request.node.iter_markers("aiogpu"))):
        if mark.args or "address" in mark.kwargs:
            raise pytest.UsageError(
                f"{request.node.nodeid}: @pytest.mark.aiogpu takes options of "
                f"aiogpu.init by name, and no address: the fixture sets the address."
            )
        options.update(mark.kwargs)
    return options


def _check_loop(request: pytest.FixtureRequest) -> None:
    """Check that a test uses the event loop of its fixtures, to find the node."""
    config, node = request.config, request.node
    if not config.pluginmanager.hasplugin("asyncio"):
        return  # anyio's plugin uses one loop for both
    mode = config.getoption("asyncio_mode") or config.getini("asyncio_mode")
    problem = f"{node.nodeid} and {request.fixturename} run on different event loops: "
    if "anyio_backend" in request.fixturenames and str(mode) in ("auto", "Mode.AUTO"):
        raise pytest.UsageError(
            f"{problem}anyio's, and pytest-asyncio's in its auto mode. Set "
            f"asyncio_mode=strict."
        )
    option = "asyncio_default_fixture_loop_scope"
    mark = node.get_closest_marker("asyncio")
    test_scope = config.getini(option.replace("fixture", "test"))
    if mark is not None:
        test_scope = mark.kwargs.get("loop_scope") or test_scope
    fixture_scope = config.getini(option) or "function"
    if fixture_scope == "fixture-scope":
        fixture_scope = "function"
    if node.get_closest_marker("anyio") is None and test_scope != fixture_scope:
        raise pytest.UsageError(
            f"{problem}the test's loop_scope is {test_scope!r}, {option} is "
            f"{fixture_scope!r}. Make them the same."
        )
