"""The tools for users' tests: leaked resources, the fixtures."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import aiogpu
from aiogpu.linux.procfs import read_stat
from aiogpu.testing.leaks import Resources
from tests.contract import tasks
from tests.support.cgroups import PLACE, needs_cgroup
from tests.support.program import run


def test_resources_include_processes_of_aiogpu_and_their_children() -> None:
    before = Resources.take()
    source = (
        "# aiogpu\nimport subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'])\n"
        "print(child.pid, flush=True)\nchild.wait()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c"]
    with (
        subprocess.Popen([*command, "input()"], stdin=subprocess.PIPE) as other,
        subprocess.Popen([*command, source], **pipes) as child,
    ):
        below = int(child.stdout.readline())
        leaks = Resources.take().since(before)
        child.communicate(b"\n")
        other.communicate(b"\n")
    first, second = sorted(leaks, key=lambda leak: f"process {below}" in leak)
    assert first.startswith(f"process {child.pid} (")
    assert "# aiogpu" in first
    assert second.startswith(f"process {below} (")
    assert Resources.take().since(before) == []


def test_resources_include_descriptors_and_mappings() -> None:
    before = Resources.take()
    descriptor = os.memfd_create("aiogpu-test")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    mapped = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    second = os.memfd_create("aiogpu-second")
    leaks = Resources.take().since(before)
    assert sum("aiogpu-test" in leak for leak in leaks) == 1, "the mapping's own"
    assert "1 open descriptor(s) of /memfd:aiogpu-second (deleted)" in leaks
    assert "1 mapping(s) of shared memory" in leaks
    mapped.close()
    os.close(second)
    assert Resources.take().since(before) == []


async def test_node_has_resources_and_leaves_none(no_leaks: None) -> None:
    before = Resources.take()
    async with aiogpu.init(address="local", num_cpus=1):
        pid = await tasks.pid.remote()
        leaks = Resources.take().since(before)
        for resource in (f"process {pid} (", "mapping", "descriptor"):
            assert any(resource in leak for leak in leaks), leaks
    assert Resources.take().since(before) == []


@needs_cgroup
def test_resources_include_cgroups_of_this_process() -> None:
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


# Fixtures


ROOT = Path(__file__).parents[3]
CONFTEST = """
import asyncio

import uvloop

pytest_plugins = ["aiogpu.testing.fixtures"]


def pytest_asyncio_loop_factories():
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""
MODULE = """
import os

import aiogpu


@aiogpu.remote(num_gpus=0.5)
def where():
    return os.getpid(), aiogpu.get_gpu_ids()
"""
TESTS = """
import os

import aiogpu
import pytest
from user_module import where

pytestmark = pytest.mark.asyncio


async def test_inline(inline_node):
    assert await where.remote() == (os.getpid(), [0])
    found = await aiogpu.cluster_resources()
    assert {"CPU": 2.0, "GPU": 1.0}.items() <= found.items()


async def test_local(local_node):
    pid, ids = await where.remote()
    assert (pid != os.getpid(), ids) == (True, [0])
    found = await aiogpu.cluster_resources()
    assert {"CPU": 2.0, "GPU": 1.0}.items() <= found.items()


@pytest.mark.aiogpu(num_gpus=3, resources={"license": 2})
class TestMarked:
    @pytest.mark.aiogpu(num_cpus=1.5)
    async def test_inline(self, inline_node):
        total = await aiogpu.cluster_resources()
        assert {"CPU": 1.5, "GPU": 3.0, "license": 2.0}.items() <= total.items()

    async def test_local(self, local_node):
        total = await aiogpu.cluster_resources()
        assert {"CPU": 2.0, "GPU": 3.0, "license": 2.0}.items() <= total.items()
"""
LEAKS = """
import asyncio
import os

import aiogpu
from user_module import where

left = []


async def open_node():
    await aiogpu.init(num_cpus=1, num_gpus=1)
    return await where.options(num_gpus=0).remote()


def test_leaves_a_node(no_leaks):
    left.append(asyncio.new_event_loop())
    pid, _ = left[0].run_until_complete(open_node())
    print("the worker's pid is", pid)


async def test_leaves_a_descriptor(no_leaks):
    left.append(os.memfd_create("aiogpu-mine"))


async def test_leaves_nothing(local_node):
    await where.remote()
"""


