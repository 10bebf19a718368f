"""`wait` and `as_completed` in programs and in tasks."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.api.results.base import UNREAD
from aiogpu.api.results.blocking import BlockingHandle
from aiogpu.api.results.handle import Handle
from aiogpu.client.current import current
from aiogpu.errors import MisuseError, NoLoopError, OptionError
from aiogpu.serialization.serializer import dump_result
from tests.support.waits import turns
from tests.unit.api.fakes import (
    UNREADABLE,
    FakeChannel,
    Owner,
    done,
    failed,
    start_children,
    started,
    task_client_on,
)


@pytest.fixture
def owner() -> Owner:
    return Owner()


def callbacks(*handles: Any) -> int:
    """Count the callbacks of handles; a handle without callbacks has no waiter."""
    return sum(handle._callbacks_added for handle in handles)


@pytest.mark.parametrize("timeout", [0, 0.001])
async def test_wait_returns_ended_handles_after_its_timeout(
    owner: Owner, timeout: float
) -> None:
    a, b, c = owner.start(3)
    b.settle(UNREADABLE)
    assert await aiogpu.wait([a, b], num_returns=2, timeout=timeout) == ([b], [a])
    assert await aiogpu.wait([a], timeout=timeout) == ([], [a])
    assert (callbacks(a), owner.cancelled) == (0, [])
    asyncio.get_running_loop().call_soon(c.settle, UNREADABLE)
    assert await aiogpu.wait([c], timeout=timeout) == ([c], []), "it has arrived"


# `as_completed` on a loop.


async def test_as_completed_yields_handles_as_they_end(owner: Owner) -> None:
    a, b, c, d = handles = owner.start(4)
    b.settle(UNREADABLE)
    completed: Any = aiogpu.as_completed(handles)
    assert repr(completed) == "<as_completed: 4 handles to come>"
    assert await anext(completed) is b
    task = await started(anext(completed))
    d.settle(KeyError())
    d.exception()
    a.cancel()
    c.settle(dump_result("third"))
    assert await task is d
    assert [handle async for handle in completed] == [a, c]
    assert await c == "third"
    with pytest.raises(StopAsyncIteration):
        await anext(completed)
    assert b.raw == UNREADABLE
    assert b._value is UNREAD
    empty = aiogpu.as_completed([])
    assert empty, "an empty one is true as well"
    assert [handle async for handle in empty] == []


async def test_leaving_as_completed_only_removes_callbacks(owner: Owner) -> None:
    a, b, c = handles = owner.start(3)

    async def first() -> Any:
        async for handle in aiogpu.as_completed(handles):
            return handle
        raise AssertionError

    a.settle(UNREADABLE)
    assert await first() is a
    gc.collect()
    await turns()
    assert callbacks(b, c) == 0
    assert owner.cancelled == []


# Cost.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count calls of functions, including comparisons of handles."""
    count: Counter[str] = Counter()

    def same(one: object, other: object) -> bool:
        return one is other

    for kind in (Handle, BlockingHandle):
        monkeypatch.setattr(kind, "__eq__", same, raising=False)
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _argument: count.update([event]))
    yield count
    sys.setprofile(before)


@pytest.mark.parametrize("order", [1, -1])
async def test_cost_per_handle_does_not_depend_on_their_number(
    owner: Owner, order: int, calls: Counter[str]
) -> None:
    costs = []
    for count in (300, 3000):
        handles = owner.start(count)
        calls.clear()
        completed: Any = aiogpu.as_completed(handles)
        for handle in handles[::order]:
            if handle.task_id % 100 == 0:
                task = await started(anext(completed), 1)
                handle.settle(UNREADABLE)
                await task
            else:
                handle.settle(UNREADABLE)
        assert len([handle async for handle in completed]) == count - count // 100
        assert await aiogpu.wait(handles, num_returns=count) == (handles, [])
        costs.append((calls["call"] + calls["c_call"]) / count)
    assert costs[1] < costs[0] * 1.1


# Refusals.


