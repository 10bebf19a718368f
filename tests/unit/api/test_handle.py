"""[B14] [B15] [B17] A handle and a stream by themselves: results, waiters, ends."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from aiogpu.api.results.handle import Handle
from aiogpu.api.results.stream import Stream
from aiogpu.errors import DeserializationError, MisuseError, NodeClosedError
from aiogpu.observe.why import Why
from aiogpu.serialization.serializer import dump_result
from tests.support.turns import turns
from tests.unit.api.fakes import UNREADABLE, Owner, outcome

loads = 0


class Counted:
    """Counts how often it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return count_load, ()


def count_load() -> str:
    global loads
    loads += 1
    return "value"


class Work:
    """A task's handle, and what it cancels."""

    def __init__(self) -> None:
        owner = Owner()
        self.cancelled = owner.cancelled
        self.handle: Handle[Any]
        (self.handle,) = owner.start(1)

    async def waiter(self) -> asyncio.Task[Any]:
        """Return a task that waits for the result, and has got as far as that."""

        async def wait() -> Any:
            return await self.handle

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        return task


@pytest.fixture
async def work() -> Work:
    return Work()


# The result and the error.


def frames(error: BaseException) -> int:
    return len(traceback.extract_tb(error.__traceback__))


@pytest.mark.parametrize("kind", ["failed", "unreadable"])
async def test_an_error_raised_again_keeps_one_traceback(work: Work, kind: str) -> None:
    work.handle.settle(KeyError("a") if kind == "failed" else UNREADABLE)
    lengths = set()
    for _ in range(3):
        with pytest.raises((KeyError, DeserializationError)) as caught:
            await work.handle
        lengths.add(frames(caught.value))
        assert caught.value.__context__ is caught.value.__cause__
    assert len(lengths) == 1


async def test_an_error_keeps_no_waiters_frames_alive(work: Work) -> None:
    seen: list[weakref.ref[Work]] = []

    async def use() -> None:
        held = Work()
        seen.append(weakref.ref(held))
        await work.handle

    work.handle.settle(ValueError("no"))
    gc.disable()
    try:
        with suppress(ValueError):
            await use()
        # Only while the handle has the error, whose traceback has the frames.
        del work.handle
        assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "look", "told"),
    [
        (KeyError, None, ["Handle exception was never retrieved: "]),
        (KeyError, "result", []),
        (KeyError, "exception", []),
        (KeyError, "await", []),
        (NodeClosedError, None, []),  # each handle of the node would report it
        (None, None, []),
    ],
)
async def test_an_error_that_nobody_retrieves_is_reported(
    complaints: list[str],
    error: type[Exception] | None,
    look: str | None,
    told: list[str],
) -> None:
    work = Work()
    if error is not None:
        work.handle.settle(error())
    if look is not None:
        with suppress(KeyError):
            await work.handle if look == "await" else getattr(work.handle, look)()
    seen = weakref.ref(work.handle)
    del work
    gc.collect()
    assert seen() is None
    assert complaints == told


# Waiters: the last one's cancellation cancels the task.


async def test_a_waiter_that_is_closed_withdraws(work: Work) -> None:
    """A coroutine that is dropped half-way gets `GeneratorExit`."""
    coroutine = work.handle.coro()
    coroutine.send(None)
    coroutine.close()
    assert work.cancelled == [1]
    assert work.handle.cancelled()


@pytest.mark.parametrize("is_first", ["result", "cancel"])
async def test_a_waiter_cancelled_as_the_result_comes(
    work: Work, is_first: str
) -> None:
    """Its task is cancelled, the handle keeps the result."""
    other, task = await work.waiter(), await work.waiter()
    steps = [lambda: work.handle.settle(dump_result(1)), task.cancel]
    for step in steps if is_first == "result" else reversed(steps):
        step()
    assert isinstance(await outcome(task), asyncio.CancelledError)
    assert await other == work.handle.result() == 1
    assert work.cancelled == []


async def test_after_the_end_nothing_counts(work: Work) -> None:
    task = await work.waiter()
    assert work.handle.cancel("enough")
    assert not work.handle.cancel()
    assert work.cancelled == [1]
    work.handle.settle(dump_result(1))
    work.handle.settle(OSError())
    for awaitable in (task, work.handle.coro()):
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await awaitable
    for ask in (work.handle.result, work.handle.exception):
        with pytest.raises(asyncio.CancelledError):
            ask()
    assert work.handle._payload is None

    work = Work()
    work.handle.settle(dump_result(1))
    work.handle.settle(dump_result(2))
    work.handle.settle(OSError())
    assert not work.handle.cancel()
    assert await work.handle == 1
    assert work.cancelled == []


# Callbacks.


