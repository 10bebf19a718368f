"""[B5] [B6] The tie between a loop and its node, over an engine of paper."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

import aiogpu
from aiogpu.api import session as module
from aiogpu.api import session as sessions
from aiogpu.api.node import node_of
from aiogpu.api.results.handle import session_of
from aiogpu.api.session import (
    Session,
    SessionState,
    current_session,
    default_address,
    start_session,
)
from aiogpu.client.current import current
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import (
    InfeasibleError,
    NodeClosedError,
    NodeError,
    NodeStartError,
    NoLoopError,
)
from aiogpu.serialization.serializer import dump_result
from tests.unit.api.paper_engine import PaperEngine, func

LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(uvloop.new_event_loop, id="uvloop"),
]


@pytest.fixture(autouse=True)
def no_sessions_left() -> Iterator[None]:
    assert module.sessions == {}
    yield
    left = dict(module.sessions)
    module.sessions.clear()
    assert left == {}, "a session was not forgotten"


@pytest.fixture
def engine() -> PaperEngine:
    return PaperEngine()


@pytest.fixture
async def complaints() -> list[dict[str, Any]]:
    """What asyncio tells the loop's exception handler."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
    return told


def opening(engine: PaperEngine) -> Session:
    session = Session(engine, asyncio.get_running_loop())  # type: ignore[arg-type]
    session.start_opening()
    return session


@asynccontextmanager
async def block(engine: PaperEngine) -> AsyncIterator[Session]:
    """The block of `async with aiogpu.init()`."""
    session = opening(engine)
    async with node_of(session):
        yield session


async def opened(engine: PaperEngine) -> Session:
    session = opening(engine)
    await session.opened()
    return session


async def ended(awaitable: asyncio.Future[Any]) -> Any:
    (found,) = await asyncio.gather(awaitable, return_exceptions=True)
    return found


async def test_its_life(engine: PaperEngine) -> None:
    session = opening(engine)
    loop = asyncio.get_running_loop()
    assert session_of(loop) is session is current_session()
    assert not session.is_open
    assert repr(session) == "<Session opening <PaperEngine>>"
    await session.opened()
    assert session.is_open
    assert repr(session) == "<Session open <PaperEngine>>"
    await session.shutdown()
    assert not session.is_open
    assert repr(session) == "<Session closed <PaperEngine>>"
    assert session_of(loop) is None
    assert engine.story == ["open", "opened", "close", "closed"]


async def test_it_passes_questions_on(engine: PaperEngine) -> None:
    session = opening(engine)
    node = node_of(session)
    with pytest.raises(NodeClosedError):
        await node.status()
    await session.opened()
    assert await node.cluster_resources() == {"CPU": 4.0}
    assert await node.available_resources() == {"CPU": 3.0}
    assert await node.status() == "status"
    found = await aiogpu.cluster_resources()
    assert {"CPU": 4.0}.items() <= found.items()
    found = await aiogpu.available_resources()
    assert {"CPU": 3.0}.items() <= found.items()
    assert await aiogpu.status() == "status"
    await aiogpu.shutdown()
    for ask in (node.cluster_resources, node.available_resources, node.status):
        with pytest.raises(NodeClosedError, match=r"aiogpu\.init"):
            await ask()


async def test_a_call(engine: PaperEngine) -> None:
    session = await opened(engine)
    handle = session.submit(func(), b"")
    assert (handle.task_name, handle.task_id) == ("train", 1)
    engine.receivers[1].settle(dump_result(3))
    assert await handle == 3
    session.submit(func(), b"").cancel()
    assert engine.story[2:] == ["submit train", "submit train", "cancel 2"]
    engine.infeasible.add("train")
    with pytest.raises(InfeasibleError):
        session.submit(func(), b"")
    await session.shutdown()
    with pytest.raises(NodeClosedError):
        session.submit(func(), b"")


async def test_why(engine: PaperEngine) -> None:
    """[B23]"""
    engine.may_open.clear()
    session = opening(engine)
    early = session.submit(func(), b"")
    why = await early.why()
    assert (why.state, str(why)) == (
        "opening",
        "train waits for its node, which is being opened.",
    )
    engine.may_open.set()
    await session.opened()
    assert (await early.why()).state == "running"
    engine.ended.add(1)
    assert str(await early.why()) == "train (task 1) has ended."
    assert engine.story[3:] == ["why 1", "why 1"]
    session.after_fork()
    with pytest.raises(NodeError, match="fork"):
        await early.why()
    session._state = SessionState.OPEN
    await session.shutdown()


