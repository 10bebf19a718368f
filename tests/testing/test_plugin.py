"""The fixtures in a project of a user's, run by a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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
    plain = ("-q", "-p", "no:cacheprovider", "--strict-markers", "-W", "error")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *arguments],
        cwd=project,
        env=environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_nodes_in_either_mode_and_on_either_loop(project: Path, mode: str) -> None:
    code, said = run_pytest(project, TESTS, f"--asyncio-mode={mode}")
    assert code == 0, said
    assert "8 passed" in said, said


def test_no_mark_is_needed_in_auto_mode(project: Path) -> None:
    bare = TESTS.replace("pytestmark = pytest.mark.asyncio\n", "")
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


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ("address='local'", "takes options of aiogpu.init by name, and no address"),
        ("4", "takes options of aiogpu.init by name, and no address"),
        ("num_gpu=4", "num_gpu"),
        ("num_gpus=-4", "num_gpus=-4"),
    ],
)
def test_a_wrong_mark_is_told(project: Path, mark: str, told: str) -> None:
    tests = f"""
        import pytest

        @pytest.mark.aiogpu({mark})
        async def test_marked(inline_node):
            pass
    """
    code, said = run_pytest(project, tests, "--asyncio-mode=auto")
    assert (code, told in said) == (1, True), said


def test_importing_the_tools_imports_no_pytest() -> None:
    program = (
        "import sys, aiogpu.testing as t; print(*t.__all__); "
        "print(*{'pytest', 'pytest_asyncio', 'asyncio', 'psutil'} & set(sys.modules))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True
    ).stdout
    assert said == "HandClock World\n\n"