async def test_a_callback_gets_the_handle_in_its_context(work: Work) -> None:
    variable = contextvars.ContextVar("variable", default="none")
    seen: list[tuple[object, str, bool]] = []

    def note(handle: Handle[Any]) -> None:
        seen.append((handle, variable.get(), handle.cancel()))

    variable.set("own")
    given = contextvars.copy_context()
    given.run(variable.set, "given")
    work.handle.add_done_callback(note)
    work.handle.add_done_callback(note, context=given)
    variable.set("later")
    work.handle.settle(dump_result(1))
    assert seen == []
    await asyncio.sleep(0)
    assert seen == [(work.handle, "own", False), (work.handle, "given", False)]
    work.handle.add_done_callback(note)
    await asyncio.sleep(0)
    assert seen[2:] == [(work.handle, "later", False)]
    assert await work.handle == 1


# The object.


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (bool, r"write `await` before train\.remote"),
        (copy.copy, "handle of train can only be pickled as"),
        (copy.deepcopy, "handle of train can only be pickled as"),
        (lambda handle: pickle.dumps(handle, 0), "can only be pickled as"),
        (lambda handle: pickle.dumps(handle, 2), "can only be pickled as"),
        (lambda handle: pickle.dumps(handle, 5), "can only be pickled as"),
        (lambda handle: handle.set_result(1), "result of train cannot be set; only"),
        (
            lambda handle: handle.set_exception(OSError()),
            "error of train cannot be set; only",
        ),
    ],
)
async def test_what_a_handle_refuses(
    work: Work, use: Callable[[Handle[Any]], object], told: str
) -> None:
    """[B16] Among others: it is a part of what tasks are given, not to be stored."""
    with pytest.raises(MisuseError, match=told):
        use(work.handle)
    assert isinstance(MisuseError("x"), TypeError)
    assert not work.handle.done()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda handle: handle.settle(dump_result(Counted())), "it gave its result"),
        (lambda handle: handle.settle(ValueError("no")), "it failed with ValueError"),
        (lambda handle: handle.cancel(), "it was cancelled"),
    ],
)
async def test_why_asks_the_owner_until_it_is_done(
    work: Work, end: Callable[[Handle[Any]], object], told: str
) -> None:
    """[B23]"""
    assert await work.handle.why() == Why("train", 1, "starting")
    with pytest.raises(MisuseError, match="belongs to another event loop"):
        await asyncio.to_thread(asyncio.run, work.handle.why())
    before = loads
    end(work.handle)
    why = await work.handle.why()
    assert (why.state, why.outcome) == ("ended", told)
    assert str(why) == f"train (task 1) has ended: {told}."
    assert loads == before, "asking unpickles nothing"


class Producer(Owner):
    """Notes what it is asked for."""

    state = "running"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int]] = []

    def demand(self, task: int, limit: int) -> None:
        self.asked.append(("demand", task, limit))

    def cancel(self, task: int) -> None:
        self.asked.append(("cancel", task, 0))


def items(*values: object) -> tuple[bytes, ...]:
    return tuple(map(dump_result, values))


@pytest.fixture
def producer() -> Producer:
    return Producer()


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def new_stream(producer: Producer) -> Stream[int]:
    return Stream("train", producer, 2, asyncio.get_running_loop())


async def test_a_wake_that_comes_late_ends_nothing(producer: Producer) -> None:
    """Each item that another thread brings wakes the loop a moment later."""
    stream = new_stream(producer)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)

    def feed() -> None:
        stream.items.receive_items(items(0))
        stream.items.receive_items(items(1))

    in_thread(feed)  # both wakes are posted before the loop sees the first
    assert await waiting == 0
    assert await anext(stream) == 1
    waiting = asyncio.ensure_future(anext(stream))
    await turns()
    stream.items.loop.call_soon(stream.items.notify)
    await turns()
    assert not waiting.done()
    stream.items.receive_items(items(2))
    assert await waiting == 2


async def test_an_error_is_raised_once_and_named_afterwards(producer: Producer) -> None:
    stream = new_stream(producer)
    stream.items.settle(KeyError("k"))
    assert (await stream.why()).outcome == "it failed with KeyError"
    with pytest.raises(KeyError):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(MisuseError, match="ended with KeyError"):
        aiter(stream)


async def test_a_dropped_stream_is_cancelled_on_its_loop(producer: Producer) -> None:
    stream = new_stream(producer)
    in_thread(stream.__del__)
    assert producer.asked == [], "not in whichever thread it was"
    await asyncio.sleep(0)
    assert producer.asked == [("cancel", 0, 0)]


async def test_why_belongs_to_its_loop(producer: Producer) -> None:
    stream = new_stream(producer)
    assert not (await stream.why()).is_ahead
    stream.items.receive_items(items(1, 2))
    assert (await stream.why()).is_ahead
    with pytest.raises(MisuseError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, stream.why())
    await stream.aclose()
