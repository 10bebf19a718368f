"""What is counted as a trace of aiogpu, and what is not."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import aiogpu
from aiogpu.testing.leaks import Resources
from tests.contract import tasks
from tests.support.cgroups import PLACE, needs_cgroup


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    with subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE) as child:
        yield child


def test_processes_of_others_are_none() -> None:
    before = Resources.take()
    with process("-c", "input()") as child:
        assert Resources.take().since(before) == []
        child.communicate(b"\n")


def test_processes_are_known_by_their_command_and_those_below_by_them() -> None:
    before = Resources.take()
    source = (
        "# aiogpu\nimport subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'])\n"
        "print(child.pid, flush=True)\nchild.wait()"
    )
    command = [sys.executable, "-c", source]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        below = int(child.stdout.readline())
        first, second = sorted(
            Resources.take().since(before), key=lambda told: f"process {below}" in told
        )
        child.communicate(b"\n")
    assert first.startswith(f"process {child.pid} (")
    assert "# aiogpu" in first
    assert second.startswith(f"process {below} (")
    assert Resources.take().since(before) == []


def test_descriptors_and_mappings() -> None:
    before = Resources.take()
    descriptor = os.memfd_create("aiogpu-test")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    mapped = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    second = os.memfd_create("aiogpu-second")
    left = Resources.take().since(before)
    assert sum("aiogpu-test" in told for told in left) == 1, "the mapping has its own"
    assert "1 open descriptor(s) of /memfd:aiogpu-second (deleted)" in left
    assert "1 mapping(s) of shared memory" in left
    mapped.close()
    os.close(second)
    assert Resources.take().since(before) == []


async def test_a_node_has_all_of_them_and_leaves_none(no_leaks: None) -> None:
    before = Resources.take()
    async with aiogpu.init(address="local", num_cpus=1):
        pid = await tasks.pid.remote()
        seen = Resources.take().since(before)
        assert any(f"process {pid} (" in told for told in seen), seen
        assert any("mapping" in told for told in seen)
        assert any("descriptor" in told for told in seen)
    assert Resources.take().since(before) == []


@needs_cgroup
def test_cgroups_of_this_process() -> None:
    before = Resources.take()
    ours, others = (f"aiogpu-test-{pid}" for pid in (os.getpid(), os.getppid()))
    for name in (ours, others):
        os.mkdir(f"{PLACE.directory}/{name}")
    try:
        assert Resources.take().since(before) == [f"cgroup {ours}"]
    finally:
        for name in (ours, others):
            os.rmdir(f"{PLACE.directory}/{name}")
    assert Resources.take().since(before) == []
