"""[B14] [B15] `wait` and `as_completed` without a node: on loops, in plain tasks."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.api.results.handle import ChildHandle, Handle
from aiogpu.client.current import Context, current
from aiogpu.errors import MisuseError, NoLoopError, OptionError
from aiogpu.observe.why import Why
from aiogpu.serialization.serializer import dump_result
from tests.unit.api.paper_family import PaperChannel, done, failed, paper_children

UNREADABLE = b"garbage"


class Works:
    """Handles and what they cancel."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, task: int) -> None:
        self.cancelled.append(task)

    async def why(self, name: str, task: int) -> Why:
        return Why(name, task, "starting")

    def start(self, count: int) -> list[Any]:
        loop = asyncio.get_running_loop()
        handles: list[Any] = [Handle("train", self, loop) for _ in range(count)]
        for number, handle in enumerate(handles, 1):
            handle.task_id = number
        return handles


@pytest.fixture
def works() -> Works:
    return Works()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def soon(waiting: Any) -> asyncio.Task[Any]:
    async def ask() -> Any:
        return await waiting

    return asyncio.ensure_future(ask())


def callbacks(handle: Any) -> int:
    number: int = handle._callbacks_added
    return number


async def test_what_has_ended_comes_first_in_the_order_given(works: Works) -> None:
    a, b, c, d = handles = works.start(4)
    task = soon(aiogpu.wait(handles, num_returns=2))
    await settled()
    d.settle(UNREADABLE)
    await settled()
    assert not task.done()
    b.settle(UNREADABLE)
    assert await task == ([b, d], [a, c])
    assert [callbacks(handle) for handle in (a, c)] == [0, 0]
    assert await aiogpu.wait(handles) == ([b], [a, c, d]), "no more than asked for"
    assert await aiogpu.wait({d}) == ([d], [])


async def test_it_does_not_unpickle(works: Works) -> None:
    handles = works.start(2)
    for handle in handles:
        handle.settle(UNREADABLE)
    await aiogpu.wait(handles, num_returns=2)
    async for handle in aiogpu.as_completed(handles):
        assert handle._payload == UNREADABLE


async def test_errors_and_cancelled_ones_have_ended(works: Works) -> None:
    a, b, c = handles = works.start(3)
    task = soon(aiogpu.wait(handles, num_returns=3))
    await settled()
    a.settle(KeyError("boom"))
    b.cancel()
    c.settle(UNREADABLE)
    assert await task == ([a, b, c], [])
    with pytest.raises(KeyError):
        a.result()


@pytest.mark.parametrize("timeout", [0, 0.001])
async def test_time_is_up(works: Works, timeout: float) -> None:
    a, b = works.start(2)
    b.settle(UNREADABLE)
    assert await aiogpu.wait([a, b], num_returns=2, timeout=timeout) == ([b], [a])
    assert await aiogpu.wait([a], timeout=timeout) == ([], [a])
    assert (callbacks(a), works.cancelled) == (0, [])


async def test_to_look_is_to_read_what_has_come(works: Works) -> None:
    (a,) = works.start(1)
    asyncio.get_running_loop().call_soon(a.settle, UNREADABLE)
    assert await aiogpu.wait([a], timeout=0) == ([a], [])


async def test_a_timer_does_not_outlive_the_wait(works: Works) -> None:
    (a,) = works.start(1)
    task = soon(aiogpu.wait([a], timeout=1e9))
    await settled()
    a.settle(UNREADABLE)
    assert await task == ([a], [])


async def test_cancelling_a_wait_cancels_no_work(works: Works) -> None:
    """[B15] It looks; the work is not its own."""
    a, b = handles = works.start(2)
    task = soon(aiogpu.wait(handles))
    await settled()
    task.cancel()
    await asyncio.wait([task])
    assert (works.cancelled, a.done(), callbacks(b)) == ([], False, 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(aiogpu.wait(handles), 0.001)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(aiogpu.as_completed(handles)), 0.001)  # type: ignore[call-overload]
    assert works.cancelled == []


