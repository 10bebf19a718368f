"""The module and the tests on `docs/testing.md` work as the page says."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.program import clean_environment, run_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
BLOCK = re.compile(r"^```python file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(BLOCK.findall(PAGE))
# Without plugins that take half a second to import and are not needed here.
BARE = ("-q", "-pno:cacheprovider", "-pno:hypothesispytest", "-pno:xdist")
SCOPE = "asyncio_default_fixture_loop_scope=function"
WITH_PLUGIN = (*BARE, "-o", SCOPE, "--strict-markers")


@pytest.fixture
def directory(tmp_path):
    """A directory with all files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_pytest(directory, *arguments, typed="", plain=WITH_PLUGIN):
    command = sys.executable, "-m", "pytest", *plain, *arguments
    environ = clean_environment(PYTHONPATH=str(ROOT))
    return run_command(*command, cwd=directory, env=environ, input=typed)


def test_the_tests_of_the_page_pass(directory):
    ran = run_pytest(directory, "-W", "error")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "6 passed" in ran.stdout


def test_tests_without_fixtures_need_no_plugin(directory):
    for name in ("conftest.py", "test_embedder.py"):
        (directory / name).unlink()
    ran = run_pytest(directory, "-W", "error", plain=(*BARE, "-p", "no:asyncio"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


STRICT = ("-oasyncio_mode=strict", "-o", SCOPE)
AUTO = ("-oasyncio_mode=auto", "-o", SCOPE)
MODES = {
    "strict": ("asyncio", STRICT, "2 passed"),
    "auto": ("aiogpu", AUTO, "2 passed"),
    "anyio": ("anyio", ("-pno:asyncio",), "2 passed"),
    "anyio beside strict": ("anyio", STRICT, "2 passed"),
    "anyio beside auto": ("anyio", AUTO, "anyio's, and pytest-asyncio's in its auto"),
    "module": ("asyncio(loop_scope='module')", AUTO, "loop_scope is 'module'"),
}
"""The mark of a test, the options of pytest, and a text in pytest's output."""


@pytest.mark.parametrize("mode", MODES)
def test_the_node_fixture_runs_on_the_loop_of_the_test(tmp_path, mode):
    mark, options, text = MODES[mode]
    needs = ", anyio_backend" if mark == "anyio" else ""
    (tmp_path / "conftest.py").write_text(FILES["conftest.py"])
    (tmp_path / "test_it.py").write_text(f"""
import os
import aiogpu
import pytest

pytestmark = pytest.mark.{mark}


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.aiogpu(num_gpus=3)
async def test_where(aiogpu_node, request{needs}):
    assert (await aiogpu.cluster_resources())["GPU"] == 3
    pid = await aiogpu.remote(os.getpid).remote()
    assert (pid == os.getpid()) == (request.node.callspec.id == "inline")
""")
    ran = run_pytest(tmp_path, "-Werror", *options, plain=BARE)
    assert text in ran.stdout, ran.stdout + ran.stderr


def test_the_tests_of_the_page_find_a_bug_in_the_module(directory):
    module = directory / "embedder.py"
    module.write_text(module.read_text().replace("model(text)", "model(text) + 1"))
    ran = run_pytest(directory)
    assert "2 failed, 4 passed" in ran.stdout, ran.stdout + ran.stderr


def test_a_debugger_opens_where_a_task_failed(directory):
    tests = directory / "test_embedder.py"
    tests.write_text(tests.read_text().replace("no model large", "something else"))
    typed = "p ('the local variable', name)\nq\n"
    ran = run_pytest(directory, "--pdb", "-k", "must and inline", typed=typed)
    assert "('the local variable', 'large')" not in ran.stdout
    tests.write_text(tests.read_text().replace("LookupError", "OSError"))
    ran = run_pytest(directory, "--pdb", "-k", "must and inline", typed=typed)
    assert "('the local variable', 'large')" in ran.stdout, ran.stdout + ran.stderr