WRONG = {
    "address='local'": "takes options of aiogpu.init by name, and no address",
    "4": "takes options of aiogpu.init by name, and no address",
    "num_gpu=4": "num_gpu",
    "num_gpus=-4": "num_gpus=-4",
}
MARKED = """
@pytest.mark.aiogpu({})
async def test_wrong_{}(inline_node):
    pass
"""


def run_pytest(project: Path, mode: str, *arguments: str, **tests: str) -> str:
    """Run the tests of a project that enables the plugin; return the output."""
    scope = "asyncio_default_fixture_loop_scope = function"
    (project / "pytest.ini").write_text(f"[pytest]\n{scope}\n")
    files = {"conftest": CONFTEST, "user_module": MODULE, **tests}
    for name, source in files.items():
        (project / f"{name}.py").write_text(source)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "AIO"))}
    plain = ("-q", "--strict-markers", "-W", "error", f"--asyncio-mode={mode}")
    # These plugins take half a second to import and are not needed.
    without = ("-pno:cacheprovider", "-pno:hypothesispytest", "-pno:xdist")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *without, *arguments],
        cwd=project,
        env=environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return f"{ran.stdout}{ran.stderr}exit status {ran.returncode}"


def test_fixtures_open_nodes_on_either_loop(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "strict", "-knot TestMarked", test_nodes=TESTS)
    assert "4 passed, 4 deselected" in output
    assert output.endswith("exit status 0")


def test_fixtures_report_leaks_and_wrong_marks(tmp_path: Path) -> None:
    """In auto mode, the mark is optional."""
    nodes = TESTS.replace("pytestmark = pytest.mark.asyncio\n", "")
    nodes = nodes.replace("class Test", "@pytest.mark.asyncio\nclass Test")
    wrong = [MARKED.format(mark, number) for number, mark in enumerate(WRONG)]
    output = run_pytest(
        tmp_path,
        "auto",
        test_nodes=nodes,
        test_leaks=LEAKS,
        test_wrong="".join(["import pytest\n", *wrong]),
    )
    assert "13 passed, 11 errors" in output, output
    assert output.endswith("exit status 1")
    (pid,) = re.findall(r"the worker's pid is (\d+)", output)
    for line in (
        f"  process {pid} (",
        "mapping(s) of shared memory",
        "  directory aiogpu-",
        "open descriptor(s) of /memfd:aiogpu-mine",
        "Close its node: `async with aiogpu.init(...)`",
    ):
        assert line in output
    # The output of each test, on both loops, follows a line with its name.
    _, *parts = re.split(r"_ ERROR at setup of test_wrong_(\d)\[", output)
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        assert list(WRONG.values())[int(number)] in text.partition("= short test")[0]
    assert Counter(parts[::2]) == dict.fromkeys("0123", 2)
    while (stat := read_stat(int(pid))) is not None and stat.state not in "ZX":
        """The worker ends with its driver, which did not wait for the worker."""


def test_an_adopted_zombie_is_no_leftover() -> None:
    """The first process of a container gets all orphans, and may never reap them."""
    program = """
        import os
        from aiogpu.linux import syscalls
        from aiogpu.testing.leaks import Resources

        def leave(name):
            middle = os.fork()
            if middle == 0:
                if os.fork() == 0:
                    syscalls.set_process_name(name)
                os._exit(0)
            os.waitpid(middle, 0)
            (orphan,) = syscalls.children()
            os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
            return orphan

        syscalls.adopt_orphans()
        before = Resources.take()
        for name in ("aiogpu-work-1", "aiogpu-keep-1", "aiogpu-zygote"):
            orphan = leave(name)
            print(name, len(Resources.take().since(before)))
            os.waitpid(orphan, 0)
        """
    assert run(program).splitlines() == [
        "aiogpu-work-1 0",
        "aiogpu-keep-1 0",
        "aiogpu-zygote 1",
    ]
