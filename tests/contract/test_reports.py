"""`aiogpu.report` in tasks, and who reads `handle.reports()`, on each engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import sync
from aiogpu.api.results.reports import KEPT
from tests.contract import report_tasks as tasks
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

OWN = pytest.mark.parametrize("address", ["local", "inline", "node"], indirect=True)
"""On a Ray cluster reports are refused."""

STEPS = [{"step": 0}, {"step": 1}, {"step": 2}]


async def read(source: Any) -> list[dict[str, Any]]:
    return [dict(report) async for report in source.reports()]


@OWN
async def test_all_kinds_of_tasks_report(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        for task in (tasks.plain, tasks.coroutine):
            handle = task.remote(3)
            assert await read(handle) == STEPS
            assert await handle == 3
            assert await read(handle) == [], "each is read once"
        for made in (tasks.Plain, tasks.Coroutines):
            actor: Any = aiogpu.remote(made).remote()
            calls = [actor.run.remote(count) for count in range(4)]
            for count, call in enumerate(calls):
                assert await read(call) == STEPS[:count]
                assert await call == count
        streams: list[Any] = [tasks.generator.remote(3)]
        streams.append(tasks.async_generator.remote(3))
        for stream in streams:
            reading = asyncio.ensure_future(read(stream))
            assert [item async for item in stream] == [0, 1, 2]
            assert await reading == STEPS
        for part in tasks.pair.remote(3):
            assert await part == 3
            assert await read(part) == STEPS


@OWN
@pytest.mark.parametrize("task", [tasks.by_child, tasks.by_child_later])
async def test_the_reports_of_a_child_go_to_its_parent(address: str, task: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        handle = task.remote(3)
        assert await read(handle) == []
        assert await handle == ([0, 1, 2], 3)


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
async def test_threads_of_a_task_and_calls_in_threads(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        assert await read(tasks.of_a_thread.remote()) == STEPS[:1]
        threaded = aiogpu.remote(max_concurrency=2)(tasks.Plain)
        actor: Any = threaded.remote()
        calls = [actor.run.remote(count) for count in range(4)]
        for count, call in enumerate(calls):
            assert await read(call) == STEPS[:count]


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
async def test_they_come_while_the_task_runs(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        handle = tasks.gated.remote(gate.path, "it")
        reports = handle.reports()
        assert await anext(reports) == {"step": 0}
        waiting = asyncio.ensure_future(anext(reports))
        await gate.entered("it")
        assert not waiting.done()
        with pytest.raises(aiogpu.errors.MisuseError, match="another asyncio task"):
            await anext(reports)
        gate.release("it")
        assert await waiting == {"step": 1}
        assert [report async for report in reports] == []


@OWN
async def test_of_many_the_newest_are_kept(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        count = KEPT + 50
        handle = tasks.plain.remote(count)
        await handle
        reports = [report async for report in handle.reports()]
        assert reports[-1] == {"step": count - 1}
        assert len(reports) <= KEPT
        step = 0
        for report in reports:
            step += report.dropped
            assert report == {"step": step}
            step += 1
        assert step == count


@OWN
async def test_to_read_is_not_to_wait(address: str, gate: Gate) -> None:
    """[B15] Work that nobody waits for is cancelled; that ends its reports."""
    async with aiogpu.init(address=address, num_cpus=1):
        handle = tasks.gated_softly.remote(gate.path, "it")
        reading = asyncio.ensure_future(read(handle))
        awaiting = asyncio.ensure_future(handle.coro())
        await gate.entered("it")
        awaiting.cancel()
        await asyncio.wait([awaiting])
        assert handle.cancelled()
        assert await reading == STEPS[:1]
        await gate.entered("it-cancelled")
        # And who stops reading stops nothing.
        handle = tasks.gated_softly.remote(gate.path, "second")
        reading = asyncio.ensure_future(read(handle))
        await gate.entered("second")
        reading.cancel()
        await asyncio.wait([reading])
        gate.release("second")
        await handle


@OWN
async def test_an_attempt_reports_anew(address: str, tmp_path: Path) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        handle = tasks.retried.remote(f"{tmp_path}/once")
        assert await read(handle) == [{"attempt": 0}, {"attempt": 1}]


@OWN
async def test_what_a_report_carries(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        (report,) = await read(tasks.values.remote())
        assert report.pop("lists") == [1, [2.5, None]]
        assert report == {"figure": 0.5, "table": {"x": True}, "text": "ü", "raw": b""}
        told = {
            "object": "SerializationError.* a object as loss: ",
            "array": "SerializationError.* a Figure as loss: ",
            "within": r"SerializationError.* a set as all\[1\]\['x'\]: ",
            "deep": r"SerializationError.* a list as all(\[0\]){16}: .* 16 deep",
            "large": "SerializationError.* 20028 bytes; the maximum is 16384",
            "nothing": "MisuseError.* needs at least one value",
        }
        for case, words in told.items():
            assert re.search(words, await tasks.told.remote(case)), case


@OWN
async def test_where_there_is_nothing_to_report_on(address: str) -> None:
    with pytest.raises(aiogpu.errors.MisuseError, match="outside of a task"):
        aiogpu.report(step=1)
    async with aiogpu.init(address=address, num_cpus=2):
        with pytest.raises(aiogpu.errors.MisuseError, match="outside of a task"):
            aiogpu.report(step=1)
        made: Any = aiogpu.remote(tasks.ReportsAsItIsMade).remote()
        with pytest.raises(aiogpu.ActorDiedError, match="actor's constructor"):
            await made.run.remote()
        given = tasks.plain.remote(0)
        with pytest.raises(aiogpu.errors.MisuseError, match="was received from there"):
            await tasks.reports_of.remote([given])
        # Nobody reads the reports of calls that `map` makes.
        mapped = tasks.plain.map([1, 2])
        assert [result async for result in mapped] == [1, 2]


@pytest.mark.parametrize("address", ["ray"], indirect=True)
async def test_on_a_ray_cluster_it_is_refused(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        handle = tasks.plain.remote(1)
        assert await read(handle) == []
        with pytest.raises(aiogpu.errors.MisuseError, match="Ray cluster"):
            await handle


def test_without_a_loop() -> None:
    with sync.init(num_cpus=2):
        handle: Any = sync.remote(tasks.plain._definition.function).remote(3)
        assert [dict(report) for report in handle.reports()] == STEPS
        assert handle.result(timeout=60) == 3
