"""Tasks of tasks on the inline engine: all on one stack, in one process."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.types import Node
from tests.contract import tasks
from tests.support.errors import raises
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


VISIBLE = "CUDA_VISIBLE_DEVICES"
seen: list[Any] = []
"""Notes of the tasks of this module, which run in this process."""


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pytest.fixture
async def node() -> AsyncIterator[Node]:
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
def note(value: object) -> object:
    seen.append(value)
    return value


@aiogpu.remote
async def note_loop() -> None:
    await asyncio.sleep(0)
    seen.append((asyncio.get_running_loop(), threading.current_thread()))


@aiogpu.remote
async def wait_for_ever() -> None:
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


async def test_a_child_runs_when_its_parent_waits(node: Node) -> None:
    """Children run in the order of their start; a child without a waiter never runs."""
    handles = [wait_now_and_then.remote(), note.remote("other")]
    assert await asyncio.gather(*handles) == [["a", "b", "c"], "other"]
    assert seen == ["a", "b", "between", "c", "other"]


async def test_a_coroutine_of_a_plain_task_runs_on_its_own_loop(node: Node) -> None:
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


async def test_a_paused_child_leaves_its_parents_context(node: Node) -> None:
    @aiogpu.remote(num_gpus=1)
    def parent() -> list[object]:
        def look() -> tuple[object, ...]:
            context = aiogpu.get_runtime_context()
            return context.task_name, os.environ[VISIBLE], aiogpu.get_gpu_ids()

        handle = wait_for_ever.options(num_gpus=1).remote()
        looks: list[object] = [look()]
        for _ in range(2):
            with pytest.raises(errors.TaskTimeoutError):
                aiogpu.get(handle, timeout=0.02)
            looks.append(look())
        return looks

    assert await parent.remote() == [("parent", "0", [0])] * 3
    assert seen == ["begin", "end"]


@aiogpu.remote
def cancel_on_own_loop() -> bool:
    async def main() -> bool:
        handles = [wait_for_ever.remote()]
        handles[0].add_done_callback(lambda _: None)
        while "begin" not in seen:
            await asyncio.sleep(0)
        handles[0].cancel()
        await note.remote("after")
        return handles[0].cancelled()

    return asyncio.run(main())


async def test_a_loop_of_a_plain_task_cancels_children(node: Node) -> None:
    assert await cancel_on_own_loop.remote()
    assert seen == ["begin", "end", "after"]


@aiogpu.remote
def leave_context() -> None:
    seen.append(contextvars.copy_context())


async def test_the_context_of_an_ended_task_starts_no_task(node: Node) -> None:
    await leave_context.remote()
    (context,) = seen
    await raises(
        errors.MisuseError,
        lambda: asyncio.to_thread(context.run, tasks.add.remote, 1),
        match="after leave_context had ended",
    )
    await raises(errors.NoLoopError, lambda: asyncio.to_thread(tasks.add.remote, 1))
    assert await context.run(tasks.add.remote, 1) == 2, (
        "on the loop of the program it is the program's"
    )


@aiogpu.remote(retry_exceptions=True, max_retries=1)
def retried() -> None:
    handles = [wait_for_ever.remote()]
    before = seen.count("begin")
    while seen.count("begin") == before:  # a loaded machine needs more than one wait
        with pytest.raises(errors.TaskTimeoutError):
            aiogpu.get(handles, timeout=0.01)
    seen.append(handles)
    assert not any(handle.done() for handle in handles)
    if len(seen) < 4:
        raise LookupError


async def test_children_end_with_the_attempt_of_their_parent(node: Node) -> None:
    await retried.remote()
    first, second = seen[1], seen[4]
    assert seen == ["begin", first, "end", "begin", second, "end"]
    for handle in (*first, *second):
        with pytest.raises(errors.TaskCancelledError, match="was stopped"):
            handle.result()


@aiogpu.remote
def leave_a_loop_unfinished() -> int:
    """Start a child on a loop of the user, which then stops."""

    async def main() -> None:
        seen.append(wait_for_ever.remote())
        seen[-1].add_done_callback(lambda _: None)
        while "begin" not in seen:
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    loop.run_until_complete(main())
    loop.close()
    return aiogpu.get(tasks.add.remote(1))


async def test_a_closed_loop_leaves_its_children(node: Node) -> None:
    assert await leave_a_loop_unfinished.remote() == 2
    assert not seen[0].done(), "its loop is closed"
    seen.clear()
    gc.collect()


@aiogpu.remote
def get_a_handle_of_a_sibling() -> None:
    child = get_first_seen.remote()
    seen.append(note.remote(1))
    aiogpu.get(child)


@aiogpu.remote
def get_first_seen() -> None:
    aiogpu.get(seen[0])


async def test_a_child_cannot_get_a_handle_of_its_parent(node: Node) -> None:
    with pytest.raises(errors.MisuseError, match="note belongs to another task"):
        await get_a_handle_of_a_sibling.remote()


@aiogpu.remote
def timed_child(seconds: float) -> str:
    with pytest.raises(errors.TaskTimeoutError) as caught:
        aiogpu.get(wait_for_ever.options(timeout=seconds).remote())
    return str(caught.value).split(" did")[0]


async def test_children_time_out(node: Node) -> None:
    assert await timed_child.remote(0.05) == "wait_for_ever"
    assert seen == ["begin", "end"]


async def test_a_node_closes_at_once_after_a_cancel_of_its_tasks() -> None:
    """Also of tasks that were about to begin: the node does not wait for workers."""
    async with (
        asyncio.timeout(30),
        aiogpu.init(address="inline", num_cpus=2, cancel_grace=600),
    ):
        handles = [tasks.add.remote(number) for number in range(8)]
        await handles[0]
        for handle in reversed(handles):
            handle.cancel()


@aiogpu.remote
async def note_softly(value: object) -> None:
    seen.append(("begin", value))
    await asyncio.sleep(0)
    seen.append(("end", value))


@aiogpu.remote
async def parent() -> object:
    seen.append("parent begins")
    first = note.remote("child")
    second = note_softly.remote("child")
    await first
    await second
    seen.append("parent ends")
    return "parent"


async def test_coroutines_and_their_children_interleave_with_tasks(node: Node) -> None:
    handles = [parent.remote(), note.remote("other")]
    assert await asyncio.gather(*handles) == ["parent", "other"]
    assert seen.pop(seen.index("other")) == "other"
    assert seen == [
        "parent begins",
        "child",
        ("begin", "child"),
        ("end", "child"),
        "parent ends",
    ]


@aiogpu.remote
async def careless_parent() -> str:
    seen.extend([note.remote("orphan"), note_softly.remote("orphan")])
    return "has ended"


async def test_children_end_with_their_parent(node: Node) -> None:
    """A child that has not begun never runs."""
    handles = [careless_parent.remote(), note.remote("other")]
    assert await asyncio.gather(*handles) == ["has ended", "other"]
    orphans = [noted for noted in seen if isinstance(noted, aiogpu.Handle)]
    assert len(orphans) == 2
    seen[:] = [noted for noted in seen if noted not in orphans]
    for orphan in orphans:
        with pytest.raises(errors.TaskCancelledError, match="started it has ended"):
            await orphan
    assert seen == ["other"]


@aiogpu.remote(cancel_grace=20)
async def waiting_child() -> None:
    seen.append("child begins")
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        seen.append("child ends")


@aiogpu.remote(num_gpus=1, cancel_grace=20)
async def waiting_parent() -> None:
    try:
        await waiting_child.options(num_gpus=1).remote()
    finally:
        seen.append("parent ends")


async def test_cancel_of_a_parent_cancels_its_child(node: Node) -> None:
    before = dict(os.environ)
    handle = waiting_parent.remote()
    await until(lambda: seen)
    handle.cancel()
    await until(lambda: "child ends" in seen)
    assert seen == ["child begins", "parent ends", "child ends"]
    assert dict(os.environ) == before


async def test_a_shutdown_ends_parents_and_children() -> None:
    before = dict(os.environ)
    async with aiogpu.init(address="inline", num_cpus=1, num_gpus=2):
        handle = waiting_parent.remote()
        await until(lambda: seen)
    await raises(errors.NodeClosedError, handle)
    assert dict(os.environ) == before
    assert aiogpu.get_runtime_context().worker_id == 0


@aiogpu.remote
def start_detached() -> None:
    note.options(lifetime="detached").remote("detached")


async def test_a_detached_child_outlives_its_parent(node: Node) -> None:
    await start_detached.remote()
    await until(lambda: seen == ["detached"])


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
def leave_stubborn() -> list[str]:
    """Return the frames of a failed child, as debuggers see them; leave a child."""
    with pytest.raises(LookupError) as caught:
        aiogpu.get(tasks.fail.remote(LookupError, "x"))
    handle = stubborn.remote()
    with pytest.raises(errors.TaskTimeoutError):
        aiogpu.get(handle, timeout=0.25)
    return [frame.name for frame in traceback.extract_tb(caught.tb)]


async def test_a_child_that_does_not_end_is_left_behind(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await leave_stubborn.remote())[-1] == "fail"
    (record,) = caplog.records
    assert "stubborn: cancelled 0.05 s ago and still running" in record.getMessage()
    assert seen[:3] == ["begin", "cancelled", "begin"]


@aiogpu.remote
def use_threads() -> list[str]:
    """Start and await tasks in threads, with the context of this task and without."""
    messages: list[str] = []
    handle, context = note.remote("child"), contextvars.copy_context()

    def refused(run: Any, *call: Any) -> None:
        with pytest.raises(errors.NodeError) as caught:
            run(*call)
        messages.append(str(caught.value))

    def work() -> None:
        for run in (contextvars.Context().run, context.run):
            refused(run, tasks.add.remote, 1)
            refused(run, aiogpu.get, handle)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert aiogpu.get(handle) == "child"
    return messages


async def test_threads_of_a_task_cannot_use_tasks(node: Node) -> None:
    words = [
        "only in its own thread",
        "no task of aiogpu runs",
        "in a thread that use_threads has started",
        "aiogpu.get() was called in a thread that use_threads has started",
    ]
    for message, word in zip(await use_threads.remote(), words, strict=True):
        assert word in message


@aiogpu.remote
def count_up(limit: int) -> Iterator[int]:
    yield from range(limit)


@aiogpu.remote
def get_beside_a_stream(handles: list[aiogpu.Handle[Any]]) -> object:
    """Wait for what a blocked loop runs, while a stream waits for its consumer."""
    stream = iter(count_up.remote(10**6))
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    return aiogpu.get(handles)


async def test_a_stream_that_waits_hides_no_deadlock(node: Node) -> None:
    runs = wait_for_ever.remote()
    await until(lambda: seen == ["begin"])
    with pytest.raises(errors.DeadlockError, match="wait_for_ever cannot run"):
        await get_beside_a_stream.remote([runs])
    runs.cancel()
