"""[B15] [B26] Nothing outlives its lease or its node, whatever is done to whom.

Tasks leave processes behind, keepers and zygotes are killed or stopped, and the driver
dies; with cgroups beside the keepers, and without them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu.linux.cgroup import Place
from aiogpu.runtime import node_cgroup
from aiogpu.runtime.workers import pool
from tests.contract import phase_tasks, tasks, wild_tasks
from tests.support.cgroups import PLACE, all_groups, groups_of, needs_cgroup
from tests.support.gate import Gate
from tests.support.program import start

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; one that init has yet to wait for has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# What a task leaves


@pytest.mark.parametrize("way", wild_tasks.WAYS)
async def test_nothing_outlives_the_share(way: str, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1) as session:
        scheduler = session._session._engine._open_driver.scheduler  # type: ignore[attr-defined]
        # Some of them keep their worker from ending until it is made to.
        scheduler.config = scheduler.config._replace(exit_grace=0.3)
        handle = wild_tasks.leave.remote(way, gate.path)
        await gate.entered("left")
        worker = psutil.Process(gate.pids["left"])
        keeper = worker.parent()
        assert keeper is not None
        family = keeper.children(recursive=True)
        gate.release("left")
        left = await handle
        assert {worker.pid, *left} <= {process.pid for process in family}
        # There is one GPU: this task has it when the first one's share is free.
        successor = await tasks.pid.options(num_gpus=1).remote()
        assert [process for process in family if is_alive(process)] == []
        assert successor != worker.pid
        assert await tasks.add.remote(1) == 2


async def test_one_that_ignores_signals_is_ended_after_its_grace(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.05):
        handle = wild_tasks.never_return_deaf.remote(gate.path)
        await gate.entered("daemon", "deaf")
        family = [psutil.Process(pid) for pid in gate.pids.values()]
        handle.cancel()
        assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert [process for process in family if is_alive(process)] == []


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


# What is killed: keepers, zygotes and drivers of a task that has left a daemon


@pytest.fixture(params=["with cgroup2", "without"])
def has_cgroup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "without":
        monkeypatch.setattr(node_cgroup, "find_cgroup", lambda: Place(None, "a test"))
        return False
    if PLACE.directory is None:
        pytest.skip(PLACE.reason)
    return True


class House:
    """A node whose one task has left a daemon and runs on."""

    def __init__(self, gate: Gate, handle: Awaitable[str]) -> None:
        self.handle = handle
        self.daemon = psutil.Process(gate.pids["daemon"])
        self.worker = psutil.Process(gate.pids["task"])
        keeper = self.worker.parent()
        assert keeper is not None
        self.keeper = keeper
        zygote = keeper.parent()
        assert zygote is not None
        self.zygote = zygote

    async def see_end(self, process: psutil.Process) -> None:
        async with asyncio.timeout(60):
            while is_alive(process):
                await asyncio.sleep(0)


@asynccontextmanager
async def house(gate: Gate) -> AsyncIterator[House]:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        task = tasks.leave_daemon_and_wait.options(num_gpus=1, max_retries=0)
        handle = task.remote(gate.path)
        await gate.entered("daemon", "task")
        yield House(gate, handle)


async def test_a_worker_is_born_in_its_slots_group(
    has_cgroup: bool, gate: Gate
) -> None:
    async with house(gate) as it:
        found = [group_of(process.pid) for process in (it.daemon, it.worker, it.keeper)]
        assert len(set(found)) == 1
        groups = groups_of(os.getpid())
        if has_cgroup:
            assert [name in found[0] for name in groups] == [True]
            assert found[0].endswith("/0")
            assert group_of(it.zygote.pid) == group_of(os.getpid())
        else:
            assert (groups, found[0]) == ([], group_of(os.getpid()))
        gate.release("task")
        await it.handle


def group_of(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                return line.strip()
    return ""


@pytest.mark.usefixtures("has_cgroup")
async def test_a_daemon_ends_before_its_share_is_free(gate: Gate) -> None:
    async with house(gate) as it:
        gate.release("task")
        await it.handle
        assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert not is_alive(it.daemon)


@pytest.mark.usefixtures("has_cgroup")
async def test_a_killed_keeper_takes_all_along(gate: Gate) -> None:
    async with house(gate) as it:
        it.keeper.kill()
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await it.handle
        assert not is_alive(it.daemon)
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("first", ["zygote", "keeper"])
async def test_zygote_and_keeper_are_killed(
    first: str, has_cgroup: bool, gate: Gate
) -> None:
    """Then nobody adopts the daemon; its group is what it cannot leave."""
    async with house(gate) as it:
        if first == "zygote":
            it.zygote.kill()
            await it.see_end(it.zygote)
            it.keeper.kill()
        else:
            it.zygote.suspend()
            it.keeper.kill()
            await it.see_end(it.keeper)
            it.zygote.kill()
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await it.handle
        if has_cgroup:
            assert not is_alive(it.daemon)
        else:
            # Nobody adopts it then: see docs/decisions/0015-cgroups-back-up-keepers.md.
            assert is_alive(it.daemon)
            it.daemon.kill()
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_an_end_while_a_slot_is_being_ended(has_cgroup: bool, gate: Gate) -> None:
    async with house(gate) as it:
        it.zygote.kill()
        await it.see_end(it.zygote)
        it.keeper.kill()
    with pytest.raises(aiogpu.AiogpuError):
        await it.handle
    if not has_cgroup:
        it.daemon.kill()
    await it.see_end(it.daemon)


DRIVER = """
    import asyncio, sys, aiogpu
    from aiogpu.linux.cgroup import Place
    from aiogpu.runtime import node_cgroup
    from tests.contract import tasks
    if sys.argv[2] == "without":
        node_cgroup.find_cgroup = lambda: Place(None, "a test")
    async def main():
        async with aiogpu.init(num_cpus=4, num_gpus=1):
            first = tasks.leave_daemon_and_wait.options(num_gpus=1).remote(sys.argv[1])
            second = tasks.gated.remote(sys.argv[1], "second")
            await first
    aiogpu.run(main())
