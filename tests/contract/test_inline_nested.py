"""[B12] What plain functions start where all run in one process."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks

pytestmark = pytest.mark.usefixtures("no_leaks")

VISIBLE = "CUDA_VISIBLE_DEVICES"
seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.types.Node]:
    async with aiogpu.init(
        address="inline", num_cpus=1, num_gpus=2, cancel_grace=0.05
    ) as session:
        before = os.environ.get(VISIBLE)
        yield session
        found = await aiogpu.available_resources()
        assert {"CPU": 1.0, "GPU": 2.0}.items() <= found.items()
        assert os.environ.get(VISIBLE) == before
        assert aiogpu.get_runtime_context().worker_id == 0


@aiogpu.remote
def note(what: object) -> object:
    seen.append(what)
    return what


@aiogpu.remote
async def note_loop() -> None:
    await asyncio.sleep(0)
    seen.append((asyncio.get_running_loop(), threading.current_thread()))


@aiogpu.remote
async def never() -> None:
    seen.append("begin")
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("end")


@aiogpu.remote
def wait_now_and_then() -> object:
    handles = [note.remote(name) for name in "abc"]
    aiogpu.get(handles[1])
    seen.append("between")
    result = aiogpu.get(handles)
    note.remote("never")
    return result


async def test_children_run_when_they_are_waited_for(node: aiogpu.types.Node) -> None:
    """In the order in which they were started; one that nobody awaits never does."""

    handles = [wait_now_and_then.remote(), note.remote("other")]
    assert await asyncio.gather(*handles) == [["a", "b", "c"], "other"]
    assert seen == ["a", "b", "between", "c", "other"]


async def test_a_coroutine_runs_on_a_loop_of_its_own(node: aiogpu.types.Node) -> None:
    @aiogpu.remote
    def parent() -> None:
        aiogpu.get([note_loop.remote(), note_loop.remote()])
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()

    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    await parent.remote()
    (loop, thread), second = seen
    assert second == (loop, thread)
    assert thread is threading.current_thread()
    assert loop is not asyncio.get_running_loop()
    assert loop.is_closed()
    assert count() == before


async def test_what_pauses_takes_its_surroundings_along(
    node: aiogpu.types.Node,
) -> None:
    @aiogpu.remote(num_gpus=1)
    def parent() -> list[object]:
        def look() -> tuple[object, ...]:
            context = aiogpu.get_runtime_context()
            return context.task_name, os.environ[VISIBLE], aiogpu.get_gpu_ids()

        handle = never.options(num_gpus=1).remote()
        looks: list[object] = [look()]
        for _ in range(2):
            with pytest.raises(aiogpu.TaskTimeoutError):
                aiogpu.get(handle, timeout=0.02)
            looks.append(look())
        return looks

    assert await parent.remote() == [("parent", "0", [0])] * 3
    assert seen == ["begin", "end"]


async def test_a_plain_child_that_ends_too_late(node: aiogpu.types.Node) -> None:
    @aiogpu.remote
    def slow() -> str:
        time.sleep(0.2)
        return "slow"

    @aiogpu.remote
    def parent() -> str:
        handle = slow.remote()
        with pytest.raises(aiogpu.TaskTimeoutError, match=r"slow ended after .* 0\.1"):
            aiogpu.get(handle, timeout=0.1)
        return aiogpu.get(handle)

    assert await parent.remote() == "slow"


@aiogpu.remote
def start_detached() -> None:
    detached_note, begun = seen.pop()
    handle = begun.remote()
    with pytest.raises(aiogpu.TaskTimeoutError):
        aiogpu.get(handle, timeout=0.25)
    detached_note.remote("detached")


async def test_what_is_detached_outlives_its_parent(node: aiogpu.types.Node) -> None:
    """If it has begun, its loop goes on until it has ended."""
    detached_note, begun = note.options(name="note"), note_twice.options(name="twice")
    for function in (detached_note, begun):
        func = function._prepare()
        func.spec = replace(func.spec, is_detached=True)
    seen.append((detached_note, begun))
    await asyncio.gather(start_detached.remote(), note.remote("other"))
    assert seen[:2] == ["begin", "end"]
    await note.remote("after")
    assert seen[2:] == ["detached", "other", "after"], "children go first"


@aiogpu.remote
async def note_twice() -> None:
    seen.append("begin")
    await asyncio.sleep(0.5)  # longer than `start_detached` waits
    seen.append("end")


@aiogpu.remote
def start_in_a_thread(is_copied: bool) -> None:
    def start() -> None:
        try:
            tasks.add.remote(1)
        except aiogpu.errors.NodeError as error:
            seen.append(str(error))

    context = contextvars.copy_context()
    run = (lambda: context.run(start)) if is_copied else start
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


async def test_a_thread_starts_none(node: aiogpu.types.Node) -> None:
    await start_in_a_thread.remote(False)
    await start_in_a_thread.remote(True)
    assert "in the thread that it runs in" in seen[0]
    assert "in a thread of start_in_a_thread's own" in seen[1]


@aiogpu.remote
def get_in_a_thread() -> object:
    def get() -> None:
        for run in (contextvars.Context().run, context.run):
            try:
                run(aiogpu.get, handle)
            except aiogpu.errors.NodeError as error:
                seen.append(str(error))

    handle, context = note.remote("child"), contextvars.copy_context()
    thread = threading.Thread(target=get)
    thread.start()
    thread.join()
    return aiogpu.get(handle)


async def test_a_thread_waits_for_none(node: aiogpu.types.Node) -> None:
    assert await get_in_a_thread.remote() == "child"
    assert "no task of aiogpu runs" in seen[0]
    assert "aiogpu.get() was called in a thread of get_in_a_thread's own" in seen[1]


@aiogpu.remote
def ask_on_own_loop() -> str:
    async def main() -> str:
        handle = note.remote("child")
        with pytest.raises(aiogpu.errors.NodeError) as caught:
            await handle.why()
        await handle
        return str(caught.value)

    return asyncio.run(main())


async def test_a_loop_of_a_tasks_own_cannot_ask(node: aiogpu.types.Node) -> None:
    said = await ask_on_own_loop.remote()
    assert said.startswith("why() of the handle of note was called inside a task")


@aiogpu.remote
def cancel_on_own_loop() -> bool:
    async def main() -> bool:
        handles = [never.remote(), note.remote("never")]
        handles[0].add_done_callback(lambda _: None)
        while "begin" not in seen:
            await asyncio.sleep(0)
        for handle in handles:
            handle.cancel()
        await note.remote("after")
        return all(handle.cancelled() for handle in handles)

    return asyncio.run(main())


async def test_a_loop_of_a_tasks_own_cancels(node: aiogpu.types.Node) -> None:
    assert await cancel_on_own_loop.remote()
    assert seen == ["begin", "end", "after"]


@aiogpu.remote
def leave_context() -> None:
    seen.append(contextvars.copy_context())


async def test_what_was_left_behind_starts_none(node: aiogpu.types.Node) -> None:
    await leave_context.remote()
    (context,) = seen
    with pytest.raises(
        aiogpu.errors.MisuseError, match="after leave_context had ended"
    ):
        await asyncio.to_thread(context.run, tasks.add.remote, 1)
    with pytest.raises(aiogpu.NoLoopError):
        await asyncio.to_thread(tasks.add.remote, 1)
    assert await context.run(tasks.add.remote, 1) == 2, "here it is the program's"


@aiogpu.remote(retry_exceptions=True, max_retries=1)
def retried() -> None:
    handles = [never.remote(), note.remote("never")]
    begun = seen.count("begin")
    while seen.count("begin") == begun:  # a loaded machine needs more than one wait
        with pytest.raises(aiogpu.TaskTimeoutError):
            aiogpu.get(handles, timeout=0.01)
    seen.append(handles)
    assert not any(handle.done() for handle in handles)
    if len(seen) < 4:
        raise LookupError


async def test_children_end_with_the_attempt(node: aiogpu.types.Node) -> None:
    await retried.remote()
    first, second = seen[1], seen[4]
    assert seen == ["begin", first, "end", "begin", second, "end"]
    for handle in (*first, *second):
        with pytest.raises(aiogpu.TaskCancelledError, match="was stopped"):
            handle.result()


@aiogpu.remote
def leave_a_loop_unfinished(is_closed: bool) -> int:
    """A child begins on the user's own loop, which then stops."""

    async def main() -> None:
        seen.append(never.remote())
        seen[-1].add_done_callback(lambda _: None)
        while "begin" not in seen:
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    loop.run_until_complete(main())
    if is_closed:
        loop.close()
    result = aiogpu.get(tasks.add.remote(1))
    loop.close()
    return result


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_loop_that_stops_takes_its_children_along(
    is_closed: bool, node: aiogpu.types.Node
) -> None:
    assert await leave_a_loop_unfinished.remote(is_closed) == 2
    handle = seen[0]
    if is_closed:
        assert not handle.done(), "nobody can be told on its loop"
    else:
        assert isinstance(handle.exception(), aiogpu.TaskCancelledError)
    seen.clear()
    del handle
    gc.collect()


