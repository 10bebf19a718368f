"""[B38] Functions that do as they please with their process: each on its own handle.

Nothing hangs, nobody else notices, and the next task finds its footing.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiogpu
from tests.contract import phase_tasks, tasks, wild_tasks
from tests.support.gate import Gate
from tests.support.program import start

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@asynccontextmanager
async def node() -> AsyncIterator[aiogpu.types.Node]:
    """A node with a neighbour, who must not notice anything."""
    async with aiogpu.init(num_cpus=1, num_gpus=2, cancel_grace=20) as session:
        neighbour = tasks.clock.options(num_cpus=0, num_gpus=1, max_calls=0)
        before = await neighbour.remote()
        yield session
        assert await neighbour.remote() > before
        status = await aiogpu.status()
        assert status.waiting == status.tasks == ()
        session._session._engine._open_driver.scheduler.check()  # type: ignore[attr-defined]


SPOILING: list[tuple[Any, tuple[Any, ...]]] = [
    (wild_tasks.change_directory, ("/",)),
    (wild_tasks.change_mask, ()),
    (wild_tasks.change_handlers, ()),
    (wild_tasks.change_handler_by_loop, ()),
    (wild_tasks.change_stdout, ("none",)),
    (wild_tasks.change_stdout, ("text",)),
    (wild_tasks.change_locale, ()),
]


async def test_the_next_task_of_a_worker_finds_its_footing(
    gate: Gate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with node():
        before = await wild_tasks.task_state.remote()
        gone = wild_tasks.change_to_a_removed_directory
        for task, args in [*SPOILING, (gone, (str(tmp_path / "gone"),))]:
            await check_footing(task, args, before, gate, capsys)


async def check_footing(
    task: Any,
    args: tuple[Any, ...],
    before: dict[str, Any],
    gate: Gate,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The next tasks find the state of before, are heard, and can be interrupted."""
    await task.remote(*args)
    assert await wild_tasks.task_state.remote() == before
    await tasks.output.remote(["heard"])
    assert "heard" in capsys.readouterr().out
    # Within the grace, or this test ends too late.
    handle = tasks.spin.remote(gate.path, "in")
    await gate.entered("in")
    handle.cancel()
    assert await tasks.pid.remote() == before["pid"]
    gate.forget("in")


async def test_the_next_task_of_a_worker_finds_its_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that were there are put back; what is new stays, as libraries rely on."""
    monkeypatch.setenv("LOGNAME_OF_TEST", "a")
    monkeypatch.setenv("OTHER_OF_TEST", "b")
    names = "PATH", "HOME", "LOGNAME_OF_TEST", "OTHER_OF_TEST"
    async with node():
        before = await tasks.environment.remote(*names)
        assert before["OTHER_OF_TEST"] == "b"
        await wild_tasks.change_variables.remote()
        assert await tasks.environment.remote(*names) == before


async def test_a_program_whose_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    async with node():
        for _ in range(3):
            assert await tasks.add.remote(1) == 2


async def test_a_lowered_limit_is_the_workers_own() -> None:
    """The worker keeps it; a task that wants none of that has one of its own."""
    async with node():
        isolated = wild_tasks.lower_limit.options(num_gpus=1)
        await isolated.remote("RLIMIT_NOFILE", 3)
        with pytest.raises(aiogpu.WorkerDiedError, match="SIGXCPU"):
            await wild_tasks.compute_beyond.remote(1)
        with pytest.raises(MemoryError):
            await wild_tasks.allocate_beyond.options(num_gpus=1).remote(1 << 30)
        await wild_tasks.lower_limit.remote("RLIMIT_FSIZE", 0)
        assert await tasks.add.remote(1) == 2


async def test_a_child_that_comes_back_from_a_coroutine_or_a_thread() -> None:
    async with node():
        for _ in range(3):
            pid = await tasks.pid.remote()
            assert await wild_tasks.fork_in_coroutine.remote(9) == (pid, 9)
            assert await wild_tasks.fork_in_thread.remote() == 0
            assert await tasks.add.remote(1) == 2


FLOOD = """
    import resource, sys
    import aiogpu
    from tests.contract import wild_tasks

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def main():
        megabytes, raw = int(sys.argv[1]), sys.argv[2] == "raw"
        async with aiogpu.init(num_cpus=1):
            await wild_tasks.print_much.remote(2_000, 1_000, raw)
            before = peak()
            written = await wild_tasks.print_much.remote(megabytes * 1_000, 1_000, raw)
            assert written == megabytes * 1_000_000
        print(peak() - before, file=sys.stderr)

    aiogpu.run(main())
"""


@pytest.mark.parametrize("how", ["text", "raw"])
@pytest.mark.parametrize("megabytes", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_prints_without_end_costs_the_driver_no_memory(
    megabytes: int, how: str
) -> None:
    program = start(FLOOD, str(megabytes), how)
    assert program.stdout is not None
    assert program.stderr is not None
    received = 0

    def read() -> None:
        nonlocal received
        assert program.stdout is not None
        while data := program.stdout.buffer.read(1 << 20):
            received += len(data)

    reader = threading.Thread(target=read)
    reader.start()
    told = program.stderr.read()
    reader.join()
    assert program.wait(timeout=60) == 0, told
    program.stdout.close()
    program.stderr.close()
    # Each line carries its worker's name as well.
    assert received > (megabytes + 2) * 1_000_000
    assert int(told) < 24 * 1024, "kilobytes"


DEAF = """
    import asyncio, os, signal, sys
    import aiogpu
    from tests.contract import tasks
    from tests.support.gate import Gate

    async def main():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        async with Gate.open() as gate, aiogpu.init(num_cpus=1, cancel_grace=30):
            for name in "ab":
                handle = tasks.spin.remote(gate.path, name)
                await gate.entered(name)
                handle.cancel()
                await gate.entered(f"{name}-interrupted")
            assert await tasks.pid.remote() == gate.pids["a"] == gate.pids["b"]

    aiogpu.run(main())
    print("interrupted")
"""


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_a_driver_to_which_an_interrupt_is_nothing(how: str) -> None:
    """As a shell starts what is to run in the background."""
    before = signal.getsignal(signal.SIGINT)
    try:
        if how == "ignored":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            source = DEAF
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            source = DEAF.replace("assert signal.getsignal", "signal.getsignal")
        program = start(source)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out) == (0, "interrupted\n"), err


async def test_two_that_never_return_hold_up_no_other(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=3, cancel_grace=0.2):
        endless = [
            phase_tasks.swallowing.remote(gate.path, name, "/dev/null") for name in "ab"
        ]
        await gate.entered("a", "b")
        assert await asyncio.gather(*(map(tasks.add.remote, range(50)))) == [
            *range(1, 51)
        ]
    ends = await asyncio.gather(*endless, return_exceptions=True)
    assert {type(end) for end in ends} == {aiogpu.errors.NodeClosedError}
    assert not any(psutil.pid_exists(pid) for pid in gate.pids.values())