"""

LATE = "driver, and later the zygote"
FIRST: dict[str, Callable[[House], object]] = {
    "driver": bool,
    "driver and keeper": lambda it: it.keeper.kill(),
    "driver and zygote": lambda it: it.zygote.kill(),
    # So it is where it was killed in time but has no CPU to end on.
    LATE: lambda it: it.zygote.suspend(),
}


@pytest.mark.parametrize("who", FIRST)
async def test_a_killed_driver_leaves_nothing(
    who: str, has_cgroup: bool, gate: Gate
) -> None:
    # Others may have left some long ago, whose driver had the same process id.
    others = all_groups()
    driver = start(DRIVER, gate.path, "with" if has_cgroup else "without")
    try:
        await gate.entered("daemon", "task", "second")
        it = House(gate, asyncio.sleep(0, ""))
        everyone = psutil.Process(driver.pid).children(recursive=True)
        assert {it.daemon, it.worker, it.keeper, it.zygote} <= set(everyone)
        assert len({*groups_of(driver.pid)} - others) == has_cgroup
        keepers = it.zygote.children()
        FIRST[who](it)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    async with asyncio.timeout(60):
        if who == LATE:
            while any(map(is_alive, keepers)):
                await asyncio.sleep(0)
            it.zygote.kill()
        while any(map(is_alive, everyone)):
            await asyncio.sleep(0)
        # The last of them has them removed just before it ends.
    assert {*groups_of(driver.pid)} <= others
    await it.handle


# What is stopped: by SIGSTOP, a debugger, or the freezer of its cgroup


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is stopped is given up after a tenth of the seconds that it has elsewhere."""
    monkeypatch.setattr(pool, "END_LIMIT", pool.END_LIMIT / 10)
    monkeypatch.setattr(pool, "CLOSE_LIMIT", pool.CLOSE_LIMIT / 10)
    monkeypatch.setattr(node_cgroup, "LIMIT", node_cgroup.LIMIT / 10)


def stop_keeper(worker: psutil.Process) -> None:
    keeper = worker.parent()
    assert keeper is not None
    keeper.suspend()


def stop_keeper_and_zygote(worker: psutil.Process) -> None:
    keeper = worker.parent()
    assert keeper is not None
    zygote = keeper.parent()
    assert zygote is not None
    keeper.suspend()
    zygote.suspend()


def freeze_slot(worker: psutil.Process) -> None:
    """Its keeper, itself and all that it has started."""
    assert PLACE.directory is not None
    (node,) = groups_of(psutil.Process().pid)
    (group,) = (
        procs.parent
        for procs in Path(PLACE.directory, node).glob("*/cgroup.procs")
        if str(worker.pid) in procs.read_text().split()
    )
    (group / "cgroup.freeze").write_text("1")