@aiogpu.remote
async def stubborn() -> None:
    for _ in range(2):
        try:
            seen.append("begin")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
    await asyncio.Event().wait()


@aiogpu.remote
def leave_stubborn() -> str:
    handle = stubborn.remote()
    with pytest.raises(aiogpu.TaskTimeoutError):
        aiogpu.get(handle, timeout=0.25)
    return "left"


async def test_a_child_that_does_not_end_is_left_behind(
    node: aiogpu.types.Node, caplog: pytest.LogCaptureFixture
) -> None:
    assert await leave_stubborn.remote() == "left"
    (record,) = caplog.records
    assert "stubborn was cancelled 0.05 s ago and runs on" in record.getMessage()
    assert seen == ["begin", "cancelled", "begin", "cancelled"]


@aiogpu.remote
def raise_in_a_child() -> list[str]:
    try:
        aiogpu.get(tasks.fail.remote(LookupError, "x"))
    except LookupError as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return []


async def test_a_debugger_finds_the_childs_frames(node: aiogpu.types.Node) -> None:
    assert (await raise_in_a_child.remote())[-1] == "fail"


@aiogpu.remote
def press_in_a_child() -> str:
    try:
        aiogpu.get(tasks.fail.remote(KeyboardInterrupt))
    except aiogpu.TaskError as error:
        return str(error)
    return ""