async def test_early_calls_are_made_in_order_once_it_is_open(
    engine: PaperEngine,
) -> None:
    engine.infeasible.add("huge")
    engine.may_open.clear()
    session = opening(engine)
    names = ("a", "b", "huge", "c")
    first, cancelled, huge, last = (session.submit(func(n), b"") for n in names)
    assert [h.task_id for h in (first, cancelled, huge, last)] == [0, 0, 0, 0]
    assert cancelled.cancel()
    assert engine.story == ["cancel 0"]
    engine.may_open.set()
    await session.opened()
    assert engine.story[1:] == ["open", "opened", "submit a", "submit c"]
    assert (first.task_id, last.task_id) == (1, 2)
    assert isinstance(await ended(huge), InfeasibleError)
    last.cancel()
    assert engine.story[-1] == "cancel 2"
    assert cancelled.cancelled()
    await session.shutdown()


@pytest.mark.parametrize("error", [NodeStartError("no zygote"), OSError("no socket")])
async def test_what_keeps_it_from_opening_is_told_to_all(
    error: Exception, engine: PaperEngine, complaints: list[dict[str, Any]]
) -> None:
    engine.open_error = error
    session = opening(engine)
    handles = [session.submit(func(), b"") for _ in range(2)]
    assert [await ended(handle) for handle in handles] == [error, error]
    with pytest.raises(type(error)):
        await session.opened()
    with pytest.raises(NodeClosedError):
        session.submit(func(), b"")
    assert session_of(asyncio.get_running_loop()) is None
    await session.shutdown()
    await aiogpu.shutdown()
    assert engine.story == ["open"]
    del session, handles
    gc.collect()
    assert complaints == []


async def test_the_handles_alone_tell_why_it_did_not_open(
    engine: PaperEngine, complaints: list[dict[str, Any]]
) -> None:
    engine.open_error = OSError("no socket")
    session = opening(engine)
    handle = session.submit(func(), b"")
    assert isinstance(await ended(handle), OSError)
    del session, handle
    gc.collect()
    assert complaints == []


async def test_shutdown_while_it_cannot_open(engine: PaperEngine) -> None:
    """Who shuts down does not care why it did not open."""
    engine.may_open.clear()
    engine.open_error = OSError("no socket")
    session = opening(engine)
    closing = asyncio.ensure_future(session.shutdown())
    await asyncio.sleep(0)
    engine.may_open.set()
    await closing
    assert engine.story == ["open"]


async def test_shutdown_while_it_opens(engine: PaperEngine) -> None:
    """It may hang in an import of the user's, so it is not waited for."""
    engine.may_open.clear()
    session = opening(engine)
    closing = asyncio.ensure_future(session.shutdown())
    await asyncio.sleep(0)
    handle = session.submit(func(), b"")
    await closing
    assert engine.story == ["open"]
    with pytest.raises(NodeClosedError, match="given up before it was open"):
        await handle


async def test_shutdown_is_done_once(engine: PaperEngine) -> None:
    session = await opened(engine)
    engine.may_close.clear()
    closings = [asyncio.ensure_future(session.shutdown()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert repr(session) == "<Session closing <PaperEngine>>"
    assert session_of(asyncio.get_running_loop()) is session
    with pytest.raises(NodeClosedError):
        session.submit(func(), b"")
    closings[0].cancel()
    assert isinstance(await ended(closings[0]), asyncio.CancelledError)
    engine.may_close.set()
    await asyncio.gather(*closings[1:])
    await session.shutdown()
    assert engine.story == ["open", "opened", "close", "closed"]


async def test_a_second_ctrl_c_in_its_block_hastens(engine: PaperEngine) -> None:
    """`asyncio.run` raises it wherever it lands, here in the program's own code."""

    async def main() -> None:
        async with block(engine):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await main()
    assert engine.story == ["open", "opened", "force_close", "close", "closed"]


async def test_a_shutdown_under_way_is_hastened(engine: PaperEngine) -> None:
    session = await opened(engine)
    engine.may_close.clear()
    orderly = asyncio.ensure_future(session.shutdown())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    at_once = asyncio.ensure_future(session.shutdown(at_once=True))
    await asyncio.sleep(0)
    engine.may_close.set()
    await asyncio.gather(orderly, at_once)
    await session.shutdown(at_once=True)
    assert engine.story == ["open", "opened", "close", "force_close", "closed"]


async def test_an_error_of_closing_is_told_and_the_loop_is_free(
    engine: PaperEngine,
) -> None:
    session = await opened(engine)
    engine.close_error = OSError("busy")
    with pytest.raises(OSError, match="busy"):
        await session.shutdown()
    assert session_of(asyncio.get_running_loop()) is None


async def test_it_is_a_block(engine: PaperEngine) -> None:
    async with block(engine) as session:
        assert session.is_open
    assert engine.story[-1] == "closed"
    engine = PaperEngine()
    with pytest.raises(KeyError):
        async with block(engine):
            raise KeyError("a")
    assert engine.story[-1] == "closed"


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("when", ["opening", "open"])
def test_it_closes_with_its_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], when: str, engine: PaperEngine
) -> None:
    """Nobody shuts it down; `shutdown_asyncgens` does."""
    told: list[dict[str, Any]] = []

    async def main() -> aiogpu.Handle[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _, w: told.append(w))
        if when == "opening":
            engine.may_open.clear()
            session = opening(engine)
        else:
            session = await opened(engine)
        handle = session.submit(func(), b"")
        await asyncio.sleep(0)
        return handle

    with asyncio.Runner(loop_factory=new_loop) as runner:
        handle = runner.run(main())
    if when == "open":
        assert engine.story[-2:] == ["close", "closed"]
    else:
        # The loop's end cancels the opening, which takes back what it made.
        assert engine.story == ["open"]
        with pytest.raises(NodeClosedError, match="given up before it was open"):
            handle.result()
    assert told == []


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_shutdown_cut_short_is_begun_anew(
    new_loop: Callable[[], asyncio.AbstractEventLoop], engine: PaperEngine
) -> None:
    """Ctrl-C in the last `await`: the loop cancels all tasks, then closes it."""

    async def main() -> None:
        session = await opened(engine)
        engine.may_close.clear()
        closing = asyncio.ensure_future(session.shutdown())
        while engine.story[-1] != "close":
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(engine.may_close.set)
        closing.cancel()
        # As `asyncio.Runner` does on its way out.
        inner = session._closing
        assert inner is not None
        inner.cancel()
        assert isinstance(await ended(inner), asyncio.CancelledError)
        with suppress(asyncio.CancelledError):
            await closing

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert engine.story == ["open", "opened", "close", "force_close", "close", "closed"]


