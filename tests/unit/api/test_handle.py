"""Handles and streams: results, waiters, cancellation, errors."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from aiogpu.api.results.handle import Handle
from aiogpu.api.results.stream import Stream
from aiogpu.errors import DeserializationError, MisuseError, NodeClosedError
from aiogpu.observe.why import Why
from aiogpu.serialization.serializer import dump_result
from tests.support.waits import turns
from tests.unit.api.fakes import UNREADABLE, Owner, outcome, started

loads = 0


class Counted:
    """A result that counts how often it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return count_load, ()


def count_load() -> str:
    global loads
    loads += 1
    return "value"


class Work:
    """The handle of a task, and the numbers of cancelled tasks."""

    def __init__(self) -> None:
        owner = Owner()
        self.cancelled = owner.cancelled
        self.handle: Handle[Any]
        (self.handle,) = owner.start(1)


@pytest.fixture
async def work() -> Work:
    return Work()


# The result and the error.


@pytest.mark.parametrize("kind", ["failed", "unreadable"])
async def test_repeated_error_keeps_its_traceback(work: Work, kind: str) -> None:
    work.handle.settle(KeyError("a") if kind == "failed" else UNREADABLE)
    lengths = set()
    for _ in range(3):
        with pytest.raises((KeyError, DeserializationError)) as caught:
            await work.handle
        lengths.add(len(caught.traceback))
        assert caught.value.__context__ is caught.value.__cause__
    assert len(lengths) == 1


async def test_error_does_not_keep_the_frames_of_waiters(work: Work) -> None:
    seen: list[weakref.ref[Work]] = []

    async def use() -> None:
        local = Work()
        seen.append(weakref.ref(local))
        await work.handle

    work.handle.settle(ValueError("no"))
    gc.disable()
    try:
        with suppress(ValueError):
            await use()
        # The handle has the error, and its traceback has the frames.
        del work.handle
        assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "access", "reports"),
    [
        (KeyError, None, ["Handle exception was never retrieved: "]),
        (KeyError, "result", []),
        (KeyError, "exception", []),
        (KeyError, "await", []),
        (NodeClosedError, None, []),  # every handle of the node has this error
        (None, None, []),
    ],
)
async def test_error_that_is_never_retrieved_is_reported(
    complaints: list[str],
    error: type[Exception] | None,
    access: str | None,
    reports: list[str],
) -> None:
    work = Work()
    if error is not None:
        work.handle.settle(error())
    if access is not None:
        with suppress(KeyError):
            await work.handle if access == "await" else getattr(work.handle, access)()
    seen = weakref.ref(work.handle)
    del work
    gc.collect()
    assert seen() is None
    assert complaints == reports


# Waiters: the cancellation of the last one cancels the task.


async def test_closed_waiter_cancels_the_task(work: Work) -> None:
    """A coroutine that is dropped before its end gets `GeneratorExit`."""
    coroutine = work.handle.coro()
    coroutine.send(None)
    coroutine.close()
    assert work.cancelled == [1]
    assert work.handle.cancelled()


@pytest.mark.parametrize("is_first", ["result", "cancel"])
async def test_waiter_cancelled_when_the_result_arrives_keeps_the_result(
    work: Work, is_first: str
) -> None:
    """The waiter is cancelled, and the handle keeps the result."""
    other, task = await started(work.handle, 1), await started(work.handle, 1)
    steps = [lambda: work.handle.settle(dump_result(1)), task.cancel]
    for step in steps if is_first == "result" else reversed(steps):
        step()
    assert isinstance(await outcome(task), asyncio.CancelledError)
    assert await other == work.handle.result() == 1
    assert work.cancelled == []


async def test_handle_ignores_events_after_its_end(work: Work) -> None:
    task = await started(work.handle, 1)
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
    assert work.handle.raw is None

    work = Work()
    work.handle.settle(dump_result(1))
    work.handle.settle(dump_result(2))
    work.handle.settle(OSError())
    assert not work.handle.cancel()
    assert await work.handle == 1
    assert work.cancelled == []


# Callbacks.


async def test_callback_gets_the_handle_in_its_context(work: Work) -> None:
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


# Refusals.


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (bool, r"write `await` before train\.remote"),
        (copy.copy, "handle of train can only be pickled as"),
        (copy.deepcopy, "handle of train can only be pickled as"),
        *(
            (partial(pickle.dumps, protocol=n), "can only be pickled as")
            for n in (0, 2, 5)
        ),
        (lambda handle: handle.set_result(1), "result of train cannot be set; only"),
        (
            lambda handle: handle.set_exception(OSError()),
            "error of train cannot be set; only",
        ),
    ],
)
async def test_handle_refuses_copies_pickling_and_set_result(
    work: Work, use: Callable[[Handle[Any]], object], message: str
) -> None:
    """A handle is an argument of tasks and cannot be stored."""
    with pytest.raises(MisuseError, match=message):
        use(work.handle)
    assert isinstance(MisuseError("x"), TypeError)
    assert not work.handle.done()


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda handle: handle.settle(dump_result(Counted())), "it gave its result"),
        (lambda handle: handle.settle(ValueError("no")), "it failed with ValueError"),
        (lambda handle: handle.cancel(), "it was cancelled"),
    ],
)
async def test_why_asks_the_owner_until_the_task_ends(
    work: Work, end: Callable[[Handle[Any]], object], outcome: str
) -> None:
    assert await work.handle.why() == Why("train", 1, "starting")
    with pytest.raises(MisuseError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, work.handle.why())
    before = loads
    end(work.handle)
    why = await work.handle.why()
    assert (why.state, why.outcome) == ("ended", outcome)
    assert str(why) == f"train (task 1) has ended: {outcome}."
    assert loads == before, "why() unpickles nothing"


class Producer(Owner):
    """An owner of a stream that records requests."""

    state = "running"

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, int, int]] = []

    def demand(self, task: int, limit: int) -> None:
        self.requests.append(("demand", task, limit))

    def cancel(self, task: int) -> None:
        self.requests.append(("cancel", task, 0))


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


async def test_late_wake_does_not_end_the_stream(producer: Producer) -> None:
    """Each item from another thread wakes the loop a moment later."""
    stream = new_stream(producer)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)

    def feed() -> None:
        stream.items.receive_items(items(0))
        stream.items.receive_items(items(1))

    in_thread(feed)  # posts two wake-ups before the loop sees the first
    assert await waiting == 0
    assert await anext(stream) == 1
    waiting = asyncio.ensure_future(anext(stream))
    await turns()
    stream.items.loop.call_soon(stream.items.notify)
    await turns()
    assert not waiting.done()
    stream.items.receive_items(items(2))
    assert await waiting == 2


async def test_stream_raises_its_error_once(producer: Producer) -> None:
    stream = new_stream(producer)
    stream.items.settle(KeyError("k"))
    assert (await stream.why()).outcome == "it failed with KeyError"
    with pytest.raises(KeyError):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(MisuseError, match="ended with KeyError"):
        aiter(stream)


async def test_dropped_stream_is_cancelled_on_its_loop(producer: Producer) -> None:
    stream = new_stream(producer)
    in_thread(stream.__del__)
    assert producer.requests == [], "not in the other thread"
    await asyncio.sleep(0)
    assert producer.requests == [("cancel", 0, 0)]


async def test_why_of_a_stream_belongs_to_its_loop(producer: Producer) -> None:
    stream = new_stream(producer)
    assert not (await stream.why()).is_ahead
    stream.items.receive_items(items(1, 2))
    assert (await stream.why()).is_ahead
    with pytest.raises(MisuseError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, stream.why())
    await stream.aclose()
