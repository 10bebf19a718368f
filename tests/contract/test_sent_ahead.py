"""Tasks that are submitted in bursts and sent ahead run exactly once.

Results arrive while the program submits; tasks behind one that does not end are taken
back and run elsewhere. Each task of `backlog_tasks` appends its number to a file. All
are calls of one function, so that failing calls are sent ahead like others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import NodeClosedError
from tests.contract import tasks
from tests.contract.backlog_tasks import act, number_here, parent
from tests.support.gate import Gate
from tests.support.waits import until_free

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

COUNT = 300


class Ledger:
    """A file in which tasks note that they run."""

    def __init__(self, place: Path) -> None:
        self.place = str(place / "ran")

    def counts(self) -> Counter[int]:
        return Counter(map(int, Path(self.place).read_text().split()))

    def start(
        self,
        count: int,
        troubles: dict[int, str] | None = None,
        path: str = "",
        first: int = 0,
    ) -> list[aiogpu.Handle[int]]:
        """Start calls, numbered from `first` on, some of which go wrong."""
        return [
            act.remote(self.place, n, path, troubles[n])
            if troubles and n in troubles
            else act.remote(self.place, n)
            for n in range(first, first + count)
        ]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@asynccontextmanager
async def node(num_cpus: int) -> AsyncIterator[None]:
    """Open a node whose workers have learnt that calls are short."""
    async with aiogpu.init(num_cpus=num_cpus, cancel_grace=0.3):
        await asyncio.gather(*(act.remote("/dev/null", n) for n in range(100)))
        yield


async def all_free() -> None:
    """Wait until no task runs."""
    total = await aiogpu.cluster_resources()
    await until_free(**total)


async def some_worker() -> int:
    async with asyncio.timeout(60):
        while True:
            for worker in (await aiogpu.status()).workers:
                if worker.pid:
                    return worker.pid
            await asyncio.sleep(0)


async def results(handles: Sequence[aiogpu.Handle[int]]) -> list[object]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*handles, return_exceptions=True))


def each_once(numbers: Sequence[int] = range(COUNT)) -> Counter[int]:
    return Counter(numbers)


@pytest.mark.parametrize("how", ["spin", "C", "stop"])
async def test_tasks_behind_an_endless_task_move_to_another_worker(
    how: str, ledger: Ledger, gate: Gate
) -> None:
    async with node(2):
        handles = ledger.start(COUNT, {100: how}, gate.path)
        endless = handles.pop(100)
        expected = [n for n in range(COUNT) if n != 100]
        assert await results(handles) == expected
        await gate.entered(f"{how}100")
        assert not endless.done()
        endless.cancel()
        await all_free()
        assert await act.remote(ledger.place, COUNT) == COUNT
    assert ledger.counts() == each_once(range(COUNT + 1))


@pytest.mark.parametrize("how", ["spin", "stop"])
async def test_tasks_behind_an_endless_task_run_once_it_is_cancelled(
    how: str, ledger: Ledger, gate: Gate
) -> None:
    async with node(1):
        handles = ledger.start(COUNT, {0: how, 150: how, 151: how}, gate.path)
        for number in (0, 150, 151):
            await gate.entered(f"{how}{number}")
            assert not any(handle.done() for handle in handles[number:])
            assert all(handle.done() for handle in handles[:number])
            handles[number].cancel()
        outcomes = await results(handles)
        assert [n for n in range(COUNT) if outcomes[n] != n] == [0, 150, 151]
    assert ledger.counts() == each_once()


async def test_cancelled_tasks_run_at_most_once(ledger: Ledger, gate: Gate) -> None:
    """All other tasks run once."""
    async with node(2):
        handles = ledger.start(COUNT, {200: "spin"}, gate.path)
        # Before the loop turns, few tasks can have ended.
        cancelled = {n for n in range(199, 0, -11) if handles[n].cancel()}
        for number in (*range(0, 200, 7), 201, 205):
            if handles[number].cancel():
                cancelled.add(number)
            await asyncio.sleep(0)
        await gate.entered("spin200")
        cancelled |= {n for n in (200, 202, 250) if handles[n].cancel()}
        outcomes = await results(handles)
        assert {n for n in range(COUNT) if outcomes[n] != n} == cancelled
        assert 200 in cancelled
        await all_free()
    counts = ledger.counts()
    assert all(counts[number] <= 1 for number in cancelled)
    kept = [n for n in range(COUNT) if n not in cancelled]
    assert {n: counts[n] for n in kept} == each_once(kept)


@pytest.mark.parametrize("num_cpus", [1, 2])
@pytest.mark.parametrize(
    ("how", "exitcode", "number"),
    [("exit", 5, None), ("segfault", None, signal.SIGSEGV)],
    ids=["exit", "segfault"],
)
async def test_a_crash_is_blamed_on_its_own_task(
    how: str, exitcode: int | None, number: int | None, num_cpus: int, ledger: Ledger
) -> None:
    """No task is retried, yet tasks queued behind a crash run."""
    crashing = dict.fromkeys((0, 50, 51, 52, 200, COUNT - 1), how)
    async with node(num_cpus):
        outcomes = await results(ledger.start(COUNT, crashing))
        assert [n for n in range(COUNT) if outcomes[n] != n] == sorted(crashing)
        for crash in crashing:
            error = outcomes[crash]
            assert isinstance(error, aiogpu.WorkerDiedError), error
            assert (error.exitcode, error.signal) == (exitcode, number)
            assert "that ran act " in str(error)
    assert ledger.counts() == each_once()


async def test_a_kill_costs_at_most_the_running_task(ledger: Ledger) -> None:
    async with node(2):
        kills = 0
        handles: list[aiogpu.Handle[int]] = []
        while kills <= 3:  # a loaded machine may run all calls between few kills
            handles += ledger.start(COUNT * 4, first=len(handles))
            while not all(handle.done() for handle in handles) and kills < 20:
                done = sum(handle.done() for handle in handles)
                pid = await some_worker()
                with suppress(ProcessLookupError):  # killed before; not yet noticed
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                enough = min(done + 20, len(handles))
                async with asyncio.timeout(60):
                    while sum(handle.done() for handle in handles) < enough:
                        await asyncio.sleep(0)
        outcomes = await results(handles)
        lost = [n for n in range(len(handles)) if outcomes[n] != n]
        assert len(lost) <= kills
        assert all(isinstance(outcomes[n], aiogpu.WorkerDiedError) for n in lost)
    counts = ledger.counts()
    assert all(counts[n] <= 1 for n in lost)
    kept = [n for n in range(len(handles)) if n not in lost]
    assert {n: counts[n] for n in kept} == each_once(kept)


async def test_children_behind_a_waiting_parent_run_elsewhere(ledger: Ledger) -> None:
    """A worker that waits cannot run the tasks queued behind it."""
    place = ledger.place

    def work(first: int) -> int:
        handles = [act.remote(place, first + n) for n in range(20)]
        return sum(aiogpu.get(handles)) - sum(range(first, first + 20))

    parent = aiogpu.remote(max_retries=0)(work)
    async with node(1):
        parents = [parent.remote(1000 * n) for n in range(1, 15)]
        handles = ledger.start(COUNT)
        assert await results(parents) == [0] * 14
        assert await results(handles) == list(range(COUNT))
    children = [1000 * n + child for n in range(1, 15) for child in range(20)]
    assert ledger.counts() == each_once([*range(COUNT), *children])


# A program that submits many tasks in one turn of its loop


def submitted_until(
    is_enough: Callable[[list[aiogpu.Handle[Any]]], bool],
    submit: Callable[[int], aiogpu.Handle[Any]],
) -> list[aiogpu.Handle[Any]]:
    """Submit tasks in one turn of the loop until a condition holds."""
    handles: list[aiogpu.Handle[Any]] = []
    deadline = time.monotonic() + 60
    while not is_enough(handles):
        assert time.monotonic() < deadline, "no result arrived"
        handles.append(submit(len(handles)))
    return handles


def hundred_done(handles: list[aiogpu.Handle[Any]]) -> bool:
    # Counting is slow: there may be many thousands.
    return len(handles) % 50 == 0 and sum(handle.done() for handle in handles) > 100


async def test_tasks_end_while_others_are_submitted() -> None:
    async with aiogpu.init(num_cpus=2):
        await asyncio.gather(*map(tasks.add.remote, range(200)))
        handles = submitted_until(hundred_done, tasks.add.remote)
        assert await asyncio.gather(*handles) == [*range(1, len(handles) + 1)]


async def test_children_start_while_others_are_submitted() -> None:
    """Children may need new workers, for which the loop must turn."""
    async with aiogpu.init(num_cpus=2):
        await asyncio.gather(*map(parent.remote, range(10)))
        results = await asyncio.gather(*map(parent.remote, range(200)))
        assert results == [3 * n + 3 for n in range(200)]


async def test_cancels_and_deaths_amid_a_burst_end_only_their_tasks() -> None:
    async with aiogpu.init(num_cpus=2):
        await asyncio.gather(*map(tasks.add.remote, range(200)))

        kill = tasks.kill_self.options(max_retries=0)

        def submit(number: int) -> aiogpu.Handle[Any]:
            if number % 500 == 250:
                return kill.remote(int(signal.SIGKILL))
            handle = tasks.add.remote(number)
            if number % 10 == 7:
                handle.cancel()
            return handle

        handles = submitted_until(
            lambda handles: len(handles) > 2000 and hundred_done(handles), submit
        )
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            if number % 500 == 250:
                assert isinstance(outcome, aiogpu.WorkerDiedError), outcome
            elif number % 10 == 7:
                assert isinstance(outcome, asyncio.CancelledError), outcome
            else:
                assert outcome == number + 1


async def filled() -> list[aiogpu.Handle[Any]]:
    """Submit so many tasks to a node of one CPU that most of them wait."""
    await tasks.add.remote(0)
    return [tasks.add.remote(number) for number in range(100)]


async def test_waiting_tasks_are_listed_and_cancelled_at_once() -> None:
    async with aiogpu.init(num_cpus=1) as node:
        await node.status()  # import its modules before time counts
        handles = await filled()
        seen = await node.status()
        known = [*range(handles[0].task_id, handles[-1].task_id + 1)]
        assert [handle.task_id for handle in handles] == known
        # The other tasks were sent ahead, or have ended by now.
        assert seen.waiting_count >= 25
        last = tasks.add.remote(1)
        assert (await last.why()).state == "waiting"
        cancelled = {handle for handle in handles[::2] if handle.cancel()}
        assert handles[-2] in cancelled
        assert (await node.status()).waiting_count <= 101 - len(cancelled)
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        for number, handle in enumerate(handles):
            if handle in cancelled:
                assert isinstance(outcomes[number], asyncio.CancelledError)
            else:
                assert outcomes[number] == number + 1
        assert await last == 2


async def test_tasks_with_different_options_run_in_order() -> None:
    """One process runs all of them, and counts."""
    kinds = [
        number_here,
        number_here.options(name="another"),
        number_here.options(timeout=60),
        number_here.options(priority=0, name="a third"),
    ]
    async with aiogpu.init(num_cpus=1):
        start = await number_here.remote()
        turns = [0 if number % 40 < 25 else number % 4 for number in range(200)]
        numbers = await asyncio.gather(*(kinds[turn].remote() for turn in turns))
        assert numbers == [*range(start + 1, start + 201)]


async def test_a_closing_node_fails_the_tasks_that_wait() -> None:
    async with aiogpu.init(num_cpus=1) as node:
        handles = await filled()
        await node.shutdown()
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
    errors = [outcome for outcome in outcomes if not isinstance(outcome, int)]
    assert len(errors) >= 25  # the other tasks have ended
    assert {type(error) for error in errors} == {NodeClosedError}
