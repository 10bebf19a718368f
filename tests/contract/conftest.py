"""The engines of the tests, what each lacks, and the nodes of tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest

import aiogpu
from aiogpu.api import session as sessions
from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.engines.registry import create_engine
from tests.contract import served as serving
from tests.contract.node_here import Here, node_here
from tests.contract.served import ServedEngine
from tests.support.gate import Gate

ENGINES: Final = ("local", "inline", "node", "ray")
LACKS: Final = {
    "local": {},
    "node": {
        "same turn": "the node is another process, and goes on while it is asked",
        "own objects": "the node makes its objects in another process",
        "own vendors": "a node knows the vendors that its own process has registered",
    },
    "ray": {
        "same turn": "the cluster is other processes, and goes on while it is asked",
        "priority": "Ray has no priorities",
        "spread": "Ray packs the shares of a device",
        "holders": "Ray does not tell which of its processes holds what",
        "leases": "a cluster gives its devices only to tasks of Ray",
        "device memory": "Ray reserves no memory of devices",
        "ledger": "errors name missing resources of Ray in other words",
        "placing CPUs": "an actor on Ray that asks for more is placed without a CPU",
        "early order": "Ray begins coroutines sent before their actor in any order",
        "typed bundles": "a bundle of Ray's has a type, its tasks name none",
        "wakes": "Ray's interrupt ends no system call, and the worker is killed",
        "blocked ends": "Ray waits for the end of a call that is blocked in C",
        "plain cancels": "Ray loses an actor's order if it cancels a plain method",
        "orphans": "an actor on Ray ends with the process that has made it",
        "orderly close": "a program that leaves a cluster ends its actors at once",
        "deadlocks": "a task that can never run waits on Ray",
        "books": "Ray reports free resources with a delay",
        "modules": "workers of Ray import from the program's path",
        "processes": "the processes are Ray's",
        "own vendors": "Ray knows the kinds of devices that it was made for",
        "stop graces": "Ray stops tasks at once",
        "run times": "Ray does not report when a task begins",
        "told of": "Ray does not report that a placement group was removed",
        "listed actors": "Ray lists its actors only on its dashboard",
        "detection": "Ray detects the devices of its nodes itself",
    },
    "inline": {
        "processes": "all tasks are in this process, and none can be ended with it",
        "modules": "a task finds the modules that the program has imported",
        "at once": "tasks run one after the other",
        "priority": "tasks run in the order of submission",
        "threads": "all code runs in the thread of the loop",
        "interrupts": "blocking code runs in the loop's thread, so no other code runs",
        "blocking": "blocking code runs in the loop's thread, so no other code runs",
        "waiting for resources": "an inline node is always idle",
        "records": "an inline node knows only calls that have not ended",
        "memory errors": "an inline node passes errors of device memory on unchanged",
        "stop graces": "an inline node stops coroutines at once",
        "call retries": "no process of an inline node dies",
        "ends of placements": "what runs in a removed placement goes on",
    },
}
"""Abilities that an engine lacks by its nature, and why; see `@pytest.mark.needs`."""


DRAWN: Final = 12
"""Of this many cases on a service one runs; all run in the full check."""
ON_RAY: Final = frozenset({"test_tasks.py", "test_cancel.py"})
"""Files of which some cases run on a Ray cluster; all run in the full check."""
WHOLE_ON_RAY: Final = "test_every_option.py"
"""The file of which all cases run on a Ray cluster."""
DRAWN_ON_RAY: Final = 4
"""Of this many cases of `ON_RAY` one runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip cases that an engine cannot run; mark most cases with a service as slow."""
    _sort_by_cluster(items)
    for item in items:
        spec = getattr(item, "callspec", None)
        engine = spec.params.get("address") if spec is not None else None
        for mark in item.iter_markers("needs"):
            for ability in mark.args:
                if engine in LACKS and ability in LACKS[engine]:
                    reason = f"{engine}: {LACKS[engine][ability]}"
                    item.add_marker(pytest.mark.skip(reason=reason))
    if any("[" in argument for argument in config.args):
        return  # a case that is named on the command line runs
    for item in items:
        spec = getattr(item, "callspec", None)
        engine = None if spec is None else spec.params.get("address")
        name = item.nodeid.rpartition("/")[2]
        if engine == "node" and crc32(name.encode()) % DRAWN:
            item.add_marker(pytest.mark.slow)
        if engine == "ray":
            item.add_marker(pytest.mark.ray)
            is_drawn = not crc32(name.encode()) % DRAWN_ON_RAY
            is_run = item.path.name in ON_RAY and is_drawn
            if not is_run and item.path.name != WHOLE_ON_RAY:
                item.add_marker(pytest.mark.slow)


def _sort_by_cluster(items: list[pytest.Item]) -> None:
    """Let cases of a file that want the same Ray cluster run one after the other."""
    files = {path: number for number, path in enumerate(each.path for each in items)}

    def place(item: pytest.Item) -> tuple[int, str]:
        spec, mark = getattr(item, "callspec", None), item.get_closest_marker("aiogpu")
        is_on_ray = spec is not None and spec.params.get("address") == "ray"
        wants = sorted(mark.kwargs.items()) if is_on_ray and mark is not None else ""
        return files[item.path], str(wants)

    items.sort(key=place)


@pytest.fixture(params=ENGINES)
def address(request: pytest.FixtureRequest) -> str:
    """The address of each engine."""
    engine = str(request.param)
    if engine == "node":
        request.getfixturevalue("served")
    if engine == "ray":
        request.getfixturevalue("rayed")
    return engine


@pytest.fixture(scope="session")
def ray_clusters() -> Iterator[None]:
    """Start a Ray cluster for each test that needs one."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'aiogpu[ray]'")
    from tests.contract import rayed
    from tests.contract.clusters import FEW_WORKERS

    # Ray reads these once in a process.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.update(FEW_WORKERS)
    rayed.clusters = rayed.Clusters()
    yield
    rayed.clusters.close()


