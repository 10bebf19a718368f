"""[B38] What the owner of a task is told of its worker's end, and who notices it.

The ends are real ones of all kinds.
"""

from __future__ import annotations

import asyncio
import bdb
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu.linux.cgroup import find_hierarchy
from aiogpu.linux.procfs import MemoryBounds, Usage
from aiogpu.runtime.actors.registry import SPOILT
from tests.contract import served, tasks, wild_tasks
from tests.contract.actor_classes import Counter
from tests.contract.backlog_tasks import fill
from tests.contract.let_go_tasks import Fragile
from tests.contract.wild_tasks import Crowd, Debugged, break_context, debug
from tests.support.gate import Gate
from tests.support.program import run
from tests.support.until import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

ENDS: list[tuple[Any, tuple[Any, ...], str, str]] = [
    *(
        (tasks.kill_self, (number,), number.name, cause)
        for number, cause in (
            (signal.SIGSEGV, "segfault"),
            (signal.SIGBUS, "bus error"),
            (signal.SIGFPE, "arithmetic error"),
            (signal.SIGILL, "illegal instruction"),
            (signal.SIGABRT, "abort"),
            (signal.SIGKILL, "killed"),
            (signal.SIGUSR1, "signal"),
        )
    ),
    (tasks.exit_at_once, (0,), "last words", "exit"),
    (tasks.close_all_descriptors, (), "closerange", "disconnected"),
    (wild_tasks.become, ("true",), "exited with code 0", "exit"),
    (wild_tasks.become, ("sh", "-c", "kill -USR1 $$"), "SIGUSR1", "signal"),
    (wild_tasks.become, ("sleep", "1000"), "closed its connection", "disconnected"),
    (wild_tasks.close_all_and_return, (), "exited with code 1", "exit"),
    (wild_tasks.kill_group, (), "SIGKILL", "killed"),
    (wild_tasks.kill_keeper, (), "keeper", "keeper died"),
]


@pytest.mark.parametrize("num_gpus", [0, 1])
async def test_each_end_is_told_on_its_own_handle(num_gpus: int) -> None:
    """And its neighbour does not notice."""
    async with aiogpu.init(num_cpus=1, num_gpus=2, log_to_driver=False):
        neighbour = tasks.clock.options(num_cpus=0, num_gpus=1, max_calls=0)
        before = await neighbour.remote()
        for task, args, told, cause in ENDS:
            with pytest.raises(aiogpu.WorkerDiedError, match=told) as caught:
                await task.options(num_gpus=num_gpus).remote(*args)
            died = caught.value
            assert died.cause == cause
            assert task.__name__ in str(died)
            assert not os.path.exists(f"/proc/{died.pid}")
            assert await tasks.add.options(num_gpus=num_gpus).remote(1) == 2
        assert await neighbour.remote() > before


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


# What it said before it died is heard, though its end is known first.

MANY = 2_000
"""Answers; the loop hears of the death before it has passed on all of them."""


