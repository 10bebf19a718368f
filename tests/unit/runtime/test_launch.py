"""The zygote starts before the driver has imported what it does not need for that."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from aiogpu.errors import NodeStartError
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.runtime.zygote.config import Bootstrap
from tests.support.program import run

pytestmark = pytest.mark.usefixtures("runtime_directory")

EARLY = """
    import asyncio, subprocess, sys
    import aiogpu
    start = subprocess.Popen
    def noting(*args, **options):
        global before
        before = set(sys.modules)
        return start(*args, **options)
    subprocess.Popen = noting
    async def main():
        async with aiogpu.init(num_cpus=1):
            late = set(sys.modules) - before
        print(*sorted(late & set(sys.argv[1:])))
    asyncio.run(main())
"""
LATE = (
    *(
        "aiogpu.core.resources.ledger",
        "aiogpu.core.scheduler.scheduler",
        "aiogpu.runtime.driver",
    ),
    *("aiogpu.runtime.workers.pool", "aiogpu.wire.codec", "msgpack"),
)

FIRST = """
    import aiogpu, sys
    @aiogpu.remote
    def noop():
        return None
    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=0):
            await noop.remote()
        print(*sorted(set(sys.modules) & set(sys.argv[1:])))
    aiogpu.run(main())
"""
FOR_OTHERS = (
    "aiogpu.core.scheduler.placement_groups",
    "aiogpu.core.scheduler.reservation",
    "aiogpu.core.scheduler.invariants",
    "aiogpu.observe.snapshot",
    "aiogpu.runtime.devices.monitor",
    *(
        "aiogpu.runtime.callers.leases",
        "aiogpu.runtime.callers.requests",
        "aiogpu.accelerators.base",
    ),
)
"""Of devices, placement groups, leases, status, and of tasks that start tasks."""


def test_what_a_first_call_does_not_need() -> None:
    assert run(FIRST, "aiogpu.core.scheduler.scheduler", *FOR_OTHERS).split() == [
        "aiogpu.core.scheduler.scheduler"
    ]


def test_what_is_imported_while_the_zygote_starts() -> None:
    assert run(EARLY, *LATE).split() == sorted(LATE)


async def test_ground_that_is_cleared(runtime_directory: Path) -> None:
    before = os.listdir("/proc/self/fd")
    bootstrap = Bootstrap(NodeCgroup(asyncio.get_running_loop()), [], False)
    assert os.listdir(runtime_directory) == [
        os.path.basename(bootstrap.config.directory)
    ]
    bootstrap.clear()
    assert os.listdir(runtime_directory) == []
    assert bootstrap.first.child.returncode is not None
    assert os.listdir("/proc/self/fd") == before


async def test_ground_that_cannot_be_laid(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(NodeStartError, match="/no/such/python"):
        Bootstrap(NodeCgroup(asyncio.get_running_loop()), [], False)
    assert os.listdir(runtime_directory) == []
    assert os.listdir("/proc/self/fd") == before
