"""`run` is `asyncio.run` on uvloop."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import uvloop

import aiogpu
from tests.support.program import environment


async def fail() -> None:
    raise KeyError("a")


PROGRAM = """
import aiogpu, os, sys
from tests.contract import tasks
async def main():
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        value = await tasks.add.remote(1)
    with open(sys.argv[1], "w") as file:
        file.write(str(value))
aiogpu.run(main())
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", ">&-", "2>&-"])
def test_run_works_without_standard_descriptors(closed: str, tmp_path: object) -> None:
    """libuv aborts a process that lets it have descriptor 0, 1 or 2."""
    result = f"{tmp_path}/result"
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    ended = subprocess.run(
        [*shell, sys.executable, "-c", PROGRAM, result],
        stdin=subprocess.DEVNULL,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0
    assert Path(result).read_text() == "2"


async def test_run_inside_a_loop_is_refused() -> None:
    coroutine = fail()
    with pytest.raises(aiogpu.NoLoopError, match=r"write `await main\(\)`") as raised:
        aiogpu.run(coroutine)
    assert isinstance(raised.value, RuntimeError)
    assert "running event loop" in str(raised.value)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_run_refuses_what_is_no_coroutine() -> None:
    with pytest.raises(ValueError, match=r"write `aiogpu\.run\(fail\(\)\)`\.$"):
        aiogpu.run(fail)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not <RemoteFunction .*async def main\(\)`"):
        aiogpu.run(aiogpu.remote(fail))  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", ["swallowed", "another error"])
def test_ctrl_c_during_the_import_of_uvloop_ends_the_program(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an import, CPython may drop the interrupt or raise another error."""

    class Uvloop(ModuleType):
        def __getattr__(self, name: str) -> object:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if outcome == "another error":
                    raise TypeError("expected a message argument") from None
            return getattr(uvloop, name)

    monkeypatch.setitem(sys.modules, "uvloop", Uvloop("uvloop"))
    main = fail()
    with pytest.raises(KeyboardInterrupt):
        aiogpu.run(main)
    assert inspect.getcoroutinestate(main) == inspect.CORO_CLOSED
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def clean_up(done: list[str]) -> None:
    loop = asyncio.get_running_loop()
    try:
        signal.raise_signal(signal.SIGINT)
        await loop.create_future()
    except asyncio.CancelledError:
        try:
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            await loop.create_future()
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")


def test_cleanup_can_await_after_a_second_ctrl_c(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        aiogpu.run(clean_up(done))
    assert done == ["cleaned up"]
    assert caplog.messages == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_step_warns_of_no_coroutine(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = [signal.SIGINT]

    class Loop(uvloop.Loop):
        def run_until_complete(self, future: Any) -> Any:
            while presses:
                signal.raise_signal(presses.pop())
            return super().run_until_complete(future)

    monkeypatch.setattr(uvloop, "new_event_loop", Loop)
    main = fail()
    with pytest.raises(KeyboardInterrupt):
        aiogpu.run(main)
    assert inspect.getcoroutinestate(main) == inspect.CORO_CLOSED
    assert not recwarn.list