@pytest.mark.whole
@pytest.mark.parametrize("is_written_to", [False, True])
async def test_a_worker_is_gone_when_its_connection_is_read_to_the_end(
    is_written_to: bool, gate: Gate, tmp_path: Path
) -> None:
    """A write to it after its death has asyncio give up the connection, unread."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with asyncio.timeout(60), aiogpu.init(num_cpus=1, log_to_driver=False):
        crowd = Crowd.remote()
        answers = [crowd.answer.remote(number) for number in range(MANY)]
        last = crowd.answer_all_and_die.remote(gate.path, str(fifo))
        await gate.entered("ready")
        ended = os.pidfd_open(gate.pids["ready"])
        # The loop stands still from here on, until the process has ended.
        fifo.write_bytes(b".")
        served._wait(ended)
        late = [crowd.answer.remote(MANY)] if is_written_to else []
        assert await asyncio.gather(*answers) == [*range(MANY)]
        for lost in (last, *late):
            with pytest.raises(aiogpu.ActorDiedError):
                await lost


# A GPU context that is broken for good ends its worker, also where it is reused.

STICKY = "CUDA error: an illegal memory access was encountered"


async def test_the_next_task_has_another_process() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        pid = tasks.pid.options(num_gpus=0.5, max_calls=0)
        first = await pid.remote()
        assert await pid.remote() == first
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            await break_context.remote(STICKY)
        assert caught.value.args[1] == first
        assert any(f"pid {first}" in note for note in caught.value.__notes__)
        assert await pid.remote() != first
        assert (await aiogpu.available_resources())["GPU"] == 1.0


async def test_other_errors_cost_no_worker() -> None:
    """One that does not stick, and the same text where there is no GPU."""
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for text, num_gpus in (
            ("CUDA error: invalid configuration argument", 0.5),
            (STICKY, 0),
        ):
            task = break_context.options(num_gpus=num_gpus)
            with pytest.raises(RuntimeError) as caught:
                await task.remote(text)
            assert not hasattr(caught.value, "__notes__")
            pid = tasks.pid.options(num_gpus=num_gpus, max_calls=0)
            assert await pid.remote() == caught.value.args[1]


async def test_what_stood_behind_it_runs_once_and_elsewhere() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        await asyncio.gather(
            *(break_context.remote("x") for _ in range(50)), return_exceptions=True
        )
        calls = [
            break_context.remote(STICKY if number % 10 == 0 else "harmless")
            for number in range(100)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {RuntimeError}
        pids = [outcome.args[1] for outcome in outcomes]  # type: ignore[union-attr]
        broken = [pids[number] for number in range(0, 100, 10)]
        assert len(set(broken)) == 10, "each broke a worker of its own"


async def test_it_is_tried_again_in_another_process() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        task = break_context.options(retry_exceptions=True, max_retries=1)
        before = await tasks.pid.options(num_gpus=0.5, max_calls=0).remote()
        with pytest.raises(RuntimeError) as caught:
            await task.remote(STICKY)
        assert caught.value.args[1] != before


async def test_of_an_actor_that_crashes_for_it_the_successor_lives() -> None:
    loop = asyncio.get_running_loop()
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        actor = await Fragile.remote()
        broken, crashed = actor.break_context.remote(), actor.crash.remote()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await broken
        with pytest.raises(aiogpu.ActorDiedError, match="exited with code 3"):
            await crashed
        successor, seen_until = await actor.pid.remote(), loop.time() + 2 * SPOILT
        await until(lambda: loop.time() > seen_until)
        assert await actor.pid.remote() == successor


# Host memory: `memory=` is shared out like all else, and guarded where it is used


MIB = 1 << 20
LIMIT = 200 * MIB


async def test_those_who_ask_for_memory_share_it(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=4, memory="1GiB"):
        task = tasks.gated.options(memory="600MiB")
        first, second = task.remote(gate.path, "a"), task.remote(gate.path, "b")
        await gate.entered("a")
        why = str(await second.why())
        assert "memory 600MiB: 424MiB of 1GiB free" in why
        assert "600MiB: held by gated" in why
        assert "memory" in str(await aiogpu.status())
        other = tasks.gated.options(memory=424 * MIB).remote(gate.path, "c")
        await gate.entered("c")
        gate.release("a", "c")
        await gate.entered("b")
        gate.release("b")
        assert await asyncio.gather(first, second, other) == ["a", "b", "c"]


async def test_more_than_there_is_is_refused() -> None:
    async with aiogpu.init(num_cpus=1, memory="1GiB"):
        with pytest.raises(aiogpu.InfeasibleError, match="memory 2GiB of 1GiB"):
            tasks.add.options(memory="2GiB").remote(1)


async def test_without_a_word_there_is_what_is_safe() -> None:
    async with aiogpu.init(num_cpus=1):
        found = (await aiogpu.cluster_resources())["memory"]
        assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def used_by_workers(bounds: MemoryBounds) -> Usage:
    """As if there were little memory, and workers alone used it."""
    below = psutil.Process().children(recursive=True)
    pids = [one.pid for one in below if one.name().startswith("aiogpu-work")]
    return Usage("a test", bounds.used_by(pids), LIMIT)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers together may use no more than `LIMIT`."""
    monkeypatch.setattr(MemoryBounds, "tightest", used_by_workers)


@pytest.mark.usefixtures("scarce")
async def test_of_two_that_do_not_fit_one_goes_and_is_tried_alone(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        handles = {
            name: fill.options(num_gpus=0.5).remote(gate.path, name, 125)
            for name in "ab"
        }
        states: dict[str, str] = {}
        async with asyncio.timeout(60):
            while "delayed" not in states.values():
                await asyncio.sleep(0)
                states = {n: (await h.why()).state for n, h in handles.items()}
        (ended,) = (name for name, state in states.items() if state == "delayed")
        (other,) = set("ab") - {ended}
        await gate.entered(other)
        if ended in gate.inside:
            gate.forget(ended)
        late = tasks.add.remote(1)
        assert "run alone" in str(await late.why())
        gate.release(other)
        assert await handles[other] == 125
        await gate.entered(ended)
        assert not late.done()
        gate.release(ended)
        assert await handles[ended] == 125
        assert await late == 2


@pytest.mark.usefixtures("scarce")
async def test_what_does_not_fit_alone_is_an_error(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        task = fill.options(memory="50MiB", name="glutton")
        with pytest.raises(aiogpu.OutOfMemoryError, match="glutton") as caught:
            await task.remote(gate.path, "a", 300)
        error = caught.value
        assert isinstance(error, MemoryError)
        assert error.cause == "out of memory"
        assert (error.asked, error.limit) == (50 * MIB, int(LIMIT * 0.95))
        assert error.used > error.limit - 50 * MIB
        assert await tasks.add.remote(1) == 2


@pytest.mark.usefixtures("scarce")
async def test_what_must_not_be_tried_twice_is_not(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        with pytest.raises(aiogpu.OutOfMemoryError):
            await fill.options(max_retries=0).remote(gate.path, "a", 300)


@pytest.mark.usefixtures("scarce")
async def test_the_guard_can_be_sent_home(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, memory_guard=False):
        handle = fill.remote(gate.path, "a", 225)
        await gate.entered("a")
        gate.release("a")
        assert await handle == 225
