"""What was found by looking for trouble; each of these once hung or blamed wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

import aiogpu
from aiogpu.testing.leaks import Resources
from tests.contract import tasks
from tests.contract.test_output import SlowTerminal
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]


async def test_cancelling_what_ended_behind_a_slow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker is gone, but its answer waits for its line."""
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        printed = tasks.output.options(num_gpus=1).remote(["x"])
        behind = tasks.output.options(num_gpus=1, timeout=60).remote(["y"])
        async with asyncio.timeout(60):
            while (await aiogpu.status()).workers[0].pid == 0:
                await asyncio.sleep(0)
            pid = (await aiogpu.status()).workers[0].pid
            while psutil.pid_exists(pid):
                await asyncio.sleep(0)
        assert printed.cancel()
        terminal.is_free.set()
        await behind  # it had the GPU although the terminal was blocked
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


class Truthless(Exception):
    """Raises when asked for its truth."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


async def test_an_exception_without_a_truth_value() -> None:
    async with aiogpu.init(num_cpus=1):
        task = tasks.fail.options(retry_exceptions=[OSError])
        with pytest.raises(Truthless):
            await task.remote(Truthless)


class Deceiver(type(Exception)):  # type: ignore[misc]
    """A class of exceptions that cannot be asked for its instances."""

    def __instancecheck__(cls, _instance: object) -> bool:
        raise RuntimeError("do not ask")


async def test_a_retry_class_that_raises() -> None:
    kind = Deceiver("Odd", (Exception,), {})
    async with aiogpu.init(num_cpus=1):
        task = tasks.fail.options(retry_exceptions=[kind])
        with pytest.raises(KeyError):
            await task.remote(KeyError)


@pytest.mark.parametrize("preload", ["no_such_module", "with_thread"])
async def test_what_a_zygote_says_last_is_heard_on_a_busy_loop(
    preload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_thread.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    me = psutil.Process()
    others = set(me.children())
    opening = asyncio.ensure_future(_open(preload))
    async with asyncio.timeout(60):
        while not (new := set(me.children()) - others):
            await asyncio.sleep(0)
    (zygote,) = new
    # The loop is held until the zygote has said all and is gone.
    deadline = time.monotonic() + 60
    while zygote.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    if preload == "with_thread":
        assert await opening == 2
    else:
        with pytest.raises(aiogpu.errors.PreloadError, match="no_such_module"):
            await opening


async def _open(preload: str) -> int:
    async with aiogpu.init(num_cpus=1, preload=[preload]):
        return await tasks.add.remote(1)


@pytest.mark.slow
async def test_a_stopped_keeper_does_not_hold_up_the_end(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
        keeper = psutil.Process(gate.pids["a"]).parent()
        assert keeper is not None
        keeper.suspend()
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await running


async def test_a_killed_keeper_and_the_next_task(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        for name in "abc":
            first = tasks.gated.remote(gate.path, name)
            await gate.entered(name)
            worker = psutil.Process(gate.pids[name])
            keeper = worker.parent()
            assert keeper is not None
            keeper.kill()
            # Held, so that the keeper's end and the zygote's word come together.
            psutil.wait_procs([worker], 60)
            first.cancel()
            assert await tasks.add.remote(1) == 2


async def test_a_group_is_ended_with_an_orphaned_keepers_worker(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        handle = tasks.start_sleeper.options(max_retries=0).remote(gate.path, "a")
        await gate.entered("a")
        worker = psutil.Process(gate.pids["a"])
        keeper = worker.parent()
        assert keeper is not None
        zygote = keeper.parent()
        assert zygote is not None
        (sleeper,) = worker.children()
        zygote.kill()
        async with asyncio.timeout(60):
            while psutil.pid_exists(zygote.pid) and zygote.is_running():
                await asyncio.sleep(0)
            keeper.kill()
            with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
                await handle
            while sleeper.is_running():
                await asyncio.sleep(0)
        assert await tasks.add.remote(1) == 2


async def test_cancelling_an_init_that_hangs_in_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = Resources.take()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await aiogpu.init(preload=["endless"])
    assert Resources.take().since(before) == []


HANGING = """
    import asyncio, sys, aiogpu
    sys.path.insert(0, sys.argv[1])
    async def main():
        await aiogpu.init(preload=["endless"])
    aiogpu.run(main())
"""


async def test_a_zygote_that_hangs_in_an_import_ends_with_its_driver(
    tmp_path: Path, gate: Gate
) -> None:
    from tests.support.program import start

    (tmp_path / "endless.py").write_text(
        "import threading\nfrom tests.support.gate import say\n"
        f"say({gate.path!r}, 'in')\nthreading.Event().wait()\n"
    )
    driver = start(HANGING, str(tmp_path), XDG_RUNTIME_DIR=str(tmp_path))
    try:
        await gate.entered("in")
        zygote = psutil.Process(gate.pids["in"])
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    loop = asyncio.get_running_loop()
    _, alive = await loop.run_in_executor(None, lambda: psutil.wait_procs([zygote], 30))
    assert alive == []


async def test_sigint_to_the_helpers_is_nothing_to_them(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
        for process in psutil.Process(gate.pids["a"]).parents()[:2]:
            assert process.name().startswith("aiogpu-")
            os.kill(process.pid, signal.SIGINT)
        gate.release("a")
        assert await running == "a"
        assert await tasks.add.remote(1) == 2


async def test_who_connects_and_says_nothing_is_let_go_with_the_node(
    runtime_directory: Path,
) -> None:
    """So might a keeper whose zygote died while it was forked."""
    async with aiogpu.init(num_cpus=1):
        assert await tasks.add.remote(1) == 2
        (directory,) = runtime_directory.iterdir()
        path = str(directory / "node.sock")
        reader, writer = await asyncio.open_unix_connection(path)
        assert await tasks.add.remote(1) == 2
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
