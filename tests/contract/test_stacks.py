"""`node.stack()`: the text of `aiogpu stack`, in the program itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import aiogpu
from aiogpu.errors import NoSuchTaskError, OptionError, StackError
from aiogpu.types import Node
from tests.contract import tasks
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]


def add_natively(gate: Path) -> int:
    """One call into C that does not end, and looks for no signal."""
    (gate / "begun").touch()
    return sum(range(10**12))


def close_descriptors(gate: Path) -> int:
    os.closerange(3, 100)
    return add_natively(gate)


async def begun(path: Path) -> None:
    while not (path / "begun").exists():
        await asyncio.sleep(0)


@pytest.mark.needs("processes")
async def test_the_stack_of_a_task_and_its_end(node: Node, gate: Gate) -> None:
    handle = tasks.gated.remote(gate.path, "a")
    await gate.entered("a")
    head, thread, *calls = (await node.stack(handle)).splitlines()
    assert head == f"gated (task {(await handle.why()).task}), pid {gate.pids['a']}"
    assert thread == "thread MainThread:"
    assert [call for call in calls if call.endswith(" in gated")]
    waiting = tasks.pid.remote()
    with pytest.raises(StackError, match=r"pid \(task .*\) does not run: pid"):
        await node.stack(waiting)
    gate.release("a")
    await handle
    with pytest.raises(StackError, match=r"gated .*ended"):
        await node.stack(handle)
    await waiting


@pytest.mark.needs("processes")
async def test_a_stack_while_native_code_runs(node: Node, tmp_path: Path) -> None:
    handle = aiogpu.remote(cancel_grace=0)(add_natively).remote(tmp_path)
    await begun(tmp_path)
    lines = (await node.stack(handle)).splitlines()
    assert lines[1] == "thread MainThread, which runs native code:"
    assert lines[-1] == "    return sum(range(10**12))"
    handle.cancel()


@pytest.mark.needs("processes")
async def test_a_task_that_closes_all_files_is_not_asked(
    node: Node, tmp_path: Path
) -> None:
    """The number of the closed descriptor may be that of a file of the task."""
    task = aiogpu.remote(cancel_grace=0, max_calls=1)(close_descriptors)
    handle = task.remote(tmp_path)
    await begun(tmp_path)
    with pytest.raises(StackError):
        await node.stack(handle)
    handle.cancel()


@pytest.mark.parametrize("address", ["inline"], indirect=True)
async def test_no_stack_of_a_task_in_this_process(node: Node, gate: Gate) -> None:
    handle = tasks.pid.remote()
    with pytest.raises(StackError, match="runs in this process: use its debugger"):
        await node.stack(handle)
    await handle


async def test_a_stack_of_no_task_is_refused(node: Node) -> None:
    wrong: list[object] = ["train", True, -1]
    for number in wrong:
        with pytest.raises(
            OptionError, match=r"node\.stack\(.*write `await node\.stack\(handle\)`"
        ):
            await node.stack(number)  # type: ignore[arg-type]
    with pytest.raises((NoSuchTaskError, StackError)):
        await node.stack(999_999)