@pytest.mark.parametrize("name", ["wait", "as_completed"])
async def test_other_arguments_are_refused(owner: Owner, name: str) -> None:
    look = getattr(aiogpu, name)
    a, b = owner.start(2)
    future = asyncio.get_running_loop().create_future()
    for given, message in (
        (5, "takes a list of handles that .*, not 5"),
        ("text", "takes a list of handles that .*, not 'text'"),
        ([1, 2], "a list that contains 1, which is not a handle.*asyncio.wait"),
        ([future], "is not a handle"),
        (a, "not the single handle of train.* pass a list"),
        ([b, a, a], "<Handle train 1 pending> more than once"),
    ):
        with pytest.raises(MisuseError, match=rf"aiogpu\.{name}\(\) .*{message}"):
            look(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"num_returns": count}, "must be a whole") for count in (0, True, 1.0, "1")),
        ({"num_returns": 3}, "is more than the number of handles, 2"),
        *(({"timeout": time}, "must be a number") for time in (-1, True, "1")),
        *(({"timeout": float(time)}, "must be a number") for time in ("nan", "inf")),
    ],
)
async def test_invalid_options_are_refused(
    owner: Owner, options: dict[str, Any], message: str
) -> None:
    ((name, value),) = options.items()
    with pytest.raises(OptionError, match=f"{name}={value!r} {message}"):
        aiogpu.wait(owner.start(2), **options)


@pytest.mark.parametrize("name", ["wait", "as_completed"])
async def test_handles_of_another_loop_are_refused(owner: Owner, name: str) -> None:
    look, handles = getattr(aiogpu, name), owner.start(1)

    async def look_elsewhere() -> None:
        with pytest.raises(MisuseError, match="train belongs to another event loop"):
            look(handles)

    def look_without_a_loop() -> None:
        with pytest.raises(
            NoLoopError, match=rf"train belongs to one; call aiogpu.{name}\(\)"
        ):
            look(handles)
        with pytest.raises(NoLoopError, match=rf"^aiogpu.{name}\(\) needs a running"):
            look([])

    await asyncio.to_thread(asyncio.run, look_elsewhere())
    await asyncio.to_thread(look_without_a_loop)


def test_as_completed_works_in_a_plain_task(channel: FakeChannel) -> None:
    a, b, c, d = handles = start_children(4)
    completed = iter(aiogpu.as_completed(handles))
    channel.put(done(3), done(1), done(4), failed(2, KeyError("boom")))
    assert next(completed) is c
    assert channel.waits == [(1,), ()]
    for handle in aiogpu.as_completed([a, b]):
        assert handle is a
        break
    assert next(completed) is a
    assert (b.on_end, b.done()) != ((), True), "leaving the loop cancels nothing"
    second = iter(aiogpu.as_completed(handles))
    d.cancel()
    assert list(completed) == [d, b]
    with pytest.raises(StopIteration):
        next(completed)
    assert set(second) == set(handles)
    assert len(aiogpu.as_completed(handles)) == 4
    assert list(aiogpu.as_completed([])) == []
    assert aiogpu.as_completed([]), "an empty one is true as well"


def test_wait_and_as_completed_refuse_invalid_arguments_in_a_plain_task(
    channel: FakeChannel,
) -> None:
    a, b = start_children(2)
    for look, given, message in (
        (aiogpu.wait, a, "not the single handle of child"),
        (aiogpu.wait, [a, a], "more than once"),
        (aiogpu.as_completed, [a, 5], "which is not a handle"),
        (lambda given: aiter(aiogpu.as_completed(given)), [a], "without an event loop"),
    ):
        with pytest.raises(MisuseError, match=message):
            look(given)  # type: ignore[operator]
    current.client = task_client_on(channel)
    with pytest.raises(MisuseError, match="child belongs to another task"):
        aiogpu.wait([b])


async def test_as_completed_reports_only_its_waits(loop_channel: FakeChannel) -> None:
    handles = start_children(3)
    assert all(type(handle) is Handle for handle in handles)
    completed: Any = aiogpu.as_completed(handles)
    await turns()
    assert loop_channel.waits == [], "no handle was requested yet"
    task = await started(anext(completed))
    assert loop_channel.waits == [(1,)], "the first child stands for all"
    loop_channel.put(done(2))
    assert await task is handles[1]
    await turns()
    assert loop_channel.waits == [(1,), ()], "while the loop's body runs"
    loop_channel.put(done(1), done(3))
    assert {handle async for handle in completed} == {handles[0], handles[2]}
