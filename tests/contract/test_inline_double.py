"""What a user debugs and tests with the inline engine, by the public interface alone.

No test imports a module of the engine, so that they hold for any engine behind
`address="inline"`.
"""

from __future__ import annotations

import asyncio
import io
import pdb
import sys
import traceback
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import TaskTimeoutError

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
async def node() -> AsyncIterator[None]:
    async with aiogpu.init(address="inline", num_cpus=1, num_gpus=1):
        yield


def model_size() -> int:
    return 7


@aiogpu.remote
def plain(a: int) -> int:
    size = a * model_size()
    print("plain has", size)
    return size


@aiogpu.remote
async def soft(a: int) -> int:
    size = a * model_size()
    print("soft has", size)
    return size


@aiogpu.remote
async def wait() -> None:
    await asyncio.Event().wait()


@aiogpu.remote
def stop(a: int) -> int:
    b = a + 1
    breakpoint()
    return b


@aiogpu.remote
def fail() -> None:
    text = "from the task"
    raise ValueError(text)


tasks = pytest.mark.parametrize("task", [plain, soft], ids=["plain", "coroutine"])


@tasks
async def test_a_monkeypatch_reaches_a_task(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "model_size", lambda: 100)
    assert await task.remote(2) == 200


@tasks
async def test_pytest_captures_the_output_of_a_task(
    task: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    await task.remote(2)
    assert capsys.readouterr().out.endswith(" has 14\n")


@tasks
async def test_a_trace_function_counts_the_lines_of_a_task(task: Any) -> None:
    """Coverage and the breakpoints of an IDE are trace functions."""
    traced: set[str] = set()

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename == __file__:
            traced.add(frame.f_code.co_name)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await task.remote(2)
    finally:
        sys.settrace(before)
    assert {"model_size", "plain" if task is plain else "soft"} <= traced


async def test_pdb_stops_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    prompt = pdb.Pdb(stdin=io.StringIO("p a * 100 + b\nc\n"), stdout=out, nosigint=True)
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: prompt.set_trace(sys._getframe(1))
    )
    assert await stop.remote(4) == 5
    assert "405" in out.getvalue()


async def test_a_traceback_has_the_frames_of_caller_and_task() -> None:
    async def caller() -> None:
        await fail.remote()

    with pytest.raises(ValueError, match="from the task") as raised:
        await caller()
    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    own = [frame for frame in frames if frame.f_code.co_filename == __file__]
    names = [frame.f_code.co_name for frame in own]
    assert names.index("caller") < names.index("fail")
    assert own[-1].f_locals["text"] == "from the task"


async def test_a_timer_that_is_early_ends_its_call() -> None:
    """uvloop's timers are up to 1 ms early."""
    limits = [0.01 + number * 0.0007 for number in range(20)]
    handles = [wait.options(timeout=limit).remote() for limit in limits]
    ends = await asyncio.gather(*handles, return_exceptions=True)
    assert {type(end) for end in ends} == {TaskTimeoutError}
