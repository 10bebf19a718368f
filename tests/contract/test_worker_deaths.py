"""Deaths of workers: what callers are message, and what else is affected."""

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
from tests.contract.backlog_tasks import fill, keep_filled
from tests.contract.let_go_tasks import Fragile
from tests.contract.wild_tasks import Crowd, Debugged, break_context, set_trace
from tests.support.gate import Gate
from tests.support.program import run
from tests.support.waits import until

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
async def test_an_error_tells_how_the_worker_ended(num_gpus: int) -> None:
    """Another worker is not affected."""
    async with aiogpu.init(num_cpus=1, num_gpus=2, log_to_driver=False):
        neighbour = tasks.clock.options(num_cpus=0, num_gpus=1, max_calls=0)
        before = await neighbour.remote()
        for task, args, message, cause in ENDS:
            with pytest.raises(aiogpu.WorkerDiedError, match=message) as caught:
                await task.options(num_gpus=num_gpus).remote(*args)
            died = caught.value
            assert died.cause == cause
            assert task.__name__ in str(died)
            assert not os.path.exists(f"/proc/{died.pid}")
            assert await tasks.add.options(num_gpus=num_gpus).remote(1) == 2
        assert await neighbour.remote() > before


async def test_another_debugger_in_a_worker_raises() -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        chunks = set_trace.map([1], chunk=1)
        for fails in (
            set_trace.remote(),
            anext(aiter(chunks)),
            Debugged.remote().debug.remote(),
        ):
            with pytest.raises(bdb.BdbQuit, match=r"no terminal.*`breakpoint\(\)`"):
                await fails