async def test_a_fork_is_inert(
    engine: PaperEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(engine)
    story = list(engine.story)
    parent = session._pid
    monkeypatch.setattr(session, "_state", session._state)
    session.after_fork()
    assert session.is_forked
    with pytest.raises(NodeError, match=f"belongs to process {parent}"):
        session.submit(func(), b"")
    with pytest.raises(NodeError, match="fork"):
        await node_of(session).status()
    await session.shutdown()
    session.close_now()
    assert engine.story == story
    monkeypatch.undo()
    assert session.is_open
    await session.shutdown()


async def test_a_process_that_is_not_its_own_leaves_it_alone(
    engine: PaperEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fork was made by other means than `os.fork`."""
    session = await opened(engine)
    monkeypatch.setattr(session, "_pid", os.getpid() + 1)
    await session.shutdown()
    session.close_now()
    assert engine.story == ["open", "opened"]
    monkeypatch.undo()
    await session.shutdown()


def test_a_fork_without_a_loop_says_whose_it_is(engine: PaperEngine) -> None:
    async def main() -> None:
        async with block(engine) as session:
            session._state = SessionState.FORKED
            await asyncio.get_running_loop().run_in_executor(None, ask)
            session._state = SessionState.OPEN

    def ask() -> None:
        with pytest.raises(NodeError, match="belongs to process"):
            current_session()

    asyncio.run(main())


async def test_what_the_interpreter_leaves_is_abandoned(engine: PaperEngine) -> None:
    session = await opened(engine)
    sessions._close_all_now()
    assert engine.story[-1] == "close_now"
    await session.shutdown()
    sessions._close_all_now()
    assert engine.story.count("close_now") == 1


async def test_each_loop_has_its_own(engine: PaperEngine) -> None:
    other = PaperEngine()

    async def main() -> None:
        async with block(other) as session:
            assert current_session() is session

    async with block(engine) as session:
        await asyncio.get_running_loop().run_in_executor(None, asyncio.run, main())
        assert current_session() is session
    assert other.story == engine.story


def test_without_a_loop_there_is_none() -> None:
    with pytest.raises(NoLoopError, match=r"^\.remote.*aiogpu\.run\(main\(\)\)"):
        current_session()
    with pytest.raises(NoLoopError, match=r"^aiogpu\.get_actor\(\) needs a running"):
        aiogpu.get_actor("model")


async def test_a_worker_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "worker", 1)
    with pytest.raises(NodeError, match=r"the node cannot be reached inside"):
        current_session()
    with pytest.raises(NodeError, match=r"aiogpu\.init\(\) cannot be"):
        await aiogpu.init()
    for ask in (aiogpu.status, aiogpu.cluster_resources, aiogpu.available_resources):
        told = rf"aiogpu\.{ask.__name__}\(\) was called inside a task; only the program"
        with pytest.raises(NodeError, match=told):
            await ask()


@pytest.mark.parametrize(
    ("value", "address"), [(None, None), ("", None), ("local", "local")]
)
def test_the_default_address(
    value: str | None, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    if value is not None:
        monkeypatch.setenv("AIOGPU_ADDRESS", value)
    assert default_address() == address


async def test_an_unknown_address_makes_no_session() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(aiogpu.OptionError, match="nowhere"):
        start_session("nowhere", NodeOptions(), loop)
    assert session_of(loop) is None
