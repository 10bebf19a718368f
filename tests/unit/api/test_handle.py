"""[B14] [B15] The handle by itself: no node, no process, a note of what it cancels."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import pickle
import sys
import traceback
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import aiogpu
from aiogpu.api.results.handle import Handle
from aiogpu.errors import DeserializationError, MisuseError, NodeClosedError
from aiogpu.observe.why import Why
from aiogpu.serialization.serializer import dump_result

UNREADABLE = b"garbage"
loads = 0


class Counted:
    """Counts how often it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return count_load, ()


def count_load() -> str:
    global loads
    loads += 1
    return "value"


class Owner:
    """Who has started the task: notes that it is cancelled, and says one thing."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, task: int) -> None:
        self.cancelled.append(task)

    async def why(self, name: str, task: int) -> Why:
        return Why(name, task, "starting")


class Work:
    """The task behind a handle."""

    def __init__(self) -> None:
        owner = Owner()
        self.cancelled = owner.cancelled
        loop = asyncio.get_running_loop()
        self.handle: Handle[Any] = Handle("train", owner, loop)
        self.handle.task_id = 7

    @property
    def is_stopped(self) -> bool:
        return self.cancelled == [7]


@pytest.fixture
async def work() -> Work:
    return Work()


@pytest.fixture
async def complaints() -> list[dict[str, Any]]:
    """What asyncio tells the loop's exception handler."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
    return told


async def waiting(handle: Handle[Any]) -> asyncio.Task[Any]:
    """A task that waits on the handle, and has got as far as that."""

    async def wait() -> Any:
        return await handle

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    return task


async def ended(task: asyncio.Future[Any]) -> Any:
    (found,) = await asyncio.gather(task, return_exceptions=True)
    return found


async def test_a_result_is_unpickled_once_and_when_it_is_asked_for(work: Work) -> None:
    before = loads
    work.handle.settle(dump_result(Counted()))
    assert work.handle.done()
    assert loads == before
    assert work.handle.exception() is None
    assert loads == before + 1
    assert [await work.handle, work.handle.result(), await work.handle] == ["value"] * 3
    assert await asyncio.gather(work.handle, work.handle.coro()) == ["value"] * 2
    assert loads == before + 1


async def test_a_result_of_none_is_a_result(work: Work) -> None:
    work.handle.settle(dump_result(None))
    assert await work.handle is None
    assert work.handle.result() is None
    assert work.handle.exception() is None


async def test_all_waiters_get_the_same_object(work: Work) -> None:
    tasks = [await waiting(work.handle) for _ in range(3)]
    work.handle.settle(dump_result([1, 2]))
    values = await asyncio.gather(*tasks)
    assert all(value is work.handle.result() for value in values)


@pytest.mark.parametrize("first", ["result", "exception"])
async def test_what_cannot_be_decoded_is_the_exception(work: Work, first: str) -> None:
    work.handle.settle(UNREADABLE)
    if first == "result":
        with pytest.raises(DeserializationError) as caught:
            work.handle.result()
        assert work.handle.exception() is caught.value
    else:
        error = work.handle.exception()
        with pytest.raises(DeserializationError) as caught:
            work.handle.result()
        assert error is caught.value
    with pytest.raises(DeserializationError):
        await work.handle
    assert not work.handle.cancelled()


async def gathered(handle: Handle[Any]) -> None:
    await asyncio.gather(handle)


async def waited_for(handle: Handle[Any]) -> None:
    await asyncio.wait_for(handle, 60)


async def shielded(handle: Handle[Any]) -> None:
    await asyncio.shield(handle)


async def completed(handle: Handle[Any]) -> None:
    for first in asyncio.as_completed([handle]):
        await first


async def waited(handle: Handle[Any]) -> None:
    done, _ = await asyncio.wait([handle], return_when=asyncio.FIRST_EXCEPTION)
    assert done == {handle}
    handle.result()


