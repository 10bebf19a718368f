"""What the owner of a task is told of its worker's end: from real ends of all kinds."""

from __future__ import annotations

import bdb
import os
import pdb
import signal
from pathlib import Path

import psutil
import pytest

import aiogpu
from aiogpu.linux.cgroup import find_hierarchy
from tests.contract import tasks
from tests.contract.actor_classes import Counter
from tests.support.gate import Gate
from tests.support.program import run

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGSEGV, "segfault"),
        (signal.SIGBUS, "bus error"),
        (signal.SIGFPE, "arithmetic error"),
        (signal.SIGILL, "illegal instruction"),
        (signal.SIGABRT, "abort"),
        (signal.SIGKILL, "killed"),
        (signal.SIGUSR1, "signal"),
    ],
)
async def test_a_signal(number: signal.Signals, cause: str) -> None:
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(aiogpu.WorkerDiedError, match=number.name) as caught:
            await tasks.kill_self.remote(number)
        assert (caught.value.cause, caught.value.signal) == (cause, number)
        assert await tasks.add.remote(1) == 2


async def test_an_exit_and_its_last_words() -> None:
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(aiogpu.WorkerDiedError, match="last words") as caught:
            await tasks.exit_at_once.remote(0)
        assert (caught.value.cause, caught.value.exitcode) == ("exit", 0)


@aiogpu.remote
def debug(how: str) -> None:
    breakpoint() if how == "breakpoint" else pdb.set_trace()


@aiogpu.remote
class Debugged:
    def debug(self) -> None:
        breakpoint()


async def test_a_debugger_in_a_worker_says_where_there_is_a_terminal() -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        chunks = debug.map(["breakpoint"], chunk=1)
        for fails in (
            debug.remote("breakpoint"),
            debug.remote("set_trace"),
            anext(aiter(chunks)),
            Debugged.remote().debug.remote(),
        ):
            with pytest.raises(bdb.BdbQuit, match=r"no terminal.*address='inline'"):
                await fails


async def test_a_connection_that_the_task_closes() -> None:
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(aiogpu.WorkerDiedError, match="closerange") as caught:
            await tasks.close_all_descriptors.remote()
        assert caught.value.cause == "disconnected"
        assert await tasks.add.remote(1) == 2


async def test_a_keeper_that_dies(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        running = tasks.gated.options(max_retries=0).remote(gate.path, "a")
        await gate.entered("a")
        keeper = psutil.Process(gate.pids["a"]).parent()
        assert keeper is not None
        keeper.kill()
        with pytest.raises(aiogpu.WorkerDiedError) as caught:
            await running
        assert caught.value.cause == "keeper died"


async def test_the_first_cause_of_a_death_stands(gate: Gate) -> None:
    """The node ends a process; what happens before its keeper reports it is no cause.

    Here its connection ends meanwhile, for which the node would end it as well.
    """
    async with aiogpu.init(num_cpus=2):
        actor = Counter.remote()
        busy = actor.gated.remote(gate.path, "busy")
        await gate.entered("busy")
        worker = psutil.Process(gate.pids["busy"])
        keeper = worker.parent()
        assert keeper is not None
        keeper.suspend()
        aiogpu.kill(actor, no_restart=False)
        worker.kill()
        # The node ends a process 0.1 s after its connection: a timer that rings later.
        with pytest.raises(aiogpu.TaskTimeoutError):
            await tasks.gated.options(timeout=0.3).remote(gate.path, "timer")
        keeper.resume()
        with pytest.raises(aiogpu.ActorDiedError, match="it was killed"):
            await busy
        with pytest.raises(aiogpu.ActorDiedError) as caught:
            await actor.add.remote()
    died = caught.value.__cause__
    assert isinstance(died, aiogpu.WorkerDiedError)
    assert (died.cause, died.signal) == ("ended", signal.SIGKILL)


async def test_workers_alone_offer_themselves_to_the_kernel(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
        worker = psutil.Process(gate.pids["a"])
        others = worker.parents()[:2]
        driver = score_of(os.getpid())
        assert score_of(worker.pid) == 1000
        assert [score_of(process.pid) for process in others] == [driver] * 2
        gate.release("a")
        await running


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


LIMITED = """
    import asyncio, sys, threading
    import aiogpu

    with open(f"{sys.argv[1]}/cgroup.procs", "w") as file:
        file.write("0")

    def used(group):
        with open(f"{group}/memory.stat") as file:
            stat = dict(line.split() for line in file)
        return int(stat["total_rss"]) + int(stat["total_shmem"])

    @aiogpu.remote(max_retries=0)
    def devour(group, at_most):
        kept = []
        while used(group) < at_most:
            kept.append(b"x" * (1 << 22))
        threading.Event().wait()

    @aiogpu.remote
    def add(a, b):
        return a + b

    async def main():
        ours = b"x" * (200 << 20)
        is_guarded = sys.argv[2] == "guarded"
        # With a guard it stops short of the limit, however late the guard looks.
        at_most = (390 if is_guarded else 1000) << 20
        async with aiogpu.init(num_cpus=2, memory_guard=is_guarded):
            try:
                await devour.remote(sys.argv[1], at_most)
            except aiogpu.WorkerDiedError as error:
                print(error.cause, error.signal, error)
            print(await add.remote(1, len(ours) >> 20))
    aiogpu.run(main())
"""


def memory_group() -> Path:
    """A place for a group with a limit; skips where none can be made."""
    hierarchy = find_hierarchy("memory")
    if hierarchy is None:
        pytest.skip("the memory controller of cgroups of version 1 is not mounted")
    group = Path(hierarchy.own, f"test-aiogpu-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    return group


def run_limited(guard: str) -> tuple[str, str]:
    """What a program says in which a task fills 400 MiB: at first, and at last."""
    group = memory_group()
    try:
        (group / "memory.limit_in_bytes").write_text(str(400 << 20))
        out = run(LIMITED, str(group), guard)
    finally:
        while (group / "cgroup.procs").read_text():
            os.sched_yield()
        group.rmdir()
    lines = out.splitlines()
    return lines[0], lines[-1]


def test_the_kernels_out_of_memory_killer_takes_the_worker() -> None:
    """Though the driver itself has more memory at first."""
    first, second = run_limited("unguarded")
    assert first.startswith("out of memory 9 the worker that ran devour"), first
    assert "the kernel ended it because memory ran out" in first
    assert second == "201"


def test_the_guard_comes_before_the_kernel() -> None:
    first, second = run_limited("guarded")
    assert first.startswith("out of memory 9 devour (pid"), first
    assert "it asked for none (memory=)" in first
    assert second == "201"