async def test_the_next_task_runs_after_a_keeper_was_killed(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        for name in "abc":
            first = tasks.gated.remote(gate.path, name)
            await gate.entered(name)
            worker = psutil.Process(gate.pids[name])
            worker.parents()[0].kill()
            # Block the loop: the keeper's end and the zygote's message come together.
            psutil.wait_procs([worker], 60)
            first.cancel()
            assert await tasks.add.remote(1) == 2


async def test_the_first_cause_of_a_death_stands(gate: Gate) -> None:
    """The node ends a process; later events, before its keeper reports, are no cause.

    Here the connection ends meanwhile, for which the node would end the process, too.
    """
    async with aiogpu.init(num_cpus=2):
        actor = Counter.remote()
        busy = actor.gated.remote(gate.path, "busy")
        await gate.entered("busy")
        worker = psutil.Process(gate.pids["busy"])
        keeper = worker.parents()[0]
        keeper.suspend()
        aiogpu.kill(actor, no_restart=False)
        worker.kill()
        # The node ends a process 0.1 s after its connection; this timer fires later.
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


async def test_only_workers_have_the_highest_oom_score(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
        worker = psutil.Process(gate.pids["a"])
        scores = [
            int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
            for process in (psutil.Process(), worker, *worker.parents()[:2])
        ]
        assert scores[1:] == [1000, scores[0], scores[0]]
        gate.release("a")
        await running


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
        # With a guard the task stops below the limit, however late the guard looks.
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
    """Make a memory cgroup, or skip the test."""
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
    """Run a program whose task fills 400 MiB; return its first and last lines."""
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


def test_the_kernel_kills_the_worker_when_memory_runs_out() -> None:
    """The driver has more memory than the worker at first."""
    first, second = run_limited("unguarded")
    assert first.startswith("out of memory 9 the worker that ran devour"), first
    assert "the kernel ended it because memory ran out" in first
    assert second == "201"


def test_the_memory_guard_acts_before_the_kernel() -> None:
    first, second = run_limited("guarded")
    assert first.startswith("out of memory 9 devour (pid"), first
    assert "it asked for none (memory=)" in first
    assert second == "201"


# Messages sent before a death are read, though the node knows of the death first.

MANY = 2_000
"""Answers; the loop learns of the death before it has delivered all of them."""


@pytest.mark.whole
@pytest.mark.parametrize("is_written_to", [False, True])
async def test_answers_before_a_death_arrive(
    is_written_to: bool, gate: Gate, tmp_path: Path
) -> None:
    """After a write to a dead process, asyncio drops the connection unread."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with asyncio.timeout(60), aiogpu.init(num_cpus=1, log_to_driver=False):
        crowd = Crowd.remote()
        answers = [crowd.answer.remote(number) for number in range(MANY)]
        last = crowd.answer_all_and_die.remote(gate.path, str(fifo))
        await gate.entered("ready")
        ended = os.pidfd_open(gate.pids["ready"])
        # Block the loop until the process has ended.
        fifo.write_bytes(b".")
        served.wait_for_end(ended)
        late = [crowd.answer.remote(MANY)] if is_written_to else []
        assert await asyncio.gather(*answers) == [*range(MANY)]
        for lost in (last, *late):
            with pytest.raises(aiogpu.ActorDiedError):
                await lost


# A broken GPU context ends its worker, even a reused worker.

STICKY = "CUDA error: an illegal memory access was encountered"


async def test_a_sticky_cuda_error_ends_the_worker() -> None:
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


async def test_other_errors_do_not_end_the_worker() -> None:
    """Neither does an error that is not sticky, nor a sticky text without a GPU."""
    harmless = "CUDA error: invalid configuration argument"
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for text, num_gpus in ((harmless, 0.5), (STICKY, 0)):
            task = break_context.options(num_gpus=num_gpus)
            with pytest.raises(RuntimeError) as caught:
                await task.remote(text)
            assert not hasattr(caught.value, "__notes__")
            pid = tasks.pid.options(num_gpus=num_gpus, max_calls=0)
            assert await pid.remote() == caught.value.args[1]


async def test_tasks_behind_a_sticky_cuda_error_run_elsewhere() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        calls = map(break_context.remote, ["harmless"] * 50)
        await asyncio.gather(*calls, return_exceptions=True)
        calls = map(break_context.remote, [STICKY, *["harmless"] * 9] * 10)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {RuntimeError}
        broken = {outcome.args[1] for outcome in outcomes[::10]}  # type: ignore[union-attr]
        assert len(broken) == 10, "each error broke another worker"


async def test_a_sticky_cuda_error_is_retried_in_another_process() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        task = break_context.options(retry_exceptions=True, max_retries=1)
        before = await tasks.pid.options(num_gpus=0.5, max_calls=0).remote()
        with pytest.raises(RuntimeError) as caught:
            await task.remote(STICKY)
        assert caught.value.args[1] != before


async def test_an_actor_restarts_after_a_sticky_cuda_error() -> None:
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


# Host memory: `memory=` is a resource like others, and a guard limits its use


MIB = 1 << 20
LIMIT = 200 * MIB


async def test_tasks_share_the_nodes_memory(gate: Gate) -> None:
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
        with pytest.raises(aiogpu.InfeasibleError, match="memory 2GiB of 1GiB"):
            tasks.add.options(memory="2GiB").remote(1)


async def test_the_default_memory_fits_the_machine() -> None:
    async with aiogpu.init(num_cpus=1):
        memory = (await aiogpu.cluster_resources())["memory"]
        assert 0 < memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def used_by_workers(bounds: MemoryBounds) -> Usage:
    """Tell the memory used by workers, with a low limit."""
    children = psutil.Process().children(recursive=True)
    pids = [child.pid for child in children if child.name().startswith("aiogpu-work")]
    return Usage("a test", bounds.used_by(pids), LIMIT)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all workers together use no more than `LIMIT`."""
    monkeypatch.setattr(MemoryBounds, "tightest", used_by_workers)


@pytest.mark.usefixtures("scarce")
async def test_of_two_tasks_that_do_not_fit_one_is_retried_alone(gate: Gate) -> None:
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
async def test_a_task_that_missed_its_turn_to_run_alone_is_retried(gate: Gate) -> None:
    """Killed beside others again, it was failed as if it had been alone."""
    async with aiogpu.init(num_cpus=4, num_gpus=1) as session:
        scheduler = session._session._engine._open_driver.scheduler  # type: ignore[attr-defined]
        scheduler.config = scheduler.config._replace(exclusive_wait=0.01)
        # Within its request, so the other task is always the one to end.
        other = fill.options(memory="150MiB", num_gpus=0.5).remote(gate.path, "a", 125)
        await gate.entered("a")
        late = fill.options(num_gpus=0.5, max_retries=-1).remote(gate.path, "b", 125)
        kills, state = 0, ""
        async with asyncio.timeout(60):
            while kills < 3:
                before, state = state, (await late.why()).state
                kills += state == "delayed" != before
                await asyncio.sleep(0)
        assert not late.done()
        if "b" in gate.pids:
            gate.forget("b")
        gate.release("a")
        assert await other == 125
        await gate.let_pass("b")
        assert await late == 125


@pytest.mark.usefixtures("scarce")
async def test_idle_workers_are_ended_before_a_task(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        sizes = {"a": 50, "b": 80}
        keeping = [keep_filled.remote(gate.path, *pair) for pair in sizes.items()]
        await gate.entered("a", "b")
        gate.release("a", "b")
        kept = await asyncio.gather(*keeping)
        assert all(map(psutil.pid_exists, kept))
        # More than the idle workers leave, and the largest of all.
        task = fill.options(num_gpus=1, max_retries=0)
        handle = task.remote(gate.path, "c", 90)
        async with asyncio.timeout(60):
            while not (status := await aiogpu.status()).ended_idle:
                await asyncio.sleep(0)
        await gate.let_pass("c")
        assert await handle == 90
        status = await aiogpu.status()
        (ended,) = status.ended_idle
        assert ended.pid == kept[1], "the largest, and it was enough"
        assert ended.used > 80 * MIB
        said = f"idle worker {ended.worker} (pid {ended.pid}) was ended"
        assert said in str(status)
        assert f"(process {ended.pid}) is ended" in caplog.text
        assert psutil.pid_exists(kept[0])


@pytest.mark.usefixtures("scarce")
async def test_a_task_that_does_not_fit_alone_raises(gate: Gate) -> None:
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
async def test_a_task_without_retries_raises_out_of_memory(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        with pytest.raises(aiogpu.OutOfMemoryError):
            await fill.options(max_retries=0).remote(gate.path, "a", 300)


@pytest.mark.usefixtures("scarce")
async def test_memory_guard_false_switches_the_guard_off(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, memory_guard=False):
        handle = fill.remote(gate.path, "a", 225)
        await gate.entered("a")
        gate.release("a")
        assert await handle == 225
