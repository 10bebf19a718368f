"""What a notebook shows: objects as HTML, progress bars, output by cell.

On a node in the kernel and on one that the kernel has joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from aiogpu.notebook.cells import KEPT, Cells
from tests.cli.sandbox import open_sandbox
from tests.docs.kernel import Kernel, kernel


@pytest.fixture(params=["local", "joined"])
def cells(
    request: pytest.FixtureRequest,
    no_leaks: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Kernel]:
    """A kernel with a node of two CPUs and one GPU."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.chdir(tmp_path)
    if request.param == "local":
        with kernel_with("num_cpus=2, num_gpus=1") as running:
            yield running
        return
    with open_sandbox() as sandbox:
        monkeypatch.setenv("XDG_RUNTIME_DIR", sandbox.directory)
        sandbox.run("start", "--head", "--num-cpus=2", "--num-gpus=1")
        with kernel_with("address='auto'") as running:
            yield running
        sandbox.run("stop")


@contextmanager
def kernel_with(options: str) -> Iterator[Kernel]:
    """A kernel whose first cell has opened or joined a node."""
    with kernel() as running:
        assert not running.errors(running.run(BEGIN.format(options=options)))
        yield running
        running.run("await aiogpu.shutdown()")


BEGIN: Final = """
import asyncio, os, pathlib, sys
import aiogpu

node = await aiogpu.init({options})

def wait_for(name):
    while not os.path.exists(name):
        pass

@aiogpu.remote
def speak(word, gate=None):
    if gate is not None:
        print("begin", word)
        wait_for(gate)
    print(word)
    print("error", word, file=sys.stderr)

@aiogpu.remote
async def parent(word, gate):
    await speak.remote(word, gate)

@aiogpu.remote(num_gpus=0.75)
def hold(gate):
    wait_for(gate)

@aiogpu.remote
def square(number):
    return number * number

@aiogpu.remote
class Model:
    def fail(self):
        raise ValueError("no such word")
"""


def test_output_lands_under_the_cell_that_started_the_task(cells: Kernel) -> None:
    first = cells.run("early = speak.remote('first', 'gate'); await asyncio.sleep(0)")
    nested = cells.run("both = parent.remote('nested', 'gate')")
    last = cells.run("pathlib.Path('gate').touch(); await asyncio.gather(early, both)")
    own = cells.run("await speak.remote('own')")
    assert not cells.errors(last)
    for cell, word in ((first, "first"), (nested, "nested"), (own, "own")):
        lines = [line.partition(") ")[2] for line in cells.text(cell).splitlines()]
        assert sorted(lines)[-2:] == sorted([word, f"error {word}"])
    assert not cells.text(last)


def test_a_traceback_has_the_lines_of_the_cell(cells: Kernel) -> None:
    broken = cells.run("actor = Model.remote()\nawait actor.fail.remote()")
    assert 'raise ValueError("no such word")' in cells.errors(broken)


def test_objects_show_their_state(cells: Kernel) -> None:
    cells.run("held = hold.remote('end'); queued = hold.remote('end')")
    cells.run("actor = Model.remote(); await actor")
    cells.run("while (await held.why()).state != 'running': await asyncio.sleep(0)")
    shows = {
        "held": ["running", "GPU 0 (0.75)", "pid"],
        "queued": ["waiting", "GPU 0.75: 0.25 of 1 free", "held by hold"],
        "actor": ["alive", "pid"],
        "node": ["Node open", "GPU 0", "hold 0.75", "waits for GPU"],
        "await aiogpu.status()": ["GPU 0", "hold 0.75", "waits for GPU"],
        "square.map(range(3))": ["Results of square", "0 of at most 256"],
    }
    shown = {name: cells.run(name) for name in shows}
    cells.run("await asyncio.sleep(0.1)")  # the answers of another process
    for name, parts in shows.items():
        html = cells.html(shown[name])
        assert [part for part in parts if part not in html] == [], name
    cells.run("pathlib.Path('end').touch(); await asyncio.gather(held, queued)")
    assert "it gave its result" in cells.html(cells.run("held"))


MAPPED: Final = "[n async for n in square.map(range(40), progress=True, chunk=4)][-1]"


def test_a_map_shows_its_progress(cells: Kernel) -> None:
    widget = cells.kinds(cells.run(MAPPED))
    plain = cells.run(
        "sys.modules['ipywidgets'] = None\n"
        "import importlib.util; find = importlib.util.find_spec\n"
        "import aiogpu.notebook.progress as shown\n"
        "shown.find_spec = lambda name: None\n" + MAPPED
    )
    assert not cells.errors(plain)
    assert "square: 40 of 40" in cells.html(plain)
    assert "value=40 max=40" in cells.html(plain)
    assert "application/vnd.jupyter.widget-view+json" in widget


def test_only_the_last_cells_are_kept() -> None:
    numbers = iter(range(10, 10 * KEPT, 2))
    cells = Cells(None, lambda: next(numbers))  # type: ignore[arg-type]
    for cell in range(KEPT + 1):
        cells._note({"cell": cell})
    assert cells.find(10 + 2 * KEPT + 7) == {"cell": KEPT}
    assert cells.find(10 + 2 * (KEPT - 1) + 1) == {"cell": KEPT - 1}
    assert cells.find(11) is None, "its cell was forgotten"
    assert cells.find(0) is None, "an unknown task"