async def test_a_child_cannot_end_the_program(node: aiogpu.types.Node) -> None:
    assert "KeyboardInterrupt" in await press_in_a_child.remote()


@aiogpu.remote
def get_what_is_anothers() -> None:
    child = get_first_seen.remote()
    seen.append(note.remote(1))
    aiogpu.get(child)


@aiogpu.remote
def get_first_seen() -> None:
    aiogpu.get(seen[0])


async def test_a_childs_get_of_its_parents_handle(node: aiogpu.types.Node) -> None:
    with pytest.raises(aiogpu.errors.MisuseError, match="note belongs to another task"):
        await get_what_is_anothers.remote()


@aiogpu.remote
def cancel_myself_and_go_on() -> None:
    """Its program has given it up; what it starts then never runs."""
    (mine,) = seen
    before = note.remote("never")
    mine.cancel()
    after = note.remote("never")
    for handle in (before, after):
        with pytest.raises(aiogpu.TaskCancelledError, match="is being stopped"):
            aiogpu.get(handle)
    seen.append("both told")


async def test_a_parent_that_is_being_stopped(node: aiogpu.types.Node) -> None:
    handle = cancel_myself_and_go_on.remote()
    seen.append(handle)
    with pytest.raises(asyncio.CancelledError):
        await handle
    await note.remote("after")
    assert seen[1:] == ["both told", "after"]


@aiogpu.remote
def timed_children(seconds: float) -> list[str]:
    """One's time passes while it waits, another's while it runs."""
    running = never.options(timeout=seconds)
    waiting = note.options(timeout=seconds / 2)
    handles: list[aiogpu.Handle[Any]] = [running.remote(), waiting.remote("never")]
    ends = []
    for handle in handles:
        with pytest.raises(aiogpu.TaskTimeoutError) as caught:
            aiogpu.get(handle)
        ends.append(str(caught.value).split(" did")[0])
    return ends


async def test_timeouts_of_children(node: aiogpu.types.Node) -> None:
    seconds = 0.02
    while not seen:  # one that has not begun in that time never does
        assert await timed_children.remote(seconds) == ["never", "note"]
        seconds *= 2
    assert seen == ["begin", "end"]


async def test_a_node_closes_at_once_after_its_tasks_were_cancelled() -> None:
    """Also those that were about to begin: nobody waits for their workers' end."""
    async with (
        asyncio.timeout(30),
        aiogpu.init(address="inline", num_cpus=2) as session,
    ):
        scheduler = session._session._engine._node.scheduler  # type: ignore[attr-defined]
        scheduler.config = scheduler.config._replace(exit_grace=600.0)
        handles = [tasks.add.remote(number) for number in range(8)]
        await handles[0]
        for handle in reversed(handles):
            handle.cancel()