WAYS = [stop_keeper, pytest.param(freeze_slot, marks=needs_cgroup)]
Stop = Callable[[psutil.Process], None]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("stop", WAYS)
async def test_the_gpu_of_a_task_that_is_cancelled(stop: Stop, gate: Gate) -> None:
    """It is free when all that the task has started is gone, and not for ever taken."""
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.1):
        task = tasks.leave_daemon_and_wait.options(num_gpus=1, max_retries=0)
        handle = task.remote(gate.path)
        await gate.entered("daemon", "task")
        daemon = psutil.Process(gate.pids["daemon"])
        stop(psutil.Process(gate.pids["task"]))
        handle.cancel()
        async with asyncio.timeout(60):
            assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert not is_alive(daemon)


@pytest.mark.usefixtures("soon")
async def test_the_gpu_of_a_task_that_has_ended(gate: Gate) -> None:
    """The worker leaves by itself then, and its keeper is the one to say so."""
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        handle = tasks.gated.options(num_gpus=1).remote(gate.path, "in")
        await gate.entered("in")
        stop_keeper(psutil.Process(gate.pids["in"]))
        gate.release("in")
        assert await handle == "in"
        async with asyncio.timeout(60):
            assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.usefixtures("soon")
async def test_its_zygote_is_stopped_as_well(gate: Gate) -> None:
    """Nobody is left to say that the worker has ended; its group is empty."""
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.1):
        # The CPU worker serves afterwards: a stopped zygote starts no other.
        assert await tasks.add.remote(1) == 2
        handle = tasks.gated.options(num_gpus=1, max_retries=0).remote(gate.path, "in")
        await gate.entered("in")
        stop_keeper_and_zygote(psutil.Process(gate.pids["in"]))
        handle.cancel()
        async with asyncio.timeout(60):
            while (await aiogpu.available_resources())["GPU"] != 1:
                await tasks.add.remote(1)


@pytest.mark.parametrize("limits", ["soon", pytest.param("", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [*WAYS, stop_keeper_and_zygote])
async def test_closing(
    stop: Stop, limits: str, request: pytest.FixtureRequest, gate: Gate
) -> None:
    """It once took 13 seconds; with a zygote that was stopped as well, 18."""
    if limits:
        request.getfixturevalue(limits)
    node = await aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.1)
    handle = tasks.gated.options(num_gpus=1, max_retries=0).remote(gate.path, "in")
    await gate.entered("in")
    stop(psutil.Process(gate.pids["in"]))
    async with asyncio.timeout(11):
        await node.shutdown()
    with pytest.raises((aiogpu.AiogpuError, asyncio.CancelledError)):
        await handle


async def test_a_daemon_of_a_cpu_task_ends_with_its_node(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        leaving = wild_tasks.leave.options(num_gpus=0).remote("daemon", gate.path)
        await gate.entered("daemon", "left")
        gate.release("left")
        await leaving
    assert not os.path.exists(f"/proc/{gate.pids['daemon']}")


# [B38] Functions that do as they please with their process: each on its own handle


@asynccontextmanager
async def and_neighbour() -> AsyncIterator[aiogpu.types.Node]:
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
    async with and_neighbour():
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
    async with and_neighbour():
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
    async with and_neighbour():
        for _ in range(3):
            assert await tasks.add.remote(1) == 2


async def test_a_lowered_limit_is_the_workers_own() -> None:
    """The worker keeps it; a task that wants none of that has one of its own."""
    async with and_neighbour():
        isolated = wild_tasks.lower_limit.options(num_gpus=1)
        await isolated.remote("RLIMIT_NOFILE", 3)
        with pytest.raises(aiogpu.WorkerDiedError, match="SIGXCPU"):
            await wild_tasks.compute_beyond.remote(1)
        with pytest.raises(MemoryError):
            await wild_tasks.allocate_beyond.options(num_gpus=1).remote(1 << 30)
        await wild_tasks.lower_limit.remote("RLIMIT_FSIZE", 0)
        assert await tasks.add.remote(1) == 2


async def test_a_child_that_comes_back_from_a_coroutine_or_a_thread() -> None:
    async with and_neighbour():
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