@pytest.mark.parametrize("kind", ["wait", "as_completed"])
async def test_work_that_is_looked_at_goes_on_without_its_waiters(
    works: Works, kind: str
) -> None:
    """[B15] Who looks wants to know how it ends."""
    (a,) = works.start(1)
    looks = soon(
        aiogpu.wait([a]) if kind == "wait" else anext(aiogpu.as_completed([a]))  # type: ignore[call-overload]
    )
    awaits = soon(a)
    await settled()
    awaits.cancel()
    await asyncio.wait([awaits])
    assert works.cancelled == []
    looks.cancel()
    await asyncio.wait([looks])
    assert works.cancelled == []
    del looks
    gc.collect()
    await settled()
    awaits = soon(a)
    await settled()
    awaits.cancel()
    await asyncio.wait([awaits])
    assert works.cancelled == [1], "nobody looks any more"


async def test_handles_come_as_they_end(works: Works) -> None:
    a, b, c, d = handles = works.start(4)
    b.settle(UNREADABLE)
    completed = aiogpu.as_completed(handles)
    assert repr(completed) == "<as_completed: 4 handles to come>"
    assert await anext(completed) is b  # type: ignore[call-overload]
    task = soon(anext(completed))  # type: ignore[call-overload]
    await settled()
    d.settle(KeyError())
    d.exception()
    a.cancel()
    c.settle(UNREADABLE)
    assert await task is d
    assert [handle async for handle in completed] == [a, c]
    with pytest.raises(StopAsyncIteration):
        await anext(completed)  # type: ignore[call-overload]


async def test_of_none_there_is_none(works: Works) -> None:
    completed = aiogpu.as_completed([])
    assert completed, "which is not its length"
    assert [handle async for handle in completed] == []


async def test_a_cancelled_step_is_not_the_end(works: Works) -> None:
    a, b = works.start(2)
    completed = aiogpu.as_completed([a, b])
    task = soon(anext(completed))  # type: ignore[call-overload]
    await settled()
    task.cancel()
    await asyncio.wait([task])
    a.settle(UNREADABLE)
    b.settle(UNREADABLE)
    assert [handle async for handle in completed] == [a, b]


async def test_leaving_the_loop_cancels_nothing_and_looks_no_more(works: Works) -> None:
    a, b, c = handles = works.start(3)

    async def first() -> Any:
        async for handle in aiogpu.as_completed(handles):
            return handle
        raise AssertionError

    a.settle(UNREADABLE)
    assert await first() is a
    gc.collect()
    await settled()
    assert [callbacks(handle) for handle in (b, c)] == [0, 0]
    assert works.cancelled == []


async def test_one_task_iterates(works: Works) -> None:
    (a,) = works.start(1)
    completed = aiogpu.as_completed([a])
    task = soon(anext(completed))  # type: ignore[call-overload]
    await settled()
    with pytest.raises(MisuseError, match="let one task iterate"):
        await anext(completed)  # type: ignore[call-overload]
    a.settle(UNREADABLE)
    assert await task is a


async def test_ten_thousand_handles(works: Works) -> None:
    """Each step costs the same, however many there are."""
    count = 10_000
    for order in (1, -1):
        handles = works.start(count)
        begun = time.perf_counter()
        completed = aiogpu.as_completed(handles)
        for handle in handles[::order]:
            task = soon(anext(completed)) if handle.task_id % 100 == 0 else None  # type: ignore[call-overload]
            if task is not None:
                await asyncio.sleep(0)
            handle.settle(UNREADABLE)
            if task is not None:
                await task
        left = [handle async for handle in completed]
        assert len(left) == count - count // 100
        assert await aiogpu.wait(handles, num_returns=count) == (handles, [])
        assert time.perf_counter() - begun < 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (5, "was given 5; give it a list"),
        ("text", "was given 'text'; give it a list"),
        ([1, 2], "was given a list with 1 in it, which is no handle.*asyncio.wait"),
    ],
)
async def test_what_is_no_list_of_handles(given: Any, told: str) -> None:
    for name in ("wait", "as_completed"):
        with pytest.raises(MisuseError, match=rf"aiogpu\.{name}\(\) {told}"):
            getattr(aiogpu, name)(given)


async def test_a_handle_alone_or_twice(works: Works) -> None:
    a, b = works.start(2)
    for look in (aiogpu.wait, aiogpu.as_completed):
        with pytest.raises(MisuseError, match="one handle, of train; give it a list"):
            look(a)  # type: ignore[operator]
        with pytest.raises(MisuseError, match="<Handle train 1 pending> more than onc"):
            look([b, a, a])  # type: ignore[operator]
    future = asyncio.get_running_loop().create_future()
    with pytest.raises(MisuseError, match="is no handle"):
        aiogpu.wait([future])  # type: ignore[list-item]


