"""Pages of the tasks of a node, and the end of a lease, as a viewer asks for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiogpu
from aiogpu.api.session import find_session
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.local import LocalEngine
from aiogpu.engines.remote import RemoteEngine
from aiogpu.errors import NodeError, TaskCancelledError
from aiogpu.observe.status_codec import status_codec
from aiogpu.observe.task_list import (
    DEEPEST,
    Candidate,
    TaskPage,
    TaskQuery,
    TaskSearch,
    row_of,
)
from aiogpu.wire.messages import (
    END_LEASE,
    TASKS,
    ChildFailed,
    Inquire,
    socket_path,
)
from tests.contract import crowd_tasks, tasks
from tests.contract.raw_client import RawClient, Service
from tests.contract.test_turns_of_the_loop import measured_turns
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]
MANY = 20_000


@asynccontextmanager
async def viewer(path: str) -> AsyncIterator[RemoteEngine]:
    """A command that looks at a node."""
    options = NodeOptions(only_looks=True, log_to_driver=False)
    engine = RemoteEngine(path, options, asyncio.get_running_loop())
    await engine.open()
    try:
        yield engine
    finally:
        engine.force_close()
        await engine.close()


@pytest.fixture
async def path(no_leaks: None) -> AsyncIterator[str]:
    """The socket of a node inside this program, with one CPU and two GPUs."""
    async with aiogpu.init(
        address="local", num_cpus=1, num_gpus=2, log_to_driver=False
    ):
        engine = find_session().engine
        assert isinstance(engine, LocalEngine)
        yield socket_path(engine._supervisor.directory)


def names(page: TaskPage) -> list[str]:
    return [row.name for row in page.rows]


async def test_waiting_running_and_ended_tasks_are_listed(
    path: str, gate: Gate
) -> None:
    with pytest.raises(ValueError, match="no key"):
        await tasks.fail.options(name="broken").remote(ValueError, "no key")
    assert await tasks.add.options(name="early").remote(1, 2) == 3
    running = crowd_tasks.occupies.options(name="busy").remote(gate.path, "busy")
    await gate.entered("busy")
    waiting = [
        tasks.add.options(name=name).remote(1, 2) for name in ("zebra", "ant", "Zoo")
    ]
    async with viewer(path) as node:
        page = await node.list_tasks(TaskQuery())
        assert (page.total, names(page)) == (3, ["zebra", "ant", "Zoo"])
        assert all("waits for CPU 1" in row.reason for row in page.rows)
        page = await node.list_tasks(TaskQuery(sort="name", start=1, count=1))
        assert (page.total, names(page)) == (3, ["ant"])
        page = await node.list_tasks(TaskQuery(text="Z", sort="newest"))
        assert (page.total, names(page)) == (2, ["Zoo", "zebra"])
        page = await node.list_tasks(TaskQuery(text=str(waiting[1].task_id)))
        assert names(page) == ["ant"]

        (row,) = (await node.list_tasks(TaskQuery(state="running"))).rows
        assert (row.name, row.state, row.reason) == ("busy", "running", "")
        assert row.pid
        assert row.ran is not None
        assert row.ended is None

        ended = await node.list_tasks(TaskQuery(state="ended"))
        assert names(ended) == ["early", "broken"]
        early, broken = ended.rows
        assert (early.state, early.reason) == ("finished", "")
        assert (broken.state, broken.reason) == ("failed", "ValueError: no key")
        assert all(row.ended is not None and row.ran is not None for row in ended.rows)
        failed = await node.list_tasks(TaskQuery(state="failed", text="NO KEY"))
        assert names(failed) == ["broken"]
        assert not (await node.list_tasks(TaskQuery(state="failed", text="x"))).total
    gate.release("busy")
    await asyncio.gather(running, *waiting)


@pytest.mark.parametrize("text", ["", "add"])
async def test_a_search_of_many_tasks_holds_no_turn_of_the_loop(
    text: str, path: str, gate: Gate
) -> None:
    running = crowd_tasks.occupies.remote(gate.path, "busy")
    await gate.entered("busy")
    waiting = [tasks.add.remote(1, 2) for _ in range(MANY)]
    async with viewer(path) as node:
        await node.list_tasks(TaskQuery())  # imports modules
        async with measured_turns() as turns:
            page = await node.list_tasks(
                TaskQuery(text=text, start=MANY - 100, count=100)
            )
            by_name = await node.list_tasks(TaskQuery(text=text, sort="name"))
        assert page.total == by_name.total == MANY
        assert [row.task for row in page.rows] == [h.task_id for h in waiting[-100:]]
        assert len(by_name.rows) == 50
    assert max(turns) < 0.05, "examining all at once takes as much"
    for handle in waiting:
        handle.cancel()
    gate.release("busy")
    await running


@pytest.mark.parametrize(
    "fields", [("x",), ("waiting", 3), ("waiting", "", "size"), ("ended", "", "", -1)]
)
async def test_a_wrong_question_is_refused(path: str, fields: tuple[Any, ...]) -> None:
    with RawClient(Service(path, os.getpid())) as raw:
        await asyncio.to_thread(raw.joined, only_looks=True)
        wrong = status_codec.dump(TaskQuery())
        for query in (b"", b"\xff", status_codec.dump([1]), wrong[:-1]):
            raw.say(Inquire(1, TASKS, 0, "", query))
            assert await asyncio.to_thread(raw.hear, ChildFailed)
    with pytest.raises(ValueError, match="was asked for by"):
        TaskQuery(*fields)


def found(count: int, query: TaskQuery, total: int | None = None) -> list[int]:
    search = TaskSearch(query, total)
    for first in range(0, count, 10):
        if not search.is_done:
            search.take(
                Candidate(n, f"task {n % 7}", 0, "waiting", since=-float(n))
                for n in range(first, min(first + 10, count))
            )
    assert search.total == (count if total is None else total)
    return [task.task for task in search.page()]


def test_pages_follow_each_other_in_every_order() -> None:
    by: dict[str, Callable[[int], Any]] = {
        "": lambda n: n,
        "newest": lambda n: -n,
        "name": lambda n: (n % 7, n),
        "waited": lambda n: -n,
    }
    for sort, key in by.items():
        listed = [
            task
            for start in range(0, 100, 20)
            for task in found(95, TaskQuery(sort=sort, start=start, count=20))
        ]
        assert listed == sorted(range(95), key=key), sort
    assert found(95, TaskQuery(start=10, count=5), total=95) == [10, 11, 12, 13, 14]
    deep = TaskQuery(sort="newest", start=DEEPEST - 5, count=10)
    assert len(found(DEEPEST + 50, deep)) == 5


def test_a_row_has_the_durations() -> None:
    waits = row_of(Candidate(1, "a", 0, "waiting", since=3.0), 5.0, "turn", 0)
    assert (waits.waited, waits.ran, waits.ended, waits.reason) == (
        2,
        None,
        None,
        "turn",
    )
    ended = Candidate(1, "a", 0, "failed", 3.0, 4.0, 7.0, "KeyError", "")
    row = row_of(ended, 9.0, "", 0)
    assert (row.waited, row.ran, row.ended, row.reason) == (1, 3, 2, "KeyError")
    cancelled = row_of(Candidate(1, "a", 0, "cancelled", 3.0, None, 7.0), 9.0, "", 0)
    assert (cancelled.waited, cancelled.ran) == (4, None)


async def test_the_user_ends_a_lease(path: str) -> None:
    gpu = await aiogpu.lease(num_gpus=2, name="notebook")
    waiting = asyncio.ensure_future(aiogpu.lease(num_gpus=1, name="later")._take())
    lost = asyncio.ensure_future(gpu.lost())
    async with viewer(path) as node:

        async def number_of(name: str) -> int:
            status = await node.status()
            return next((t.id for t in status.tasks if t.name == name), 0)

        while not await number_of("later"):
            await asyncio.sleep(0)
        kind, _ = await node.stop_task(END_LEASE, await number_of("later"))
        assert kind == "lease"
        with pytest.raises(TaskCancelledError, match="ended by the user"):
            await waiting
        number = await number_of("notebook")
        kind, before = await node.stop_task(END_LEASE, number)
        assert before is not None
        assert (kind, before.name) == ("lease", "notebook")
        assert "the lease notebook was ended by the user" in str(await lost)
        assert not gpu.is_held
        again = await aiogpu.lease(num_gpus=2, timeout=30)
        assert (await node.stop_task(END_LEASE, number))[0] == ""
        await again.release()
    await gpu.release()


async def test_only_leases_are_ended_as_leases(path: str, gate: Gate) -> None:
    running = crowd_tasks.occupies.remote(gate.path, "busy")
    await gate.entered("busy")
    async with viewer(path) as node, aiogpu.placement([{"GPU": 1}], name="group"):
        status = await node.status()
        kinds = {
            task.name: (await node.stop_task(END_LEASE, task.id))[0]
            for task in status.tasks
        }
        assert kinds == {"occupies": "task", "group": "placement"}
        assert (await node.stop_task(END_LEASE, 999))[0] == ""
    gate.release("busy")
    await running


async def test_a_list_needs_a_node(path: str) -> None:
    async with viewer(path) as node:
        await aiogpu.shutdown()
        with pytest.raises(NodeError):
            await node.list_tasks(TaskQuery())
