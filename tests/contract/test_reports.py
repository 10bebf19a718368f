"""`aiogpu.report` in tasks and `handle.reports()`, on each engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import sync
from aiogpu.api.results.reports import KEPT
from aiogpu.errors import MisuseError
from aiogpu.types import Node
from tests.contract import report_tasks as tasks
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]

OWN = pytest.mark.parametrize("address", ["local", "inline", "node"], indirect=True)
"""On a Ray cluster reports are refused."""

STEPS = [{"step": 0}, {"step": 1}, {"step": 2}]


async def read(source: Any) -> list[dict[str, Any]]:
    return [dict(report) async for report in source.reports()]


async def check_calls(actor: Any) -> None:
    calls = [actor.run.remote(count) for count in range(4)]
    for count, call in enumerate(calls):
        assert await read(call) == STEPS[:count]
        assert await call == count


@OWN
@pytest.mark.aiogpu(num_cpus=2)
async def test_all_kinds_of_tasks_report(node: Node) -> None:
    for task in (tasks.plain, tasks.coroutine):
        handle = task.remote(3)
        assert await read(handle) == STEPS
        assert await handle == 3
        assert await read(handle) == [], "each report is read once"
    for kind in (tasks.Plain, tasks.Coroutines):
        await check_calls(aiogpu.remote(kind).remote())
    for generator in (tasks.generator, tasks.async_generator):
        stream: Any = generator.remote(3)
        reading = asyncio.ensure_future(read(stream))
        assert [item async for item in stream] == [0, 1, 2]
        assert await reading == STEPS
    for part in tasks.pair.remote(3):
        assert await part == 3
        assert await read(part) == STEPS


@OWN
@pytest.mark.parametrize("task", [tasks.by_child, tasks.by_child_later])
async def test_reports_of_a_child_go_to_its_parent(node: Node, task: Any) -> None:
    handle = task.remote(3)
    assert await read(handle) == []
    assert await handle == ([0, 1, 2], 3)


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
async def test_threads_report(node: Node) -> None:
    assert await read(tasks.of_a_thread.remote()) == STEPS[:1]
    await check_calls(aiogpu.remote(max_concurrency=2)(tasks.Plain).remote())


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
async def test_reports_come_while_the_task_runs(node: Node, gate: Gate) -> None:
    handle = tasks.gated.remote(gate.path, "in")
    reports = handle.reports()
    assert await anext(reports) == {"step": 0}
    waiting = asyncio.ensure_future(anext(reports))
    await gate.entered("in")
    assert not waiting.done()
    with pytest.raises(MisuseError, match="another asyncio task"):
        await anext(reports)
    gate.release("in")
    assert await waiting == {"step": 1}
    assert [report async for report in reports] == []


@OWN
async def test_the_newest_reports_are_kept(node: Node) -> None:
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
async def test_reading_reports_does_not_keep_the_task(node: Node, gate: Gate) -> None:
    """A task that no code awaits is cancelled, which ends its reports."""
    handle = tasks.gated_softly.remote(gate.path, "first")
    awaiting = asyncio.ensure_future(handle.coro())
    reports = handle.reports()
    assert await anext(reports) == STEPS[0]
    reading = asyncio.ensure_future(anext(reports, None))
    await gate.entered("first")
    awaiting.cancel()
    await asyncio.wait([awaiting])
    assert handle.cancelled()
    assert await reading is None
    await gate.entered("first-cancelled")
    # To stop reading does not stop the task.
    handle = tasks.gated_softly.remote(gate.path, "second")
    reading = asyncio.ensure_future(read(handle))
    await gate.entered("second")
    reading.cancel()
    await asyncio.wait([reading])
    gate.release("second")
    await handle


@OWN
async def test_each_attempt_reports_anew(node: Node, tmp_path: Path) -> None:
    handle = tasks.retried.remote(f"{tmp_path}/once")
    assert await read(handle) == [{"attempt": 0}, {"attempt": 1}]


@OWN
async def test_a_report_carries_plain_values(node: Node) -> None:
    (report,) = await read(tasks.values.remote())
    assert report.pop("lists") == [1, [2.5, None]]
    assert report == {"figure": 0.5, "table": {"x": True}, "text": "ü", "raw": b""}
    refusals = {
        "object": "SerializationError.* a object as loss: ",
        "array": "SerializationError.* a Figure as loss: ",
        "within": r"SerializationError.* a set as all\[1\]\['x'\]: ",
        "deep": r"SerializationError.* a list as all(\[0\]){16}: .* 16 deep",
        "large": "SerializationError.* 20028 bytes; the maximum is 16384",
        "nothing": "MisuseError.* needs at least one value",
    }
    for case, words in refusals.items():
        assert re.search(words, await tasks.refusal.remote(case)), case


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
async def test_a_call_that_a_new_process_repeats_reports(
    address: str, tmp_path: Path
) -> None:
    """The repeated call's receiver is one that waits for the output of the first."""
    async with aiogpu.init(address=address, num_cpus=1):
        actor: Any = (
            aiogpu.remote(tasks.DiesOnce)
            .options(max_restarts=1, max_task_retries=1)
            .remote()
        )
        call = actor.run.remote(str(tmp_path / "died"))
        assert await read(call) == STEPS[:1]
        assert await call is None


@OWN
async def test_report_is_refused_outside_of_tasks(address: str) -> None:
    with pytest.raises(MisuseError, match="outside of a task"):
        aiogpu.report(step=1)
    async with aiogpu.init(address=address, num_cpus=2):
        with pytest.raises(MisuseError, match="outside of a task"):
            aiogpu.report(step=1)
        actor: Any = aiogpu.remote(tasks.ReportsAsItIsMade).remote()
        with pytest.raises(aiogpu.ActorDiedError, match="actor's constructor"):
            await actor.run.remote()
        with pytest.raises(MisuseError, match="was received from there"):
            await tasks.reports_of.remote([tasks.plain.remote(0)])
        # The reports of `map`'s calls are dropped.
        mapped = tasks.plain.map([1, 2])
        assert [result async for result in mapped] == [1, 2]


@pytest.mark.parametrize("address", ["ray"], indirect=True)
async def test_report_is_refused_on_a_ray_cluster(node: Node) -> None:
    handle = tasks.plain.remote(1)
    assert await read(handle) == []
    with pytest.raises(MisuseError, match="Ray cluster"):
        await handle


def test_sync_reads_reports() -> None:
    with sync.init(num_cpus=2):
        handle: Any = sync.remote(tasks.plain._definition.function).remote(3)
        assert [dict(report) for report in handle.reports()] == STEPS
        assert handle.result(timeout=60) == 3