async def test_none_to_wait_for() -> None:
    assert await aiogpu.wait([]) == ([], [])


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1"])
async def test_numbers_that_are_none(works: Works, count: Any) -> None:
    with pytest.raises(OptionError, match=f"num_returns={count!r} must be a whole"):
        aiogpu.wait(works.start(2), num_returns=count)


async def test_more_than_there_are(works: Works) -> None:
    with pytest.raises(OptionError, match="num_returns=3 is more than the 2 handles"):
        aiogpu.wait(works.start(2), num_returns=3)


@pytest.mark.parametrize("timeout", [-1, True, "1", float("nan"), float("inf")])
async def test_times_that_are_none(works: Works, timeout: Any) -> None:
    with pytest.raises(OptionError, match=f"timeout={timeout!r} must be a number"):
        aiogpu.wait(works.start(1), timeout=timeout)


async def test_handles_of_another_loop(works: Works) -> None:
    handles = works.start(1)

    async def elsewhere() -> None:
        with pytest.raises(MisuseError, match="train belongs to another event loop"):
            aiogpu.wait(handles)

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    thread.start()
    await asyncio.to_thread(thread.join)


async def test_a_loops_handles_where_none_runs(works: Works) -> None:
    handles = works.start(1)

    def look() -> None:
        for name in ("wait", "as_completed"):
            with pytest.raises(NoLoopError, match=rf"{name}\(\).*train belongs to one"):
                getattr(aiogpu, name)(handles)

    await asyncio.to_thread(look)


async def test_a_plain_loop_over_it(works: Works) -> None:
    with pytest.raises(MisuseError, match="write `async for"):
        iter(aiogpu.as_completed(works.start(1)))


class TestInPlainTasks:
    """Between a task and its worker's socket."""

    @pytest.fixture
    def channel(self) -> Iterator[PaperChannel]:
        """That of a worker which runs task 3."""
        before = {name: getattr(current, name) for name in Context.__slots__}
        channel = PaperChannel()
        current.task, current.client = 3, paper_children(channel)
        yield channel
        for name, value in before.items():
            setattr(current, name, value)
        channel.close()

    def start(self, count: int) -> list[Any]:
        @aiogpu.remote
        def child() -> object: ...

        return [child.remote() for _ in range(count)]

    def test_it_blocks(self, channel: PaperChannel) -> None:
        a, b, c = handles = self.start(3)
        channel.put(done(3), failed(1, KeyError("boom")), done(2))
        ready, pending = aiogpu.wait(handles, num_returns=2)
        assert (ready, pending) == ([a, c], [b])
        assert channel.waits == [(1, 2, 3), ()], "the driver is told that it is over"
        assert b.on_end == ()
        assert aiogpu.wait([b]) == ([b], [])
        assert channel.waits == [(1, 2, 3), (), (2,)], "its end the driver sees itself"
        assert aiogpu.wait(handles, num_returns=3) == (handles, [])

    def test_time_is_up(self, channel: PaperChannel) -> None:
        a, b = handles = self.start(2)
        assert aiogpu.wait(handles, timeout=0) == ([], [a, b])
        channel.put(done(2))
        assert aiogpu.wait(handles, timeout=0) == ([b], [a]), "what has come is read"
        assert aiogpu.wait(handles, num_returns=2, timeout=0.001) == ([b], [a])

    def test_handles_come_as_they_end(self, channel: PaperChannel) -> None:
        a, b, c, d = handles = self.start(4)
        completed = iter(aiogpu.as_completed(handles))
        channel.put(done(3), done(1), done(4), failed(2, KeyError("boom")))
        assert next(completed) is c
        assert channel.waits == [(1,), ()]
        assert next(completed) is a
        assert channel.waits == [(1,), (), (1,)]
        d.cancel()
        assert list(completed) == [d, b]
        with pytest.raises(StopIteration):
            next(completed)
        assert len(aiogpu.as_completed(handles)) == 4
        assert list(aiogpu.as_completed([])) == []
        assert aiogpu.as_completed([]), "which is not its length"

    def test_leaving_cancels_nothing(self, channel: PaperChannel) -> None:
        handles = self.start(2)
        channel.put(done(1))
        for handle in aiogpu.as_completed(handles):
            assert handle is handles[0]
            break
        assert handles[1].on_end == ()
        assert not handles[1].done()

    def test_two_threads_may_look(self, channel: PaperChannel) -> None:
        a, b = handles = self.start(2)
        first = iter(aiogpu.as_completed(handles))
        second = iter(aiogpu.as_completed(handles))
        channel.put(done(2), done(1))
        assert list(first) == [b, a]
        assert list(second) == [b, a]

    def test_ten_thousand_handles(self, channel: PaperChannel) -> None:
        handles = self.start(10_000)
        begun = time.perf_counter()
        for number in range(10_000, 0, -1):
            channel.coming.append(done(number))
        channel.read_ready = self.reading(channel)  # type: ignore[method-assign]
        assert list(aiogpu.as_completed(handles)) == handles[::-1]
        assert aiogpu.wait(handles, num_returns=10_000)[1] == []  # type: ignore[index]
        assert time.perf_counter() - begun < 1

    def reading(self, channel: PaperChannel) -> Any:
        def read_ready(is_guest: bool = False) -> bool:
            channel.on_child(channel.coming.popleft())
            return True

        return read_ready

    def test_what_is_not_theirs(self, channel: PaperChannel) -> None:
        a, b = self.start(2)
        with pytest.raises(MisuseError, match="one handle, of child"):
            aiogpu.wait(a)
        with pytest.raises(MisuseError, match="more than once"):
            aiogpu.wait([a, a])
        with pytest.raises(MisuseError, match="which is no handle"):
            aiogpu.as_completed([a, 5])  # type: ignore[list-item]
        with pytest.raises(MisuseError, match="no event loop runs"):
            aiter(aiogpu.as_completed([a]))
        current.client = paper_children(channel)
        with pytest.raises(MisuseError, match="child belongs to another task"):
            aiogpu.wait([b])

    async def test_beside_a_loop(self, channel: PaperChannel) -> None:
        (handle,) = await asyncio.to_thread(self.start, 1)
        with pytest.raises(MisuseError, match="made in a plain function"):
            aiogpu.wait([handle])