async def grouped(handle: Handle[Any]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(handle.coro())
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from None


CONSTRUCTS = [gathered, waited_for, shielded, completed, waited, grouped]


@pytest.mark.parametrize("construct", CONSTRUCTS)
@pytest.mark.parametrize("is_early", [True, False])
async def test_every_construct_raises_what_cannot_be_decoded(
    work: Work, construct: Callable[[Handle[Any]], Awaitable[None]], is_early: bool
) -> None:
    if is_early:
        work.handle.settle(UNREADABLE)
    waiter = asyncio.ensure_future(construct(work.handle))
    await asyncio.sleep(0)
    work.handle.settle(UNREADABLE)
    async with asyncio.timeout(60):
        assert isinstance(await ended(waiter), DeserializationError)


@pytest.mark.parametrize(
    ("construct", "survives"),
    [
        (gathered, False),
        (grouped, False),
        (waited_for, False),
        (shielded, True),
        (completed, True),
        (waited, True),
    ],
)
async def test_the_table_in_miniature(
    work: Work, construct: Callable[[Handle[Any]], Awaitable[None]], survives: bool
) -> None:
    """[B15] What a cancelled construct does to the work when nobody else waits."""
    waiter = asyncio.ensure_future(construct(work.handle))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # a TaskGroup's own task is one step behind
    waiter.cancel()
    assert isinstance(await ended(waiter), asyncio.CancelledError)
    assert work.handle.cancelled() is not survives
    assert work.is_stopped is not survives


async def test_the_last_waiter_cancels(work: Work) -> None:
    tasks = [await waiting(work.handle) for _ in range(3)]
    for task in tasks:
        assert not work.handle.done()
        task.cancel()
        assert isinstance(await ended(task), asyncio.CancelledError)
    assert work.handle.cancelled()
    assert work.is_stopped


async def test_a_waiter_that_comes_again_counts(work: Work) -> None:
    first, second = await waiting(work.handle), await waiting(work.handle)
    first.cancel()
    await ended(first)
    third = await waiting(work.handle)
    second.cancel()
    await ended(second)
    assert not work.handle.done()
    work.handle.settle(dump_result(1))
    assert await third == 1


async def test_a_timeout_withdraws_its_own_waiter_alone(work: Work) -> None:
    other = await waiting(work.handle)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await work.handle
    assert not work.handle.done()
    work.handle.settle(dump_result(1))
    assert await other == 1


async def test_callbacks_are_counted(work: Work) -> None:
    seen: list[object] = []
    for _ in range(2):
        work.handle.add_done_callback(seen.append)
    work.handle.add_done_callback(print)
    task = await waiting(work.handle)
    task.cancel()
    await ended(task)
    assert not work.handle.done()
    assert work.handle.remove_done_callback(seen.append) == 2
    assert work.handle.remove_done_callback(seen.append) == 0
    task = await waiting(work.handle)
    task.cancel()
    await ended(task)
    assert not work.handle.done()
    assert work.handle.remove_done_callback(print) == 1
    task = await waiting(work.handle)
    task.cancel()
    await ended(task)
    assert work.is_stopped
    assert seen == []


async def test_removing_a_callback_does_not_cancel_by_itself(work: Work) -> None:
    work.handle.add_done_callback(print)
    work.handle.remove_done_callback(print)
    assert not work.handle.done()


async def test_a_callback_gets_the_handle_in_its_context(work: Work) -> None:
    variable = contextvars.ContextVar("variable", default="none")
    seen: list[tuple[object, str]] = []

    def note(handle: object) -> None:
        seen.append((handle, variable.get()))

    variable.set("own")
    given = contextvars.copy_context()
    given.run(variable.set, "given")
    work.handle.add_done_callback(note)
    work.handle.add_done_callback(note, context=given)
    variable.set("later")
    work.handle.settle(dump_result(1))
    assert seen == []
    await asyncio.sleep(0)
    assert seen == [(work.handle, "own"), (work.handle, "given")]
    work.handle.add_done_callback(note)
    await asyncio.sleep(0)
    assert seen[2:] == [(work.handle, "later")]


async def test_cancelling_twice(work: Work) -> None:
    task = await waiting(work.handle)
    assert work.handle.cancel("enough")
    assert not work.handle.cancel()
    assert work.is_stopped
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await work.handle
    for ask in (work.handle.result, work.handle.exception):
        with pytest.raises(asyncio.CancelledError):
            ask()


async def test_what_comes_after_a_cancel_is_ignored(work: Work) -> None:
    work.handle.cancel()
    work.handle.settle(dump_result(1))
    work.handle.settle(OSError())
    assert work.handle.cancelled()
    assert work.handle._payload is None


async def test_what_comes_after_the_end_is_ignored(work: Work) -> None:
    work.handle.settle(dump_result(1))
    work.handle.settle(dump_result(2))
    work.handle.settle(OSError())
    assert not work.handle.cancel()
    assert await work.handle == 1
    assert work.cancelled == []


async def test_a_waiter_cancelled_as_the_result_comes(work: Work) -> None:
    """Its task is cancelled, the handle keeps the result."""
    for steps in ("result first", "cancel first"):
        work = Work()
        other, task = await waiting(work.handle), await waiting(work.handle)
        if steps == "result first":
            work.handle.settle(dump_result(1))
            task.cancel()
        else:
            task.cancel()
            work.handle.settle(dump_result(1))
        assert isinstance(await ended(task), asyncio.CancelledError)
        assert await other == work.handle.result() == 1
        assert work.cancelled == []


async def test_a_handle_cancelled_by_a_callback_of_its_own(work: Work) -> None:
    answers: list[bool] = []
    work.handle.add_done_callback(lambda handle: answers.append(handle.cancel()))
    work.handle.settle(dump_result(1))
    await asyncio.sleep(0)
    assert answers == [False]
    assert await work.handle == 1


async def test_a_waiter_that_is_closed_withdraws(work: Work) -> None:
    """A coroutine that is dropped half-way gets `GeneratorExit`."""
    coroutine = work.handle.coro()
    coroutine.send(None)
    assert work.handle._waiters
    coroutine.close()
    assert work.is_stopped
    assert work.handle.cancelled()


async def test_an_error_is_raised_as_it_is(work: Work) -> None:
    tasks = [await waiting(work.handle) for _ in range(2)]
    error = KeyError("a")
    work.handle.settle(error)
    assert [await ended(task) for task in tasks] == [error, error]
    assert work.handle.exception() is error
    with pytest.raises(KeyError) as caught:
        await work.handle
    assert caught.value is error


def frames(error: BaseException) -> int:
    return len(traceback.extract_tb(error.__traceback__))


@pytest.mark.parametrize("kind", ["failed", "unreadable"])
async def test_an_error_raised_again_keeps_one_traceback(work: Work, kind: str) -> None:
    if kind == "failed":
        work.handle.settle(KeyError("a"))
    else:
        work.handle.settle(UNREADABLE)
    lengths = set()
    for _ in range(3):
        with pytest.raises((KeyError, DeserializationError)) as caught:
            await work.handle
        lengths.add(frames(caught.value))
        assert caught.value.__context__ is caught.value.__cause__
    assert len(lengths) == 1


async def test_an_error_nobody_looks_at_is_told(
    complaints: list[dict[str, Any]],
) -> None:
    work = Work()
    work.handle.settle(KeyError("a"))
    del work
    gc.collect()
    assert [what["message"] for what in complaints] == [
        "Handle exception was never retrieved"
    ]


@pytest.mark.parametrize("look", ["result", "exception", "await"])
async def test_an_error_that_was_looked_at_is_not(
    complaints: list[dict[str, Any]], look: str
) -> None:
    work = Work()
    work.handle.settle(KeyError("a"))
    with suppress(KeyError):
        await work.handle if look == "await" else getattr(work.handle, look)()
    del work
    gc.collect()
    assert complaints == []


async def test_a_closed_node_is_not_told_of_each_handle(
    complaints: list[dict[str, Any]],
) -> None:
    work = Work()
    work.handle.settle(NodeClosedError("this node is shut down."))
    with pytest.raises(NodeClosedError):
        await work.handle
    work = Work()
    work.handle.settle(NodeClosedError("this node is shut down."))
    del work
    gc.collect()
    assert complaints == []


async def test_a_handle_dropped_early_is_freed_without_a_word(
    complaints: list[dict[str, Any]], work: Work
) -> None:
    handle: Handle[int] = Handle("train", Owner(), asyncio.get_running_loop())
    seen = weakref.ref(handle)
    del handle
    assert seen() is None
    assert complaints == []


async def test_what_it_shows(work: Work) -> None:
    assert repr(work.handle) == "<Handle train 7 pending>"
    work.handle.cancel()
    assert repr(work.handle) == "<Handle train 7 cancelled>"
    for settle in (
        lambda handle: handle.settle(dump_result(1)),
        lambda handle: handle.settle(NodeClosedError("closed")),
    ):
        handle = Work().handle
        settle(handle)
        assert repr(handle) == "<Handle train 7 done>"


async def test_it_has_no_truth_value(work: Work) -> None:
    with pytest.raises(MisuseError, match=r"write `await` before train\.remote"):
        bool(work.handle)
    with pytest.raises(TypeError):
        assert work.handle
    assert work.handle is not None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
async def test_it_is_pickled_by_aiogpu_alone(work: Work, protocol: int) -> None:
    """[B16] It is a part of what tasks are given, and nothing to be stored."""
    with pytest.raises(MisuseError, match="handle of train can only be pickled as"):
        pickle.dumps(work.handle, protocol)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
async def test_it_is_not_copied(work: Work, way: Callable[[object], object]) -> None:
    with pytest.raises(MisuseError):
        way(work.handle)


async def test_only_the_task_settles_it(work: Work) -> None:
    with pytest.raises(MisuseError, match="result of train is set by its task"):
        work.handle.set_result(1)
    with pytest.raises(MisuseError, match="error of train is set by its task"):
        work.handle.set_exception(OSError())
    assert not work.handle.done()


async def test_it_is_a_future_of_its_loop(work: Work) -> None:
    handle = work.handle
    assert isinstance(handle, asyncio.Future)
    assert asyncio.isfuture(handle)
    assert asyncio.ensure_future(handle) is handle
    assert handle.get_loop() is asyncio.get_running_loop()
    assert aiogpu.Handle is Handle
    for ask in (handle.result, handle.exception):
        with pytest.raises(asyncio.InvalidStateError):
            ask()


def test_it_ends_a_loop_that_runs_until_then() -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        handle: Handle[int] = Handle("train", Owner(), loop)
        loop.call_soon(handle.settle, dump_result(3))
        assert loop.run_until_complete(handle) == 3


async def test_a_generator_may_delegate_to_it(work: Work) -> None:
    class Awaits:
        def __await__(self) -> Any:
            return (yield from work.handle)

    asyncio.get_running_loop().call_soon(work.handle.settle, dump_result(3))
    assert await Awaits() == 3


async def test_it_is_small(work: Work) -> None:
    """What it holds is in slots; ten thousand of them are a few megabytes."""
    await waiting(work.handle)
    work.handle.add_done_callback(print)
    work.handle.settle(dump_result(1))
    assert await work.handle == 1
    assert getattr(work.handle, "__dict__", {}) == {}
    assert sys.getsizeof(work.handle) <= 400
    work.handle.remove_done_callback(print)


async def test_it_asks_why_while_it_is_pending(work: Work) -> None:
    """[B23]"""
    assert await work.handle.why() == Why("train", 7, "starting")


@pytest.mark.parametrize(
    ("settle", "told"),
    [
        (lambda handle: handle.settle(dump_result(Counted())), "it gave its result"),
        (lambda handle: handle.settle(ValueError("no")), "it failed with ValueError"),
        (lambda handle: handle.cancel(), "it was cancelled"),
    ],
)
async def test_one_that_is_done_answers_by_itself(
    work: Work, settle: Callable[[Handle[Any]], object], told: str
) -> None:
    before = loads
    settle(work.handle)
    why = await work.handle.why()
    assert (why.state, why.outcome) == ("ended", told)
    assert str(why) == f"train (task 7) has ended: {told}."
    assert loads == before, "asking unpickles nothing"


async def test_it_is_asked_on_its_own_loop(work: Work) -> None:
    def ask() -> None:
        asyncio.run(work.handle.why())

    with pytest.raises(MisuseError, match="belongs to another event loop"):
        await asyncio.get_running_loop().run_in_executor(None, ask)


async def test_what_it_raised_keeps_nobodys_frames_alive(work: Work) -> None:
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
