"""Cancelling and `timeout=` in every phase of a task's life.

Each time the caller goes on at once, the share is free when the code has stopped and
not before, and no other task is disturbed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu import errors
from aiogpu.runtime.connection import Peer
from aiogpu.runtime.driver import Driver
from aiogpu.types import Node, RemoteFunction
from tests.contract import phase_tasks, tasks
from tests.contract.phase_tasks import (
    BEGUN,
    INTERRUPTED,
    KILLED,
    PHASES,
    STOPPED,
    clean_up,
    count,
    count_softly,
)
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until, until_free, wait_until_asleep

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

GRACE = 0.05
IS_KILLED = {task.__name__ for task in KILLED}
NAMES = [task.__name__ for task in [*INTERRUPTED, *KILLED]]
WHOLE = {"num_gpus": 1, "max_calls": 0}


def grace_of(phase: str) -> float:
    """Return a long grace for code that can be interrupted."""
    return GRACE if phase in IS_KILLED else 20.0


def driver_of(session: Node) -> Driver:
    return session._session._engine._open_driver  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(autouse=True)
def endless_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_import.py").write_text(phase_tasks.ENDLESS_IMPORT)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "noted"
    path.touch()
    return path


@asynccontextmanager
async def node(
    num_cpus: int = 1, grace: float = GRACE, **options: int
) -> AsyncIterator[Driver]:
    """Open a node. At the end all is free and no interrupt hits a later task."""
    async with aiogpu.init(
        num_cpus=num_cpus, num_gpus=1, cancel_grace=grace, **options
    ) as session:
        yield driver_of(session)
        await until_free()
        await no_stray_interrupts()
        driver_of(session).scheduler.check()


async def all_free(is_stopped: Callable[[], bool] = lambda: True) -> None:
    """Wait until all is free; at that moment the code has stopped."""
    await until_free()
    assert is_stopped()


async def no_stray_interrupts() -> None:
    """No interrupt hits a later task, whichever worker runs it."""
    assert await tasks.add.options(**WHOLE).remote(1) == 2
    assert await tasks.double.options(**WHOLE).remote(2) == 4
    assert await asyncio.gather(*map(tasks.add.remote, range(20))) == [*range(1, 21)]


def has_stopped(phase: str, place: Path, pid: int) -> bool:
    if phase in IS_KILLED:
        return not os.path.exists(f"/proc/{pid}")
    return place.read_text().split() == [BEGUN, STOPPED]


@pytest.mark.parametrize("phase", NAMES)
async def test_cancel_stops_code_in_each_phase(
    phase: str, gate: Gate, place: Path
) -> None:
    async with node(grace=grace_of(phase)):
        handle = PHASES[phase].options(**WHOLE).remote(gate.path, "in", str(place))
        await gate.entered("in")
        pid = gate.pids["in"]
        assert handle.cancel()
        await raises(asyncio.CancelledError, handle)
        if phase in IS_KILLED:
            assert (await aiogpu.available_resources())["GPU"] == 0.0
        await all_free(lambda: has_stopped(phase, place, pid))
        was_reused = await tasks.pid.options(**WHOLE).remote() == pid
        assert was_reused == (phase not in IS_KILLED)


async def test_a_suspended_coroutine_clears_up_when_it_goes_on(
    gate: Gate, place: Path
) -> None:
    """Message and signal are both there when the coroutine goes on."""
    async with node(grace=grace_of("coroutine")):
        handle = (
            PHASES["coroutine"].options(**WHOLE).remote(gate.path, "in", str(place))
        )
        await gate.entered("in")
        worker = psutil.Process(gate.pids["in"])
        worker.suspend()
        handle.cancel()
        await until(lambda: is_pending(worker.pid, signal.SIGINT))
        worker.resume()
        await all_free(lambda: has_stopped("coroutine", place, worker.pid))
        assert await tasks.pid.options(**WHOLE).remote() == worker.pid


def is_pending(pid: int, number: int) -> bool:
    """A signal waits for a process to take it; see proc_pid_status(5)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("ShdPnd:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    raise AssertionError(pid)


@pytest.mark.parametrize(
    ("chain", "phase"),
    [
        ("relay", "loop"),
        ("relay", "swallowing"),
        ("relay_softly", "coroutine"),
        ("relay_softly", "packing"),
    ],
)
async def test_cancel_of_a_grandparent_stops_the_grandchild(
    chain: str, phase: str, gate: Gate, place: Path
) -> None:
    relay = getattr(phase_tasks, chain)
    async with node(grace=grace_of(phase)):
        args = [gate.path, "in", str(place)]
        handle = relay.remote(1, phase, WHOLE, args)
        await gate.entered("in")
        pid = gate.pids["in"]
        handle.cancel()
        await raises(asyncio.CancelledError, handle)
        await all_free(lambda: has_stopped(phase, place, pid))


@pytest.mark.parametrize("chain", ["relay", "relay_softly"])
async def test_cancel_of_a_grandparent_unqueues_the_grandchild(
    chain: str, gate: Gate, place: Path
) -> None:
    relay = getattr(phase_tasks, chain)
    async with node(num_cpus=2):
        holder = tasks.gated.options(num_gpus=1).remote(gate.path, "holder")
        await gate.entered("holder")
        handle = relay.remote(1, "begins", {"num_gpus": 1}, [str(place)])
        while "begins" not in str((await aiogpu.status()).waiting):
            await asyncio.sleep(0)
        handle.cancel()
        assert (await aiogpu.status()).waiting == ()
        gate.release("holder")
        await holder
        assert place.read_text() == ""


async def expired(phase: str, timeout: float, path: str, place: Path) -> None:
    task = PHASES[phase].options(timeout=timeout, cancel_grace=grace_of(phase))
    with pytest.raises(errors.TaskTimeoutError, match=f"{phase} .* {timeout:g} s"):
        await task.remote(path, phase, str(place))


async def test_a_timeout_stops_code_in_each_phase(gate: Gate, tmp_path: Path) -> None:
    """All phases at once, each on its own CPU; again if a phase began too late."""
    timeout = 1.0
    while True:
        gate.pids.clear()
        places = {phase: tmp_path / f"{phase}-{timeout:g}" for phase in NAMES}
        async with node(len(NAMES)), asyncio.TaskGroup() as group:
            for phase, place in places.items():
                place.touch()
                group.create_task(expired(phase, timeout, gate.path, place))
        if set(NAMES) <= set(gate.pids):
            break
        timeout *= 2
    for phase, place in places.items():
        words = place.read_text().split()
        assert words == ([BEGUN] if phase in IS_KILLED else [BEGUN, STOPPED]), phase


# Tasks that have not begun: in the queue, on their way to a worker, in its socket.


async def test_a_queued_task_that_is_cancelled_or_expires_never_runs(
    gate: Gate, place: Path
) -> None:
    async with node():
        holder = tasks.gated.remote(gate.path, "holder")
        await gate.entered("holder")
        begins = phase_tasks.begins
        cancelled = [begins.remote(str(place)) for _ in range(20)]
        expiring = [begins.options(timeout=0.05).remote(str(place)) for _ in range(20)]
        for handle in cancelled:
            handle.cancel()
        outcomes = await asyncio.gather(*expiring, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {errors.TaskTimeoutError}
        assert (await aiogpu.status()).waiting == ()
        gate.release("holder")
        assert await holder == "holder"
    assert place.read_text() == ""


async def start_and_stop(by: str, task: Any, place: Path, state: str) -> None:
    """Start a task, and stop it by a cancel in this state or by a timeout."""
    if by == "cancel":
        handle = task.remote(str(place))
        assert (await aiogpu.status()).tasks[0].state == state
        handle.cancel()
    else:
        late = task.options(timeout=0.05).remote(str(place))
        await raises(errors.TaskTimeoutError, late)


@pytest.mark.parametrize("by", ["cancel", "timeout"])
async def test_a_task_stopped_while_its_worker_starts_never_runs(
    by: str, place: Path
) -> None:
    """The keeper is suspended, so there is a lease and no worker yet."""
    async with node(spare_workers=0):
        begins = phase_tasks.begins.options(num_gpus=1)
        await begins.remote("/dev/null")
        await all_free()
        (keeper,) = helpers("aiogpu-keep")
        keeper.suspend()
        try:
            await start_and_stop(by, begins, place, "starting")
            assert (await aiogpu.available_resources())["GPU"] == 1.0
        finally:
            keeper.resume()
    assert place.read_text() == ""


def helpers(name: str) -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name().startswith(name)]


@pytest.mark.parametrize("by", ["cancel", "timeout"])
@pytest.mark.parametrize("fate", ["goes on", "stands still"])
async def test_a_task_stopped_before_its_worker_reads_never_runs(
    by: str, fate: str, place: Path
) -> None:
    """The task was sent, and its stopped worker has not read it."""
    async with node(grace=GRACE if fate == "stands still" else 20.0):
        pid = await tasks.pid.options(**WHOLE).remote()
        os.kill(pid, signal.SIGSTOP)
        begins = phase_tasks.begins.options(**WHOLE)
        await start_and_stop(by, begins, place, "running")
        assert (await aiogpu.available_resources())["GPU"] == 0.0
        if fate == "goes on":
            os.kill(pid, signal.SIGCONT)
            await all_free()
            assert await tasks.pid.options(**WHOLE).remote() == pid
        else:
            await all_free(lambda: not os.path.exists(f"/proc/{pid}"))
    assert place.read_text() == ""


@pytest.mark.parametrize("by", ["cancel", "timeout"])
async def test_a_task_stopped_behind_another_in_a_worker_never_runs(
    by: str, gate: Gate, place: Path
) -> None:
    async with node():
        await asyncio.gather(
            *(phase_tasks.begins.remote("/dev/null") for _ in "x" * 99)
        )
        # One shape and one function, so that the rest may be sent ahead.
        first = phase_tasks.loop.remote(gate.path, "in", "/dev/null")
        timeout = 0.005 if by == "timeout" else None
        begins = phase_tasks.begins.options(timeout=timeout)
        behind = [begins.remote(str(place)) for _ in range(30)]
        if by == "cancel":
            for handle in behind:
                handle.cancel()
        outcomes = await asyncio.gather(*behind, return_exceptions=True)
        wanted = errors.TaskTimeoutError if by == "timeout" else asyncio.CancelledError
        assert {type(outcome) for outcome in outcomes} == {wanted}
        await gate.entered("in")
        first.cancel()
    assert place.read_text() == ""


# Tasks that are over, but for their answer or their process.


@pytest.mark.parametrize("by", ["cancel", "timeout"])
async def test_a_task_stopped_while_its_result_is_sent_tears_nothing(
    by: str, gate: Gate, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 MB are on their way; all of them arrive, and the worker goes on."""
    received = 0
    take = Peer.data_received
    arrives = asyncio.Event()

    def watch(peer: Peer, data: bytes) -> None:
        nonlocal received
        received += len(data)
        if received > 1 << 20 and not arrives.is_set():
            arrives.set()
            peer.pause()
        take(peer, data)

    async with node(grace=20.0) as driver:
        timeout = 0.5 if by == "timeout" else None
        monkeypatch.setattr(Peer, "data_received", watch)
        while not arrives.is_set():
            dispatcher = phase_tasks.dispatcher.options(timeout=timeout, **WHOLE)
            handle = dispatcher.remote(gate.path, "in", str(place))
            if timeout is None:
                async with asyncio.timeout(60):
                    await arrives.wait()
                handle.cancel()
            else:
                await raises(errors.TaskTimeoutError, handle)
                timeout *= 2  # the timeout may come before the first bytes
        assert (await aiogpu.available_resources())["GPU"] == 0.0
        for worker in driver.workers.values():
            assert worker.peer is not None
            worker.peer.resume()
        await all_free(lambda: received > 1 << 25)
        assert await tasks.pid.options(**WHOLE).remote() == gate.pids["in"]


@pytest.mark.parametrize("is_endless", [False, True])
async def test_a_leaving_process_keeps_the_result_and_the_share(
    is_endless: bool, gate: Gate, place: Path
) -> None:
    """The result is there, so there is nothing to cancel; the share is not free."""
    async with node() as driver:
        scheduler = driver.scheduler
        grace = GRACE if is_endless else 20.0
        scheduler.config = scheduler.config._replace(exit_grace=grace)
        leaving = phase_tasks.leaving.options(num_gpus=1)
        handle = leaving.remote(gate.path, "out", str(place), is_endless)
        pid = await handle
        await gate.entered("out")
        assert not handle.cancel()
        assert (await aiogpu.available_resources())["GPU"] == 0.0
        if not is_endless:
            gate.release("out")
        await all_free(lambda: not os.path.exists(f"/proc/{pid}"))
        assert place.read_text().split() == [BEGUN, STOPPED][: 2 - is_endless]


async def test_an_interrupt_waits_for_the_end_of_an_import(
    gate: Gate, place: Path, tmp_path: Path
) -> None:
    """The import is not cut off in the middle; the module can be used afterwards."""
    (tmp_path / "slow_import.py").write_text(
        "import os\nfrom tests.support.gate import pass_gate\n"
        "pass_gate(*os.environ.pop('SLOW').split())\nVALUE = 7\n"
    )
    path, noted = gate.path, str(place)

    @aiogpu.remote
    def use(name: str) -> int:
        if name:
            os.environ["SLOW"] = f"{path} {name}"
        import slow_import  # type: ignore[import-not-found]

        phase_tasks.note(noted, BEGUN)
        if name:
            phase_tasks.spin()
        return int(slow_import.VALUE)

    async with node(grace=20.0):
        handle = use.remote("in")
        await gate.entered("in")
        handle.cancel()
        gate.release("in")
        await all_free()
        place.write_text("")
        assert await use.remote("") == 7
        assert await tasks.pid.remote() == gate.pids["in"]


# How long code may take to stop: the node's grace, and a task's own.

LONG = 60.0


async def test_a_tasks_own_grace_replaces_the_nodes(gate: Gate) -> None:
    """A longer grace gives a task time to clean up."""
    async with node(grace=GRACE):
        handle = clean_up.options(cancel_grace=LONG).remote(gate.path, 6 * GRACE)
        await gate.entered("in")
        handle.cancel()
        await gate.entered("out")
        assert await tasks.pid.remote() == gate.pids["out"] == gate.pids["in"]
        gate.forget("in")
        del gate.pids["out"]
        handle = clean_up.remote(gate.path, LONG)
        await gate.entered("in")
        handle.cancel()
        await all_free()
        assert "out" not in gate.pids


async def test_a_child_has_its_own_grace(gate: Gate) -> None:
    async with node(grace=LONG):
        args = [gate.path, "in", "/dev/null"]
        handle = phase_tasks.relay.remote(0, "swallowing", {"cancel_grace": 0}, args)
        await gate.entered("in")
        handle.cancel()


async def test_a_closing_node_waits_for_the_longest_grace(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's own limit for a shutdown would end before."""
    monkeypatch.setattr("aiogpu.runtime.node.SLACK", -5.0)
    async with aiogpu.init(num_cpus=1, cancel_grace=GRACE):
        handle = clean_up.options(cancel_grace=LONG).remote(gate.path, 1.0)
        await gate.entered("in")
    await gate.entered("out")
    await raises(errors.NodeClosedError, handle)


# SIGINT in a worker whose task was cancelled. The driver sends it again until the
# worker has noted that it heard; one may arrive late.


@pytest.mark.parametrize("kind", ["task", "method"])
async def test_a_second_interrupt_does_not_cut_a_finally_block(
    kind: str, gate: Gate, tmp_path: Path
) -> None:
    cleaned = tmp_path / "cleaned"
    async with asyncio.timeout(60), aiogpu.init(num_cpus=1, cancel_grace=LONG):
        actor = phase_tasks.CleanerActor.remote() if kind == "method" else None
        clean = phase_tasks.clean if actor is None else actor.clean
        running = clean.remote(gate.path, str(cleaned))
        await gate.entered("runs")
        running.cancel()
        await gate.entered("cleans")
        for _ in range(3):
            os.kill(gate.pids["cleans"], signal.SIGINT)
        gate.release("cleans")
        # The next call begins when the first has ended.
        if actor is None:
            assert await tasks.pid.remote() == gate.pids["cleans"]
        else:
            await actor.rest.remote()
        assert cleaned.exists()


async def test_an_interrupt_during_a_write_is_raised_after_the_write(
    gate: Gate, tmp_path: Path
) -> None:
    """The write lasts as long as the program does not read."""
    went_on = tmp_path / "went on"
    options = {"num_cpus": 1, "cancel_grace": LONG, "log_to_driver": False}
    async with asyncio.timeout(60), aiogpu.init(**options):
        write = phase_tasks.write_and_go_on.remote
        running = write(gate.path, 4 << 20, str(went_on))
        await gate.entered("writes")
        # The loop does not turn from here on, so the program reads nothing.
        worker = gate.pids["writes"]
        wait_until_asleep(worker)
        running.cancel()
        os.kill(worker, signal.SIGINT)
        wait_until_asleep(worker)
        # The program reads now, and all of the output arrives.
        assert await tasks.pid.remote() == worker
        assert not went_on.exists()


# Cancelling at the instant of completion, ten thousand times if all is run. A seeded
# generator draws the moment and a busy loop waits for it, from before the task begins
# to after it has ended. The longest wait follows the outcomes so far.


SEED = int(os.environ.get("AIOGPU_TEST_SEED", "7"))
LONGEST = 2_000
"""The largest number to which a task counts."""


def wait(counts: int) -> None:
    for _ in range(counts):
        pass


async def counts_of_a_call(task: RemoteFunction[[int, int], int]) -> int:
    """Return how far the driver counts while the longest call is answered."""
    for _ in range(200):
        await task.remote(0, LONGEST)
    calls = []
    for _ in range(100):
        started = time.perf_counter()
        await task.remote(0, LONGEST)
        calls.append(time.perf_counter() - started)
    # Not the mean: other work on this machine may make some calls very long.
    call = statistics.median(calls)
    started = time.perf_counter()
    wait(100_000)
    return int(100_000 * call / (time.perf_counter() - started))


@pytest.mark.parametrize("cancels", [250, pytest.param(2_500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", [count, count_softly], ids=["plain", "coroutine"])
async def test_each_call_ends_as_a_result_or_as_cancelled(
    task: RemoteFunction[[int, int], int], cancels: int
) -> None:
    source = random.Random(SEED)
    ends: Counter[str] = Counter()
    async with aiogpu.init(num_cpus=1, cancel_grace=20) as session:
        pid = await tasks.pid.remote()
        longest = await counts_of_a_call(task)
        for number in range(cancels):
            goal = source.randrange(source.choice((10, 100, LONGEST)))
            handle = task.remote(number, goal)
            for _ in range(source.randrange(3)):
                await asyncio.sleep(0)
            wait(source.randrange(2 * longest))
            for _ in range(source.randrange(4)):
                await asyncio.sleep(0)
            handle.cancel()
            (end,) = await asyncio.gather(handle, return_exceptions=True)
            assert end == number or type(end) is asyncio.CancelledError, (SEED, end)
            ends[type(end).__name__] += 1
            # A machine that is busy now was not when the call was measured.
            longest = int(longest * (0.9 if end == number else 1.05)) + 1
            # A stray interrupt would hit this task.
            assert await task.remote(-number, source.randrange(LONGEST)) == -number, (
                SEED
            )
        assert await tasks.pid.remote() == pid, "the worker was reused"
        available = await aiogpu.available_resources()
        assert available == await aiogpu.cluster_resources()
        session._session._engine._open_driver.scheduler.check()  # type: ignore[attr-defined]
    assert ends.keys() == {"int", "CancelledError"}, ends
    assert min(ends.values()) > cancels // 50, "too seldom near the end"
