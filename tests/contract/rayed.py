"""An engine for tests: a Ray cluster on this machine, kept from one test to the next.

A cluster and its workers take seconds to start. So the cluster of one test
serves the next test that wants the same; each test joins it and leaves it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from aiogpu.engines.base import NodeOptions
from aiogpu.engines.ray.engine import RayEngine

OF_CLUSTERS: Final = ("num_cpus", "num_gpus", "resources", "accelerator_type")
OF_PROGRAMS: Final = ("cancel_grace",)
CPUS: Final = 4


class Clusters:
    """The running cluster, and the thread that has started it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tests-ray")
        self._has: dict[str, Any] | None = None

    def have(self, options: dict[str, Any]) -> None:
        """Start a cluster with these options of Ray, unless it runs already."""
        if self._has != options:
            self._thread.submit(self._start, options).result()
            self._has = options

    def _start(self, options: dict[str, Any]) -> None:
        from aiogpu.engines.ray import cluster

        if self._has is not None:
            cluster.leave()
            self._has = None
        cluster.connect({**options, "address": "local", "log_to_driver": False})

    def end(self) -> None:
        """End the cluster; another may be started."""
        if self._has is not None:
            from aiogpu.engines.ray import cluster

            self._thread.submit(cluster.leave).result()
            self._has = None

    def close(self) -> None:
        """End the cluster and its thread."""
        self.end()
        self._thread.shutdown()


clusters: Clusters | None = None
"""Set when a test of this process first needs a cluster."""


def leave() -> None:
    """End this process's cluster, for tests that have their own."""
    if clusters is not None:
        clusters.end()


class RayedEngine(RayEngine):
    """Joins a cluster that has a program's options."""

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        defaults = NodeOptions()
        for name, value in options._asdict().items():
            known = name in OF_CLUSTERS or name in OF_PROGRAMS
            if not known and value != getattr(defaults, name):
                pytest.skip(f"ray: a cluster knows nothing of init({name}=...)")
        self._wanted = options
        own = {name: getattr(options, name) for name in OF_PROGRAMS}
        super().__init__(NodeOptions(**own), loop)

    async def open(self) -> None:
        wanted = self._wanted
        resources = dict(wanted.resources)
        if wanted.accelerator_type:
            resources[f"accelerator_type:{wanted.accelerator_type}"] = 1
        cpus = CPUS if wanted.num_cpus is None else int(wanted.num_cpus)
        told = {
            "num_cpus": cpus,
            "num_gpus": wanted.num_gpus or 0,
            "resources": resources,
        }
        assert clusters is not None
        await asyncio.to_thread(clusters.have, told)
        await super().open()