@pytest.fixture(scope="module")
def in_no_cluster(ray_clusters: None) -> None:
    """Leave the Ray cluster of earlier tests before the tests of a module."""
    from tests.contract import rayed

    rayed.leave()


@pytest.fixture(scope="session")
def service_forker() -> Iterator[None]:
    """Fork a service for each test that needs one."""
    serving.forker = serving.Forker()
    yield
    serving.forker.close()


@pytest.fixture
def rayed(ray_clusters: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `init(address="ray")` join a cluster with the given options."""
    from tests.contract.rayed import RayedEngine

    monkeypatch.setattr(sessions, "create_engine", instead_of("ray", RayedEngine))


@pytest.fixture
def served(service_forker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `init(address="node")` start a service and join it."""
    monkeypatch.setattr(sessions, "create_engine", instead_of("node", ServedEngine))


def instead_of(name: str, made: Callable[..., Engine]) -> Callable[..., Engine]:
    """Return a `create_engine` with another engine for one address."""

    def create(
        address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> Engine:
        if address == name:
            return made(options, loop)
        return create_engine(address, options, loop)

    return create


@pytest.fixture
async def node(
    address: str, gate: Gate, request: pytest.FixtureRequest
) -> AsyncIterator[aiogpu.types.Node | None]:
    """A node with the options of `@pytest.mark.aiogpu(num_cpus=4)`.

    The gate outlives the node: tasks may wait there until the node ends. A test with
    `@pytest.mark.own_node` opens its nodes itself.
    """
    if request.node.get_closest_marker("own_node"):
        yield None
        return
    mark = request.node.get_closest_marker("aiogpu")
    async with asyncio.timeout(60), aiogpu.init(address=address, **mark.kwargs) as node:
        yield node


@pytest.fixture
async def here(no_leaks: None, runtime_directory: Path) -> AsyncIterator[Here]:
    """Open a node in this process that programs can join."""
    async with node_here(runtime_directory) as opened:
        yield opened


@pytest.fixture
def each_engine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `init()` without an address open each engine."""
    monkeypatch.setenv("AIOGPU_ADDRESS", address)
