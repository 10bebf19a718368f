"""Definitions of modules that other interpreters do not find by their names."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import aiogpu
from tests.support.program import ROOT, environment, run, run_command

pytestmark = pytest.mark.usefixtures("no_leaks")

MODULE = """
from dataclasses import dataclass
import aiogpu

@dataclass
class Point:
    x: int

class Refused(Exception):
    pass

def moved(point):
    if point.x < 0:
        raise Refused(point)
    return Point(point.x + 1)

@aiogpu.remote
def move(point):
    return moved(point)

@aiogpu.remote
class Mover:
    def move(self, point):
        return moved(point)
"""
TEST = (
    MODULE
    + """
def test_a_move():
    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=0):
            assert await move.remote(Point(1)) == Point(2)

    aiogpu.run(main())
"""
)
SCRIPT = (
    MODULE
    + """
async def main():
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        print(await move.remote(Point(1)), await move.remote(move.remote(Point(1))))

aiogpu.run(main())
"""
)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    """A module loaded from a file, under a name that no import finds."""
    (tmp_path / "file.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("plugin_7", tmp_path / "file.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["plugin_7"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["plugin_7"]


async def test_a_module_loaded_from_a_file(address: str, plugin: ModuleType) -> None:
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=0):
        assert await plugin.move.remote(plugin.Point(1)) == plugin.Point(2)
        async with plugin.Mover.remote() as mover:
            assert await mover.move.remote(plugin.Point(2)) == plugin.Point(3)
        with pytest.raises(plugin.Refused, match="-1"):
            await plugin.move.remote(plugin.Point(-1))

        @aiogpu.remote
        def move_twice(point: object) -> object:
            return plugin.moved(plugin.moved(point))

        assert await move_twice.remote(plugin.Point(3)) == plugin.Point(5)


@pytest.mark.fresh
@pytest.mark.parametrize("package", ["checks", "tests"])
@pytest.mark.parametrize("initial", [[], ["__init__.py"]])
def test_pytest_with_import_mode_importlib(
    tmp_path: Path, package: str, initial: list[str]
) -> None:
    """Also if imports find another package of the same name."""
    (tmp_path / package).mkdir()
    for name in (*initial, "test_moves.py"):
        (tmp_path / package / name).write_text(TEST if "test" in name else "")
    ran = run_command(
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--import-mode=importlib", str(tmp_path / package)),
        cwd=tmp_path,
        env=environment(),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.fresh
def test_a_script_run_by_runpy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='script_7')"
    ran = run_command(sys.executable, "-c", program, env=environment(), cwd=ROOT)
    assert ran.stdout == "Point(x=2) Point(x=3)\n", ran.stderr


@pytest.mark.fresh
def test_modules_that_imports_find_are_sent_by_name(tmp_path: Path) -> None:
    """A class sent by name is the worker's own class, whatever the module does."""
    (tmp_path / "own_7").mkdir()
    (tmp_path / "own_7" / "named.py").write_text(MODULE)
    program = """
        import aiogpu, os, xml.etree.ElementTree, numpy.testing, asyncio.events
        from own_7 import named

        @aiogpu.remote
        def is_same(kinds):
            import sys
            return [getattr(sys.modules[k.__module__], k.__name__) is k for k in kinds]

        async def main():
            async with aiogpu.init(num_cpus=1, num_gpus=0):
                kinds = [named.Point, numpy.ndarray, xml.etree.ElementTree.Element]
                kinds += [asyncio.events.AbstractEventLoop, type(named.__spec__)]
                print(all(await is_same.remote(kinds)))

        aiogpu.run(main())
        """
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert run(program, PYTHONPATH=path) == "True\n"