class TestInCoroutinesOfTasks:
    """What their node is told of waits."""

    @pytest.fixture
    async def channel(self) -> Any:
        before = {name: getattr(current, name) for name in Context.__slots__}
        channel = PaperChannel()
        current.task, current.client = 3, paper_children(channel)
        yield channel
        asyncio.get_running_loop().remove_reader(channel.fileno())
        for name, value in before.items():
            setattr(current, name, value)
        channel.close()

    async def test_it_waits_only_while_it_does(self, channel: PaperChannel) -> None:
        handles = TestInPlainTasks().start(3)
        assert all(isinstance(handle, ChildHandle) for handle in handles)
        completed = aiogpu.as_completed(handles)
        await settled()
        assert channel.waits == [], "nobody has asked yet"
        task = soon(anext(completed))  # type: ignore[call-overload]
        await settled()
        assert channel.waits == [(1,)], "the first stands for all"
        channel.put(done(2))
        assert await task is handles[1]
        await settled()
        assert channel.waits == [(1,), ()], "while the loop's body runs"
        channel.put(done(1), done(3))
        assert {handle async for handle in completed} == {handles[0], handles[2]}

    async def test_a_wait_is_for_all(self, channel: PaperChannel) -> None:
        handles = TestInPlainTasks().start(3)
        task = soon(aiogpu.wait(handles))
        await settled()
        assert channel.waits == [(1, 2, 3)]
        channel.put(done(2))
        assert await task == ([handles[1]], [handles[0], handles[2]])
        await settled()
        assert channel.waits == [(1, 2, 3), ()]


@pytest.mark.parametrize("name", ["wait", "as_completed"])
def test_outside_of_everything(name: str) -> None:
    told = rf"^aiogpu.{name}\(\) needs a running event loop"
    with pytest.raises(aiogpu.NoLoopError, match=told):
        getattr(aiogpu, name)([])


async def test_results_are_had_from_the_handles(works: Works) -> None:
    handles = works.start(2)
    handles[1].settle(dump_result("second"))
    handles[0].settle(dump_result("first"))
    got = [await handle async for handle in aiogpu.as_completed(handles)]
    assert got == ["first", "second"]
