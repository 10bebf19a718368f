"""A node inside a program answers commands on its own socket, and harms nobody by it.

Found by them: `tests/cli/test_embedded_nodes.py`.
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
from aiogpu.api.session import current_session
from aiogpu.engines.local import LocalEngine
from aiogpu.observe.status_codec import status_codec
from aiogpu.runtime.callers import viewers
from aiogpu.wire.messages import (
    LIMIT,
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
from tests.support.until import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]
MANY = 20_000
CALLS = 300


@dataclass
class Embedded:
    """The node inside this program.

    Attributes:
        service: its own socket, as commands find it.
        engine: the node.
        answers: how long each status took that it was asked for.
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
        found = self.engine._supervisor._viewers
        return 0 if found is None else len(found._viewers)


@pytest.fixture
async def node(no_leaks: None) -> AsyncIterator[Embedded]:
    async with aiogpu.init(address="local", num_cpus=2, log_to_driver=False):
        engine = current_session().engine
        assert isinstance(engine, LocalEngine)
        yield Embedded(engine)


def ask(viewer: RawClient, count: int = 1, first: int = 1) -> None:
    viewer.say(*(Inquire(first + n, "status", 0) for n in range(count)))


async def test_a_viewer_asks_and_leaves(node: Embedded) -> None:
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
        assert not status_codec.load(answer.payload), "nothing has run there"
        viewer.say(Depart())
        await asyncio.to_thread(viewer.hear, Departed)
        assert node.viewers == 1
    await until(lambda: not node.viewers)


@pytest.mark.parametrize(
    ("joins", "said", "told"),
    [
        (False, Inquire(1, "status", 0), "takes no work"),
        (True, Submit(0, 1, 1, b""), "takes no work"),
        (True, LIMIT.to_bytes(4, "little") + b"x" * 9, "exceeds the limit"),
    ],
    ids=["unknown", "work", "huge"],
)
async def test_who_wants_more_than_answers_is_told_and_cut_off(
    node: Embedded, joins: bool, said: Any, told: str
) -> None:
    with RawClient(node.service) as viewer:
        if joins:
            await asyncio.to_thread(viewer.joined, only_looks=True)
        if isinstance(said, bytes):
            viewer.socket.sendall(said)
        else:
            viewer.say(said)
        *_, last = await asyncio.to_thread(viewer.hear_all)
        assert isinstance(last, Refused)
        assert told in last.reason
    await until(lambda: not node.viewers)
    assert await tasks.add.remote(1, 2) == 3


async def test_a_program_cannot_work_there(node: Embedded) -> None:
    with RawClient(node.service) as program:
        program.join(only_looks=False)
        (last,) = await asyncio.to_thread(program.hear_all)
        assert isinstance(last, Refused)
        assert "`aiogpu start --head` starts a node for several" in last.reason
    with RawClient(node.service) as old:
        old.join(only_looks=True, release="0.0.1")
        (last,) = await asyncio.to_thread(old.hear_all)
        assert isinstance(last, Refused)
        assert "this command 0.0.1" in last.reason


async def test_who_says_nothing_is_sent_away(
    node: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "WITHIN", 0.05)
    with RawClient(node.service) as silent:
        (last,) = await asyncio.to_thread(silent.hear_all)
        assert isinstance(last, Refused)
        assert "identify itself in 0.05 s" in last.reason


async def test_there_are_only_so_many(node: Embedded) -> None:
    with ExitStack() as ends:
        for _ in range(viewers.MOST):
            one = ends.enter_context(RawClient(node.service))
            await asyncio.to_thread(one.joined, only_looks=True)
        with RawClient(node.service) as last:
            (told,) = await asyncio.to_thread(last.hear_all)
            assert isinstance(told, Refused)
            assert "16 commands are watching this node already" in told.reason
    await until(lambda: not node.viewers)
    with RawClient(node.service) as next_one:
        await asyncio.to_thread(next_one.joined, only_looks=True)


async def test_a_flood_of_questions_takes_a_small_part_of_the_time(
    node: Embedded,
) -> None:
    with RawClient(node.service) as flood, RawClient(node.service) as other:
        for one in (flood, other):
            await asyncio.to_thread(one.joined, only_looks=True)
        sending = asyncio.to_thread(ask, flood, MANY)
        sent = asyncio.ensure_future(sending)
        await until(lambda: node.answers)
        began, before = time.perf_counter(), len(node.answers)
        for _ in range(CALLS):
            assert await tasks.add.remote(1, 2) == 3
        took = time.perf_counter() - began
        answers = node.answers[before:]
        # One of them may have been under way at the beginning, and one at the end.
        assert len(answers) <= took / viewers.LEAST_PAUSE + 2
        assert sum(answers) <= took / viewers.SHARE + 2 * max(answers, default=0.0)
        ask(other)
        await asyncio.to_thread(other.hear, ChildDone)
        assert len(node.answers) < MANY / 2, "the other one has waited for the flood"
        flood.socket.shutdown(2)  # what it still sends fails
        await asyncio.wait([sent])
        sent.exception()
    await until(lambda: not node.viewers)


@pytest.mark.parametrize("asks", [0, 1, MANY])
async def test_a_viewer_that_reads_nothing_does_not_delay_the_end(asks: int) -> None:
    async with aiogpu.init(address="local", num_cpus=2, log_to_driver=False) as here:
        engine = current_session().engine
        assert isinstance(engine, LocalEngine)
        node = Embedded(engine)
        with RawClient(node.service) as viewer:
            await asyncio.to_thread(viewer.joined, only_looks=True)
            sent = asyncio.ensure_future(asyncio.to_thread(ask, viewer, asks))
            if asks:
                await until(lambda: node.answers)
            assert await tasks.add.remote(1, 2) == 3
            async with asyncio.timeout(viewers.WITHIN):
                await here.shutdown()
            assert not os.path.exists(node.service.path)
            await asyncio.wait([sent])
            if asks <= 1:
                *_, last = await asyncio.to_thread(viewer.hear_all)
                assert isinstance(last, Close)
            sent.exception()
