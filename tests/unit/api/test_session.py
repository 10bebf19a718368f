"""The session of a loop: `init`, calls, and `shutdown`."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

import aiogpu
from aiogpu.api import session as module
from aiogpu.api.node import node_of
from aiogpu.api.results.handle import sessions
from aiogpu.api.session import Session, find_session
from aiogpu.client.current import current
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import (
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeError,
    NoLoopError,
)
from tests.support.waits import turns
from tests.unit.api.fakes import (
    FakeEngine,
    function_spec,
    opened,
    opening,
    outcome,
    started,
)

ORDERLY = ["open", "opened", "close", "closed"]


@pytest.fixture(autouse=True)
def no_sessions_left() -> Iterator[None]:
    assert module.sessions == {}
    yield
    remaining = dict(module.sessions)
    module.sessions.clear()
    assert remaining == {}


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that is not open yet."""
    return FakeEngine()


def call(session: Session, name: str = "train") -> Any:
    return session.submit(function_spec(name), b"")


# Opening, calls, closing.


async def test_early_calls_are_submitted_after_the_opening(engine: FakeEngine) -> None:
    engine.infeasible.add("huge")
    engine.may_open.clear()
    session = opening(engine)
    handles = [call(session, name) for name in ("a", "b", "huge", "c")]
    first, cancelled, huge, last = handles
    assert [handle.task_id for handle in handles] == [0, 0, 0, 0]
    assert cancelled.cancel()
    assert engine.story == ["cancel 0"]
    engine.may_open.set()
    await session.opened()
    assert engine.story[1:] == ["open", "opened", "submit a", "submit c"]
    assert (first.task_id, last.task_id) == (1, 2)
    assert isinstance(await outcome(huge), InfeasibleError)
    last.cancel()
    assert engine.story[-1] == "cancel 2"
    assert cancelled.cancelled()
    await session.shutdown()


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_error_of_the_opening_fails_all_calls(
    is_awaited: bool, engine: FakeEngine, complaints: list[str]
) -> None:
    engine.open_error = error = OSError("no socket")
    session = opening(engine)
    handles = [call(session) for _ in range(2)]
    assert [await outcome(handle) for handle in handles] == [error, error]
    if is_awaited:
        with pytest.raises(OSError, match="no socket"):
            await session.opened()
        with pytest.raises(NodeClosedError):
            call(session)
        await session.shutdown()
        await aiogpu.shutdown()
    assert sessions.get(asyncio.get_running_loop()) is None
    assert engine.story == ["open"]
    del session, handles
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("is_failing", [True, False])
async def test_shutdown_stops_an_opening(engine: FakeEngine, is_failing: bool) -> None:
    """`shutdown` does not wait, because the opening may hang in an import."""
    engine.may_open.clear()
    engine.open_error = OSError("ignored") if is_failing else None
    session = opening(engine)
    closing = await started(session.shutdown(), 1)
    handle = call(session)
    if is_failing:
        engine.may_open.set()
    await closing
    assert engine.story == ["open"]
    with pytest.raises(NodeClosedError, match="shut down before it was open"):
        await handle


async def test_shutdown_closes_the_engine_once(engine: FakeEngine) -> None:
    session = await opened(engine)
    engine.may_close.clear()
    closings = [await started(session.shutdown(), 2) for _ in range(3)]
    assert repr(session) == "<Session closing <FakeEngine>>"
    assert sessions.get(asyncio.get_running_loop()) is session
    with pytest.raises(NodeClosedError):
        call(session)
    closings[0].cancel()
    assert isinstance(await outcome(closings[0]), asyncio.CancelledError)
    engine.may_close.set()
    await asyncio.gather(*closings[1:])
    await session.shutdown()
    assert engine.story == ORDERLY


async def test_second_shutdown_can_force_the_first(engine: FakeEngine) -> None:
    session = await opened(engine)
    engine.may_close.clear()
    orderly = await started(session.shutdown(), 2)
    at_once = await started(session.shutdown(at_once=True), 1)
    engine.may_close.set()
    await asyncio.gather(orderly, at_once)
    await session.shutdown(at_once=True)
    assert engine.story == ["open", "opened", "close", "force_close", "closed"]


async def test_error_of_close_is_raised_and_frees_the_loop(engine: FakeEngine) -> None:
    session = await opened(engine)
    engine.close_error = OSError("busy")
    with pytest.raises(OSError, match="busy"):
        await session.shutdown()
    assert sessions.get(asyncio.get_running_loop()) is None


