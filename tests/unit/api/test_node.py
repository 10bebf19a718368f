"""[B1] [B6] `init` and `shutdown` as users write them, over an engine of paper."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.api import session as module
from aiogpu.api.node import node_of
from aiogpu.api.results.handle import session_of
from aiogpu.api.session import Session
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import NodeClosedError, NodeRunningError, NodeStartError
from tests.unit.api.paper_engine import PaperEngine


class Makers:
    """Stands where engines are made; gives those of paper, one after the other."""

    def __init__(self) -> None:
        self.engine = PaperEngine()
        self.asked: list[tuple[str | None, NodeOptions]] = []

    def create(
        self,
        address: str | None,
        options: NodeOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> PaperEngine:
        if self.asked:
            self.engine = PaperEngine()
        self.asked.append((address, options))
        return self.engine


@pytest.fixture(autouse=True)
def makers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Makers]:
    makers = Makers()
    monkeypatch.setattr(module, "create_engine", makers.create)
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    yield makers
    left = dict(module.sessions)
    module.sessions.clear()
    assert left == {}, "a session was not forgotten"


async def opening_of(opening: Any) -> Session:
    session: Session = await opening
    return session


async def step() -> None:
    """Let every task that is ready run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_is_awaited(makers: Makers) -> None:
    session = await aiogpu.init(num_cpus=2, num_gpus=1)
    assert session.is_open
    assert session is node_of(session_of(asyncio.get_running_loop()))
    assert makers.asked == [(None, NodeOptions(num_cpus=2.0, num_gpus=1))]
    await aiogpu.shutdown()
    await aiogpu.shutdown()
    assert makers.engine.story == ["open", "opened", "close", "closed"]


async def test_whether_there_is_one(makers: Makers) -> None:
    assert not aiogpu.is_initialized()
    async with aiogpu.init() as node:
        assert aiogpu.is_initialized()
        assert not await asyncio.to_thread(aiogpu.is_initialized)
        await node.shutdown()
        assert not aiogpu.is_initialized()
    assert not aiogpu.is_initialized()


def test_there_is_none_without_a_loop() -> None:
    assert not aiogpu.is_initialized()


async def test_it_is_a_block(makers: Makers) -> None:
    async with aiogpu.init() as session:
        assert session.is_open
    assert makers.engine.story[-1] == "closed"
    with pytest.raises(KeyError):
        async with aiogpu.init():
            raise KeyError("a")
    assert makers.engine.story[-1] == "closed"


async def test_nothing_is_made_before_it_is_awaited(makers: Makers) -> None:
    opening = aiogpu.init()
    assert makers.asked == []
    async with opening:
        assert len(makers.asked) == 1


@pytest.mark.parametrize(
    ("variable", "given", "address"),
    [
        (None, None, None),
        ("", None, None),
        ("local", None, "local"),
        ("elsewhere", "local", "local"),
    ],
)
async def test_the_address(
    variable: str | None,
    given: str | None,
    address: str | None,
    makers: Makers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("AIOGPU_ADDRESS", variable)
    async with aiogpu.init(address=given):
        assert makers.asked[0][0] == address


async def test_one_node_for_each_loop(makers: Makers) -> None:
    async with aiogpu.init():
        with pytest.raises(NodeRunningError, match=r"aiogpu\.shutdown\(\).*share it"):
            await aiogpu.init()
        with pytest.raises(NodeRunningError):
            async with aiogpu.init():
                raise AssertionError("there are two")
        assert len(makers.asked) == 1
    async with aiogpu.init():
        assert len(makers.asked) == 2


async def test_a_node_is_shared_by_who_says_so(makers: Makers) -> None:
    """The inner block ends nothing: it is not its own."""
    async with aiogpu.init() as outer:
        assert await aiogpu.init(ignore_reinit_error=True) is outer
        async with aiogpu.init(ignore_reinit_error=True) as inner:
            assert inner is outer
        assert outer.is_open
    assert len(makers.asked) == 1
    async with aiogpu.init(ignore_reinit_error=True) as own:
        assert own is not outer
    assert makers.engine.story[-1] == "closed"


async def test_who_shares_a_node_waits_until_it_is_open(makers: Makers) -> None:
    makers.engine.may_open.clear()
    first = asyncio.ensure_future(opening_of(aiogpu.init()))
    second = asyncio.ensure_future(opening_of(aiogpu.init(ignore_reinit_error=True)))
    await step()
    assert not second.done()
    makers.engine.may_open.set()
    assert await second is await first
    await aiogpu.shutdown()


async def test_what_keeps_it_from_opening(makers: Makers) -> None:
    makers.engine.open_error = NodeStartError("no zygote")
    with pytest.raises(NodeStartError, match="no zygote"):
        await aiogpu.init()
    with pytest.raises(KeyError, match="another"):
        async with aiogpu.init():
            raise KeyError("another is opened all the same")


async def test_cancelling_it_takes_it_back(makers: Makers) -> None:
    makers.engine.may_open.clear()
    task = asyncio.ensure_future(opening_of(aiogpu.init()))
    await step()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert makers.engine.story == ["open"]
    assert session_of(asyncio.get_running_loop()) is None


@pytest.mark.parametrize(
    "wait", [lambda: opening_of(aiogpu.init()), aiogpu.cluster_resources, aiogpu.status]
)
async def test_a_shutdown_by_another_is_told_to_who_waits(
    wait: Any, makers: Makers
) -> None:
    """It is an error there and no cancellation, for nobody cancelled that task."""
    makers.engine.may_open.clear()
    task = asyncio.ensure_future(wait())
    await step()
    await aiogpu.shutdown()
    with pytest.raises(NodeClosedError, match="before it was open"):
        await task
    assert not task.cancelled()


async def test_it_waits_for_a_shutdown_that_has_begun(makers: Makers) -> None:
    await aiogpu.init()
    first = makers.engine
    first.may_close.clear()
    closing = asyncio.ensure_future(aiogpu.shutdown())
    await step()
    task = asyncio.ensure_future(opening_of(aiogpu.init()))
    await step()
    assert len(makers.asked) == 1
    first.may_close.set()
    session = await task
    assert session.is_open
    assert first.story[-1] == "closed"
    await closing
    await session.shutdown()


async def test_a_question_opens_a_node(makers: Makers) -> None:
    """[B5] [B8]"""
    found = await aiogpu.cluster_resources()
    assert {"CPU": 4.0}.items() <= found.items()
    found = await aiogpu.available_resources()
    assert {"CPU": 3.0}.items() <= found.items()
    assert await aiogpu.status() == "status"
    assert makers.asked == [(None, NodeOptions())]
    await aiogpu.shutdown()


async def test_shutdown_where_there_is_no_node(makers: Makers) -> None:
    await aiogpu.shutdown()
    assert makers.asked == []


def test_forgetting_to_await_it_is_told_where_it_was_called() -> None:
    with pytest.warns(RuntimeWarning, match=r"never awaited.*async with") as caught:
        aiogpu.init()
    assert [warning.filename for warning in caught] == [__file__]


async def test_one_that_was_used_is_dropped_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(aiogpu.errors.MisuseError), aiogpu.init():  # type: ignore[attr-defined]
            pass
        async with aiogpu.init():
            pass
        gc.collect()
