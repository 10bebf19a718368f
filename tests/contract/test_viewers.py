"""A node inside a program answers commands on its own socket, at little cost.

How commands find the node: `tests/cli/test_embedded_nodes.py`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

import aiogpu
from aiogpu.api.session import find_session
from aiogpu.engines.local import LocalEngine
from aiogpu.observe.status_codec import status_codec
from aiogpu.observe.task_list import TaskQuery
from aiogpu.runtime.callers import viewers
from aiogpu.wire.messages import (
    LIMIT,
    TASKS,
    ChildDone,
    ChildFailed,
    Close,
    Depart,
    Departed,
    Inquire,
    Refused,
    Submit,
    socket_path,
)
from tests.contract import tasks
from tests.contract.raw_client import RawClient, Service
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]
MANY = 20_000
CALLS = 300


@dataclass
class Embedded:
    """The node inside this program.

    Attributes:
        service: the node's own socket, as commands find it.
        engine: the node.
        answers: seconds that each answer to a request for the status took.
    """

    engine: LocalEngine
    answers: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        directory = self.engine._supervisor.directory
        self.service = Service(socket_path(directory), os.getpid())
        status = self.engine.status

        async def timed() -> aiogpu.types.NodeStatus:
            began = time.perf_counter()
            try:
                return await status()
            finally:
                self.answers.append(time.perf_counter() - began)

        self.engine.status = timed  # type: ignore[method-assign]

    @property
    def viewers(self) -> int:
        viewers = self.engine._supervisor._viewers
        return 0 if viewers is None else len(viewers._viewers)


@pytest.fixture
async def node(no_leaks: None) -> AsyncIterator[Embedded]:
    async with aiogpu.init(address="local", num_cpus=2, log_to_driver=False):
        engine = find_session().engine
        assert isinstance(engine, LocalEngine)
        yield Embedded(engine)


async def refusal_of(client: RawClient, *, is_alone: bool = True) -> str:
    """Return why the node refused a client: its last message, or its only one."""
    *others, last = await asyncio.to_thread(client.hear_all)
    assert not (is_alone and others)
    assert isinstance(last, Refused)
    return last.reason


def ask(viewer: RawClient, count: int = 1, first: int = 1) -> None:
    viewer.say(*(Inquire(first + n, "status", 0) for n in range(count)))


async def test_a_viewer_gets_answers_and_leaves(node: Embedded) -> None:
    with RawClient(node.service) as viewer:
        welcome = await asyncio.to_thread(viewer.joined, only_looks=True)
        assert welcome.node == node.engine.home
        ask(viewer)
        answer = await asyncio.to_thread(viewer.hear, ChildDone)
        assert status_codec.load(answer.payload).total["CPU"] == 2
        viewer.say(Inquire(2, "weather", 0), Inquire(3, "timeline", 0))
        failed = await asyncio.to_thread(viewer.hear, ChildFailed)
        assert "cannot answer 'weather'" in str(failed)
        answer = await asyncio.to_thread(viewer.hear, ChildDone)
        assert not status_codec.load(answer.payload), "no task has run"
        viewer.say(Depart())
        await asyncio.to_thread(viewer.hear, Departed)
        assert node.viewers == 1
    await until(lambda: not node.viewers)


@pytest.mark.parametrize(
    ("joins", "message", "refusal"),
    [
        (False, Inquire(1, "status", 0), "takes no work"),
        (True, Submit(0, 1, 1, b""), "takes no work"),
        (True, LIMIT.to_bytes(4, "little") + b"x" * 9, "exceeds the limit"),
    ],
    ids=["unknown", "work", "huge"],
)
async def test_a_viewer_that_asks_for_work_is_cut_off(
    node: Embedded, joins: bool, message: Any, refusal: str
) -> None:
    with RawClient(node.service) as viewer:
        if joins:
            await asyncio.to_thread(viewer.joined, only_looks=True)
        if isinstance(message, bytes):
            viewer.socket.sendall(message)
        else:
            viewer.say(message)
        assert refusal in await refusal_of(viewer, is_alone=False)
    await until(lambda: not node.viewers)
    assert await tasks.add.remote(1, 2) == 3


async def test_a_program_may_not_join_an_embedded_node(node: Embedded) -> None:
    refusals: dict[str, dict[str, Any]] = {
        "`aiogpu start --head` starts a node for several": {"only_looks": False},
        "this command 0.0.1": {"only_looks": True, "release": "0.0.1"},
    }
    for refusal, request in refusals.items():
        with RawClient(node.service) as client:
            client.join(**request)
            assert refusal in await refusal_of(client)


async def test_silent_clients_are_cut_off(
    node: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "WITHIN", 0.05)
    with RawClient(node.service) as silent:
        assert "identify itself in 0.05 s" in await refusal_of(silent)


async def test_the_number_of_viewers_is_limited(node: Embedded) -> None:
    with ExitStack() as ends:
        for _ in range(viewers.MOST):
            viewer = ends.enter_context(RawClient(node.service))
            await asyncio.to_thread(viewer.joined, only_looks=True)
        with RawClient(node.service) as last:
            refusal = await refusal_of(last)
            assert "16 commands are watching this node already" in refusal
    await until(lambda: not node.viewers)
    with RawClient(node.service) as viewer:
        await asyncio.to_thread(viewer.joined, only_looks=True)


async def test_a_flood_of_questions_takes_little_time(node: Embedded) -> None:
    with RawClient(node.service) as flood, RawClient(node.service) as other:
        for client in (flood, other):
            await asyncio.to_thread(client.joined, only_looks=True)
        sent = asyncio.ensure_future(asyncio.to_thread(ask, flood, MANY))
        await until(lambda: node.answers)
        began, before = time.perf_counter(), len(node.answers)
        for _ in range(CALLS):
            assert await tasks.add.remote(1, 2) == 3
        took = time.perf_counter() - began
        answers = node.answers[before:]
        # An answer may have been in progress at the beginning, and at the end.
        assert len(answers) <= took / viewers.LEAST_PAUSE + 2
        assert sum(answers) <= took / viewers.SHARE + 2 * max(answers, default=0.0)
        ask(other)
        await asyncio.to_thread(other.hear, ChildDone)
        assert len(node.answers) < MANY / 2, "the other client waited for the flood"
        flood.socket.shutdown(2)  # further questions fail
        await asyncio.wait([sent])
        sent.exception()
    await until(lambda: not node.viewers)


async def test_a_long_search_delays_no_other_viewer(
    node: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause after a list of tasks concerns lists alone."""
    monkeypatch.setattr(viewers, "SHARE", 1_000_000)
    query = status_codec.dump(TaskQuery("waiting"))
    with RawClient(node.service) as searches, RawClient(node.service) as other:
        for client in (searches, other):
            await asyncio.to_thread(client.joined, only_looks=True)
        searches.say(Inquire(1, TASKS, 0, query=query))
        page = await asyncio.to_thread(searches.hear, ChildDone)
        assert status_codec.load(page.payload).total == 0
        ask(other)
        await asyncio.to_thread(other.hear, ChildDone)
    await until(lambda: not node.viewers)


@pytest.mark.parametrize("asks", [0, 1, MANY])
async def test_a_stalled_viewer_delays_no_close(node: Embedded, asks: int) -> None:
    with RawClient(node.service) as viewer:
        await asyncio.to_thread(viewer.joined, only_looks=True)
        sent = asyncio.ensure_future(asyncio.to_thread(ask, viewer, asks))
        if asks:
            await until(lambda: node.answers)
        assert await tasks.add.remote(1, 2) == 3
        async with asyncio.timeout(viewers.WITHIN):
            await aiogpu.shutdown()
        assert not os.path.exists(node.service.path)
        await asyncio.wait([sent])
        if asks <= 1:
            *_, last = await asyncio.to_thread(viewer.hear_all)
            assert isinstance(last, Close)
        sent.exception()
