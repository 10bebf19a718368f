"""No process outlives its lease or its node.

Tasks leave processes behind, keepers and zygotes are killed or stopped, and the driver
dies; with cgroups beside the keepers, and without them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu.errors import NodeClosedError
from aiogpu.linux.cgroup import ParentCgroup
from aiogpu.runtime import node_cgroup
from aiogpu.runtime.workers import pool, remains
from tests.contract import phase_tasks, tasks, wild_tasks
from tests.support.cgroups import PLACE, all_groups, groups_of, needs_cgroup
from tests.support.gate import Gate
from tests.support.program import start
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def is_alive(process: psutil.Process) -> bool:
    """Tell if a process has not ended; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def parent_of(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


# Processes that a task leaves behind


@pytest.mark.parametrize("way", wild_tasks.WAYS)
async def test_no_process_outlives_its_tasks_share(way: str, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1) as session:
        scheduler = session._session._engine._open_driver.scheduler  # type: ignore[attr-defined]
        # In some cases the worker ends only when it is killed.
        scheduler.config = scheduler.config._replace(exit_grace=0.3)
        handle = wild_tasks.leave.remote(way, gate.path)
        await gate.entered("left")
        worker = psutil.Process(gate.pids["left"])
        family = parent_of(worker).children(recursive=True)
        gate.release("left")
        assert {worker.pid, *await handle} <= {process.pid for process in family}
        # There is one GPU: this task has it when the first task's share is free.
        successor = await tasks.pid.options(num_gpus=1).remote()
        assert not any(map(is_alive, family))
        assert successor != worker.pid
        assert await tasks.add.remote(1) == 2


async def test_a_task_that_ignores_signals_is_killed(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.05):
        handle = wild_tasks.never_return_deaf.remote(gate.path)
        await gate.entered("daemon", "deaf")
        family = [psutil.Process(pid) for pid in gate.pids.values()]
        handle.cancel()
        assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert not any(map(is_alive, family))


async def test_an_orphaned_keepers_group_ends_with_it(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        handle = tasks.start_sleeper.options(max_retries=0).remote(gate.path, "a")
        await gate.entered("a")
        worker = psutil.Process(gate.pids["a"])
        keeper = parent_of(worker)
        zygote = parent_of(keeper)
        (sleeper,) = worker.children()
        zygote.kill()
        await until(lambda: not is_alive(zygote))
        keeper.kill()
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await handle
        await until(lambda: not is_alive(sleeper))
        assert await tasks.add.remote(1) == 2


# Keepers, zygotes and drivers are killed while a task runs that has left a daemon


@pytest.fixture(params=["with cgroup2", "without"])
def has_cgroup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "without":
        monkeypatch.setattr(
            node_cgroup, "find_cgroup", lambda: ParentCgroup(None, "a test")
        )
        return False
    if PLACE.directory is None:
        pytest.skip(PLACE.reason)
    return True


class Family:
    """The processes of a task that has left a daemon and runs on."""

    def __init__(self, gate: Gate, handle: Any = None) -> None:
        self.handle = handle
        self.daemon = psutil.Process(gate.pids["daemon"])
        self.worker = psutil.Process(gate.pids["task"])
        self.keeper = parent_of(self.worker)
        self.zygote = parent_of(self.keeper)


async def until_ended(process: psutil.Process) -> None:
    await until(lambda: not is_alive(process))


@asynccontextmanager
async def leaving_a_daemon(gate: Gate, **options: Any) -> AsyncIterator[Family]:
    """Open a node with a task that leaves a daemon and waits at the gate."""
    async with aiogpu.init(num_cpus=2, num_gpus=1, **options):
        task = tasks.leave_daemon_and_wait.options(num_gpus=1, max_retries=0)
        handle = task.remote(gate.path)
        await gate.entered("daemon", "task")
        yield Family(gate, handle)


async def test_a_worker_starts_in_its_cgroup(has_cgroup: bool, gate: Gate) -> None:
    async with leaving_a_daemon(gate) as family:
        (group,) = {
            group_of(process.pid)
            for process in (family.daemon, family.worker, family.keeper)
        }
        names = groups_of(os.getpid())
        if has_cgroup:
            assert [name in group for name in names] == [True]
            assert group.endswith("/0")
            assert group_of(family.zygote.pid) == group_of(os.getpid())
        else:
            assert (names, group) == ([], group_of(os.getpid()))
        gate.release("task")
        await family.handle


def group_of(pid: int) -> str:
    """Return the line of a process's cgroup of version 2, or nothing."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next((line for line in lines if line.startswith("0::")), "")


@pytest.mark.usefixtures("has_cgroup")
async def test_a_daemon_ends_before_its_share_is_free(gate: Gate) -> None:
    async with leaving_a_daemon(gate) as family:
        gate.release("task")
        await family.handle
        assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert not is_alive(family.daemon)


@pytest.mark.usefixtures("has_cgroup")
async def test_a_killed_keeper_takes_its_processes_along(gate: Gate) -> None:
    async with leaving_a_daemon(gate) as family:
        family.keeper.kill()
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await family.handle
        assert not is_alive(family.daemon)
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("first", ["zygote", "keeper"])
async def test_a_cgroup_ends_a_daemon_without_zygote_and_keeper(
    first: str, has_cgroup: bool, gate: Gate
) -> None:
    """Without a cgroup the daemon lives on: no keeper adopts it."""
    async with leaving_a_daemon(gate) as family:
        if first == "zygote":
            family.zygote.kill()
            await until_ended(family.zygote)
            family.keeper.kill()
        else:
            family.zygote.suspend()
            family.keeper.kill()
            await until_ended(family.keeper)
            family.zygote.kill()
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await family.handle
        if has_cgroup:
            assert not is_alive(family.daemon)
        else:
            # See design/decisions/0015-cgroups-back-up-keepers.md.
            assert is_alive(family.daemon)
            family.daemon.kill()
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_a_node_closes_while_a_slot_ends(has_cgroup: bool, gate: Gate) -> None:
    async with leaving_a_daemon(gate) as family:
        family.zygote.kill()
        await until_ended(family.zygote)
        family.keeper.kill()
    with pytest.raises(aiogpu.AiogpuError):
        await family.handle
    if not has_cgroup:
        family.daemon.kill()
    await until_ended(family.daemon)


DRIVER = """
    import asyncio, sys, aiogpu
    from aiogpu.linux.cgroup import ParentCgroup
    from aiogpu.runtime import node_cgroup
    from tests.contract import tasks
    if sys.argv[2] == "without":
        node_cgroup.find_cgroup = lambda: ParentCgroup(None, "a test")
    async def main():
        async with aiogpu.init(num_cpus=4, num_gpus=1):
            first = tasks.leave_daemon_and_wait.options(num_gpus=1).remote(sys.argv[1])
            second = tasks.gated.remote(sys.argv[1], "second")
            await first
    aiogpu.run(main())
"""

LATE = "driver, and later the zygote"
FIRST: dict[str, Callable[[Family], object]] = {
    "driver": bool,
    "driver and keeper": lambda family: family.keeper.kill(),
    "driver and zygote": lambda family: family.zygote.kill(),
    # As if the zygote was killed in time but has no CPU to end on.
    LATE: lambda family: family.zygote.suspend(),
}


@pytest.mark.parametrize("killed", FIRST)
async def test_killed_drivers_leave_no_process(
    killed: str, has_cgroup: bool, gate: Gate
) -> None:
    # An old driver with the same process id may have left groups.
    others = all_groups()
    driver = start(DRIVER, gate.path, "with" if has_cgroup else "without")
    try:
        await gate.entered("daemon", "task", "second")
        family = Family(gate)
        children = psutil.Process(driver.pid).children(recursive=True)
        processes = {family.daemon, family.worker, family.keeper, family.zygote}
        assert processes <= set(children)
        assert len({*groups_of(driver.pid)} - others) == has_cgroup
        keepers = family.zygote.children()
        FIRST[killed](family)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    if killed == LATE:
        await until(lambda: not any(map(is_alive, keepers)))
        family.zygote.kill()
    await until(lambda: not any(map(is_alive, children)))
    # The last process removes the groups just before it ends.
    assert {*groups_of(driver.pid)} <= others


# Processes are stopped by SIGSTOP, a debugger, or the freezer of their cgroup


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node give up stopped processes after a tenth of the usual time."""
    monkeypatch.setattr(pool, "END_LIMIT", pool.END_LIMIT / 10)
    monkeypatch.setattr(pool, "CLOSE_LIMIT", pool.CLOSE_LIMIT / 10)
    monkeypatch.setattr(node_cgroup, "LIMIT", node_cgroup.LIMIT / 10)
    monkeypatch.setattr(remains, "LIMIT", remains.LIMIT / 10)


def stop_keeper(worker: psutil.Process) -> None:
    parent_of(worker).suspend()


def stop_keeper_and_zygote(worker: psutil.Process) -> None:
    for process in worker.parents()[:2]:
        process.suspend()


def freeze_slot(worker: psutil.Process) -> None:
    """Freeze the worker, its keeper, and all that it has started."""
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
async def test_a_stopped_keeper_holds_no_cancelled_tasks_gpu(
    stop: Stop, gate: Gate
) -> None:
    """The GPU is free when all that the task has started is gone."""
    async with asyncio.timeout(60), leaving_a_daemon(gate, cancel_grace=0.1) as family:
        stop(family.worker)
        family.handle.cancel()
        assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert not is_alive(family.daemon)


@pytest.mark.usefixtures("soon")
async def test_a_stopped_keeper_does_not_hold_an_ended_tasks_gpu(gate: Gate) -> None:
    """The worker ends by itself, and only its keeper could say so."""
    async with asyncio.timeout(60), aiogpu.init(num_cpus=2, num_gpus=1):
        handle = tasks.gated.options(num_gpus=1).remote(gate.path, "in")
        await gate.entered("in")
        stop_keeper(psutil.Process(gate.pids["in"]))
        gate.release("in")
        assert await handle == "in"
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.usefixtures("soon")
async def test_stopped_keeper_and_zygote_do_not_hold_the_gpu(gate: Gate) -> None:
    """No process can say that the worker has ended, but its cgroup is empty."""
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
async def test_a_node_closes_with_stopped_processes(
    stop: Stop, limits: str, request: pytest.FixtureRequest, gate: Gate
) -> None:
    """A close once took 13 seconds, or 18 with a stopped zygote."""
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


# Tasks that change their process


@asynccontextmanager
async def node_with_neighbour() -> AsyncIterator[None]:
    """Open a node with a worker on a GPU, and check that this worker is unharmed."""
    async with aiogpu.init(num_cpus=1, num_gpus=2, cancel_grace=20) as session:
        neighbour = tasks.clock.options(num_cpus=0, num_gpus=1, max_calls=0)
        before = await neighbour.remote()
        yield
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
    (wild_tasks.set_timers, ()),
    (wild_tasks.block_signals, ()),
    (wild_tasks.set_variable, ()),
    (wild_tasks.change_settings, ()),
]


async def test_the_next_task_finds_the_process_state_restored(
    gate: Gate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The next tasks also have their output shown, and can be interrupted."""
    async with node_with_neighbour():
        before = await wild_tasks.task_state.remote()
        gone = wild_tasks.change_to_a_removed_directory
        for task, args in [*SPOILING, (gone, (str(tmp_path / "gone"),))]:
            await task.remote(*args)
            assert await wild_tasks.task_state.remote() == before, task
            await tasks.output.remote(["a line"])
            assert "a line" in capsys.readouterr().out
            # The cancel works within the grace, or this test ends too late.
            handle = tasks.spin.remote(gate.path, "in")
            await gate.entered("in")
            handle.cancel()
            assert await tasks.pid.remote() == before["pid"]
            gate.forget("in")


async def test_a_generators_context_variables_do_not_reach_the_next_task() -> None:
    async with node_with_neighbour():
        before = await wild_tasks.task_state.remote()
        assert [n async for n in wild_tasks.set_variable_amid_items.remote()] == [1]
        assert await wild_tasks.task_state.remote() == before


async def test_the_next_task_finds_its_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New variables stay, since libraries rely on them."""
    monkeypatch.setenv("LOGNAME_OF_TEST", "a")
    monkeypatch.setenv("OTHER_OF_TEST", "b")
    names = "PATH", "HOME", "LOGNAME_OF_TEST", "OTHER_OF_TEST"
    async with node_with_neighbour():
        before = await tasks.environment.remote(*names)
        assert before["OTHER_OF_TEST"] == "b"
        await wild_tasks.change_variables.remote()
        assert await tasks.environment.remote(*names) == before


async def test_a_program_whose_directory_was_removed_runs_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    async with node_with_neighbour():
        for _ in range(3):
            assert await tasks.add.remote(1) == 2


async def test_a_lowered_limit_affects_only_its_worker() -> None:
    """A worker keeps its lowered limits; an isolated task has a worker of its own."""
    async with node_with_neighbour():
        isolated = wild_tasks.lower_limit.options(num_gpus=1)
        await isolated.remote("RLIMIT_NOFILE", 3)
        with pytest.raises(aiogpu.WorkerDiedError, match="SIGXCPU"):
            await wild_tasks.compute_beyond.remote(1)
        with pytest.raises(MemoryError):
            await wild_tasks.allocate_beyond.options(num_gpus=1).remote(1 << 30)
        await wild_tasks.lower_limit.remote("RLIMIT_FSIZE", 0)
        assert await tasks.add.remote(1) == 2


async def test_a_fork_of_a_coroutine_or_thread_gives_no_result() -> None:
    async with node_with_neighbour():
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
def test_endless_output_costs_the_driver_no_memory(megabytes: int, how: str) -> None:
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
    growth = program.stderr.read()
    reader.join()
    assert program.wait(timeout=60) == 0, growth
    program.stdout.close()
    program.stderr.close()
    # Each line carries its worker's name as well.
    assert received > (megabytes + 2) * 1_000_000
    assert int(growth) < 24 * 1024, "kilobytes"


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
def test_cancel_works_if_the_driver_ignores_sigint(how: str) -> None:
    """Shells start background processes in this way."""
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


async def test_tasks_that_never_return_hold_up_no_other(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=3, cancel_grace=0.2):
        endless = [
            phase_tasks.swallowing.remote(gate.path, name, "/dev/null") for name in "ab"
        ]
        await gate.entered("a", "b")
        assert await asyncio.gather(*(map(tasks.add.remote, range(50)))) == [
            *range(1, 51)
        ]
    ends = await asyncio.gather(*endless, return_exceptions=True)
    assert {type(end) for end in ends} == {NodeClosedError}
    assert not any(psutil.pid_exists(pid) for pid in gate.pids.values())
