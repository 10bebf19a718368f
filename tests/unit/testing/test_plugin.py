"""The fixtures in a project of a user's, run by a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that enables the plugin."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    scope = "asyncio_default_fixture_loop_scope = function"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{scope}\n")
    (tmp_path / "user_module.py").write_text(MODULE)
    return tmp_path


def run_pytest(project: Path, tests: str, *arguments: str) -> tuple[int, str]:
    (project / "test_user.py").write_text(textwrap.dedent(tests))
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "AIO"))}
    plain = ("-q", "--strict-markers", "-W", "error")
    # They take half a second to import, and have nothing to do here.
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
    return ran.returncode, ran.stdout + ran.stderr


def test_nodes_in_strict_mode_and_on_either_loop(project: Path) -> None:
    code, said = run_pytest(project, TESTS, "--asyncio-mode=strict")
    assert (code, "8 passed" in said) == (0, True), said


def test_no_mark_is_needed_in_auto_mode(project: Path) -> None:
    """One that is there does no harm."""
    bare = TESTS.replace("pytestmark = pytest.mark.asyncio\n", "")
    bare = bare.replace("class TestMarked", "@pytest.mark.asyncio\nclass TestMarked")
    code, said = run_pytest(project, bare, "--asyncio-mode=auto")
    assert (code, "8 passed" in said) == (0, True), said


def test_what_is_left_behind_is_an_error(project: Path) -> None:
    code, said = run_pytest(project, LEAKS, "--asyncio-mode=auto")
    assert code == 1, said
    assert "5 passed, 3 errors" in said, said
    (pid,) = re.findall(r"the worker's pid is (\d+)", said)
    assert f"  process {pid} (" in said
    assert "mapping(s) of shared memory" in said
    assert "  directory aiogpu-" in said
    assert "open descriptor(s) of /memfd:aiogpu-mine" in said
    assert "Close its node: `async with aiogpu.init(...)`" in said
    while Path(f"/proc/{pid}").exists():
        """It ends with its driver, which did not wait for it."""


WRONG = {
    "address='local'": "takes options of aiogpu.init by name, and no address",
    "4": "takes options of aiogpu.init by name, and no address",
    "num_gpu=4": "num_gpu",
    "num_gpus=-4": "num_gpus=-4",
}


def test_a_wrong_mark_is_told(project: Path) -> None:
    marked = "@pytest.mark.aiogpu({})\nasync def test_{}(inline_node):\n    pass\n"
    tests = [marked.format(mark, number) for number, mark in enumerate(WRONG)]
    code, said = run_pytest(
        project, "\n".join(["import pytest", *tests]), "--asyncio-mode=auto"
    )
    assert code == 1, said
    # What each test has said, on both loops, after a line with its name.
    _, *told = re.split(r"_ ERROR at setup of test_(\d)\[", said)
    for number, text in zip(told[::2], told[1::2], strict=True):
        assert list(WRONG.values())[int(number)] in text.partition("= short test")[0]
    assert Counter(told[::2]) == dict.fromkeys("0123", 2)


def test_importing_the_tools_imports_no_pytest() -> None:
    program = (
        "import sys, aiogpu.testing as t; print(*t.__all__); "
        "print(*{'pytest', 'pytest_asyncio', 'asyncio', 'psutil'} & set(sys.modules))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True
    ).stdout
    assert said == "HandClock World\n\n"