@pytest.mark.parametrize(
    "new_loop",
    [asyncio.new_event_loop, uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
)
@pytest.mark.parametrize("when", ["opening", "open"])
def test_session_closes_with_its_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], when: str, engine: FakeEngine
) -> None:
    """`shutdown_asyncgens` of the loop closes the session."""
    complaints: list[dict[str, Any]] = []

    async def main() -> aiogpu.Handle[Any]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        if when == "opening":
            engine.may_open.clear()
        session = opening(engine) if when == "opening" else await opened(engine)
        handle = call(session)
        await asyncio.sleep(0)
        return handle  # type: ignore[no-any-return]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        handle = runner.run(main())
    if when == "open":
        assert engine.story[-2:] == ["close", "closed"]
    else:
        # The end of the loop cancels the opening, which cleans up.
        assert engine.story == ["open"]
        with pytest.raises(NodeClosedError, match="shut down before it was open"):
            handle.result()
    assert complaints == []


# The ends of loops and processes.


async def test_exit_of_the_interpreter_closes_open_sessions(engine: FakeEngine) -> None:
    session = await opened(engine)
    module._close_all_now()
    assert engine.story[-1] == "close_now"
    await session.shutdown()
    module._close_all_now()
    assert engine.story.count("close_now") == 1


async def test_each_loop_has_its_own_session(engine: FakeEngine) -> None:
    other = FakeEngine()

    async def main() -> None:
        session = opening(other)
        async with node_of(session):
            assert find_session() is session

    session = opening(engine)
    async with node_of(session) as node:
        await asyncio.to_thread(asyncio.run, main())
        assert node is node_of(session)
        assert find_session() is session
    assert other.story == engine.story == ORDERLY


def test_calls_without_a_loop_are_refused() -> None:
    assert not aiogpu.is_initialized()
    for use, message in (
        (find_session, r"^\.remote.*aiogpu\.run\(main\(\)\)"),
        (lambda: aiogpu.get_actor("model"), r"^aiogpu\.get_actor\(\) needs a running"),
    ):
        with pytest.raises(NoLoopError, match=message):
            use()


async def test_worker_opens_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "worker", 1)
    with pytest.raises(NodeError, match=r"the node is not available inside"):
        find_session()
    with pytest.raises(NodeError, match=r"aiogpu\.init\(\) is not available"):
        await aiogpu.init()
    for ask in (aiogpu.status, aiogpu.cluster_resources, aiogpu.available_resources):
        name = rf"aiogpu\.{ask.__name__}\(\)"
        with pytest.raises(
            NodeError, match=f"{name} was called inside a task; only the program"
        ):
            await ask()


# `init` and `shutdown` as users write them.


class Engines:
    """A factory that makes an engine for each session.

    Attributes:
        made: all engines; the first one exists before the first request.
        requests: the address and the options of each request.
    """

    def __init__(self) -> None:
        self.made = [FakeEngine()]
        self.requests: list[tuple[str | None, NodeOptions]] = []

    def create(
        self, address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> FakeEngine:
        if self.requests:
            self.made.append(FakeEngine())
        self.requests.append((address, options))
        return self.made[-1]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr(module, "create_engine", engines.create)
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    return engines


async def test_init_opens_and_shutdown_closes_a_node(engines: Engines) -> None:
    node = await aiogpu.init(num_cpus=2, num_gpus=1)
    assert node.is_open
    assert node is node_of(sessions.get(asyncio.get_running_loop()))
    assert aiogpu.is_initialized()
    assert not await asyncio.to_thread(aiogpu.is_initialized)
    assert engines.requests == [(None, NodeOptions(num_cpus=2.0, num_gpus=1))]
    await aiogpu.shutdown()
    assert not aiogpu.is_initialized()
    await aiogpu.shutdown()
    assert engines.made[0].story == ORDERLY


@pytest.mark.parametrize("wait", [aiogpu.init, aiogpu.cluster_resources, aiogpu.status])
async def test_shutdown_fails_waiting_calls(wait: Any, engines: Engines) -> None:
    """The waiting task gets an error, because it was not cancelled itself."""
    engines.made[0].may_open.clear()
    task = await started(wait())
    await aiogpu.shutdown()
    with pytest.raises(NodeClosedError, match="before it was open"):
        await task
    assert not task.cancelled()


async def test_init_without_await_is_warned_of(engines: Engines) -> None:
    with pytest.warns(RuntimeWarning, match=r"never awaited.*async with") as caught:
        aiogpu.init()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MisuseError), aiogpu.init():  # type: ignore[attr-defined]
            pass
        async with aiogpu.init():
            await turns()
        gc.collect()
