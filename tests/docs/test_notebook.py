"""The example notebook and its interrupts, in a real Jupyter kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from jupyter_client.manager import KernelManager

NOTEBOOK: Final = Path(__file__).parents[2] / "examples" / "19_notebook.ipynb"
LIMIT: Final = 60.0  # seconds, to end a hang

Run = Callable[..., list[str]]


@pytest.fixture
def run(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Run]:
    """A function that runs a cell in the kernel and returns its outputs."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.chdir(tmp_path)
    manager = KernelManager(kernel_name="python3", transport="ipc")
    manager.start_kernel(env=dict(os.environ))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LIMIT)

    def run(code: str, interrupt_at: str = "") -> list[str]:
        outputs: list[str] = []
        before = ""

        def on_output(message: dict[str, Any]) -> None:
            nonlocal before
            kind, content = message["msg_type"], message["content"]
            last, before = before, kind
            if kind == last == "stream":
                outputs[-1] += content["text"]  # the kernel sends it in parts
            elif kind == "stream":
                outputs.append(content["text"])
            elif kind in ("execute_result", "display_data"):
                outputs.append(content["data"]["text/plain"])
            elif kind == "error":
                outputs.append(content["ename"])
            if kind == "stream" and interrupt_at and interrupt_at in content["text"]:
                manager.interrupt_kernel()

        client.execute_interactive(code, timeout=LIMIT, output_hook=on_output)
        return outputs

    yield run
    client.stop_channels()
    manager.shutdown_kernel()
    manager.context.term()


def test_the_cells_show_the_outputs_of_the_notebook(run: Run) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            expected = [
                "".join(output.get("text") or output["data"]["text/plain"])
                for output in cell["outputs"]
            ]
            assert run("".join(cell["source"])) == expected


TASKS: Final = """
import asyncio
import aiogpu

await aiogpu.init(num_cpus=2, num_gpus=1)

@aiogpu.remote(num_gpus=1)
async def forever():
    print("begun", flush=True)
    await asyncio.Event().wait()

@aiogpu.remote(num_gpus=1)
def quick():
    print("done")
    return aiogpu.get_gpu_ids()
"""


def test_an_interrupt_cancels_the_task_that_the_cell_awaits(run: Run) -> None:
    assert run(TASKS) == []
    *_, error = run("await forever.remote()", interrupt_at="begun")
    assert error == "CancelledError"
    printed, ids = run("await quick.remote()")
    assert printed.endswith("done\n"), "the task's output belongs to its cell"
    assert ids == "[0]", "the GPU is free"
    # The node is still open: the end of the kernel closes it.


CALLS: Final = """
import asyncio
import aiogpu

await aiogpu.init(num_cpus=2)

@aiogpu.remote
def give(value):
    return value

async def tell(value, at):
    if await give.remote(value) == at:
        print("begun", flush=True)
"""

SUBMITTING: Final = """
for value in range(500_000):
    if value == {at}:
        print("begun", flush=True)
    give.remote(value)
"""
"""Ends by an interrupt. The cell awaits nothing, so IPython lets Ctrl-C raise."""

GATHERING: Final = """
calls = [tell(value, {at}) for value in range(4000)]
await asyncio.gather(*calls, asyncio.Event().wait())
"""


def test_interrupts_among_thousands_of_calls_leave_the_node_usable(run: Run) -> None:
    assert run(CALLS) == []
    for at in range(0, 4000, 400):
        for cell, error in (
            (SUBMITTING, "KeyboardInterrupt"),
            (GATHERING, "CancelledError"),
        ):
            outputs = run(cell.format(at=at), interrupt_at="begun")
            assert outputs == ["begun\n", error]
            assert run("await give.remote(7)") == ["7"]
