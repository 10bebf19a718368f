"""What a call takes is fixed when `.remote()` returns: a refilled buffer."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

import aiogpu
from aiogpu import sync
from tests.contract import buffer_tasks as tasks

pytestmark = pytest.mark.usefixtures("no_leaks")

COUNT: Final = 8
LARGE: Final = 500_000
"""Numbers of 8 bytes: the buffer is sent in shared memory."""
SMALL: Final = 16
EXPECTED: Final = [(number, number) for number in range(COUNT)]

Results = list[tuple[int, int]]


def refilled(size: int = LARGE) -> Iterator[Any]:
    """Yield the same array again and again, with another number in it."""
    buffer = np.zeros(size)
    for number in range(COUNT):
        buffer[:] = number
        yield buffer
    buffer[:] = -1


def boxes() -> Iterator[dict[str, Any]]:
    for buffer in refilled():
        yield {"buffer": buffer, "set": {(1,)}}


def by_task() -> Results:
    return sync.get([tasks.read.remote(buffer) for buffer in refilled()])


def by_keyword() -> Results:
    return sync.get([tasks.read.remote(buffer=buffer) for buffer in refilled()])


def inside() -> Results:
    return sync.get([tasks.read_inside.remote(box) for box in boxes()])


def as_views() -> Results:
    views = (memoryview(buffer) for buffer in refilled())
    return sync.get([tasks.read.remote(view) for view in views])


def by_generator() -> Results:
    streams = [tasks.yield_ends.remote(buffer) for buffer in refilled()]
    return [next(stream) for stream in streams]


def by_method() -> Results:
    reader = tasks.Reader.remote()
    return sync.get([reader.read.remote(buffer) for buffer in refilled()])


def by_constructor() -> Results:
    readers = [tasks.Reader.remote(buffer) for buffer in refilled()]
    return sync.get([reader.first.remote() for reader in readers])


def by_pool() -> Results:
    with sync.ActorPool(tasks.Reader, size=2) as pool:
        return sync.get([pool.read.remote(buffer) for buffer in refilled()])


def by_executor() -> Results:
    with sync.Executor() as executor:
        submitted = [executor.submit(tasks.ends, buffer) for buffer in refilled()]
        call = partial(tasks.ends)  # no plain function
        others = [executor.submit(call, buffer) for buffer in refilled()]
        assert sync.get(others) == EXPECTED
        return sync.get(submitted)


def by_map_of_executor(chunksize: int, size: int) -> Results:
    with sync.Executor() as executor:
        both = refilled(size), refilled(size)
        return list(executor.map(tasks.ends_of_both, *both, chunksize=chunksize))


def by_map(chunk: int | None, size: int) -> Results:
    return list(tasks.read.map(refilled(size), chunk=chunk))


def by_map_of_containers() -> Results:
    return list(tasks.read_inside.map(boxes(), chunk=3))


def by_map_of_method() -> Results:
    reader = tasks.Reader.remote()
    return list(reader.read.map(refilled(), chunk=3))


def by_put() -> Results:
    handles = [sync.put(buffer) for buffer in refilled()]
    return [tasks.ends(buffer) for buffer in sync.get(handles)]


def by_queue() -> Results:
    queue: sync.Queue[Any] = sync.Queue()
    for buffer in refilled():
        queue.put(buffer)
    return [tasks.ends(queue.get()) for _ in range(COUNT)]


def by_joblib() -> Results:
    backend = importlib.import_module("aiogpu.joblib").Backend(num_cpus=1)
    calls = (partial(tasks.ends, buffer) for buffer in refilled())
    return sync.get([backend.submit(call) for call in calls])


def by_children() -> Results:
    return tasks.read_by_children.remote(COUNT, LARGE).result()


WAYS: Final[dict[str, Callable[[], Results]]] = {
    "task": by_task,
    "keyword": by_keyword,
    "inside": inside,
    "views": as_views,
    "generator": by_generator,
    "method": by_method,
    "constructor": by_constructor,
    "pool": by_pool,
    "executor": by_executor,
    "executor map": partial(by_map_of_executor, 1, LARGE),
    "executor chunks": partial(by_map_of_executor, 3, LARGE),
    "executor chunks, small": partial(by_map_of_executor, 3, SMALL),
    "map": partial(by_map, None, LARGE),
    "chunks": partial(by_map, 3, LARGE),
    "chunks, small": partial(by_map, 3, SMALL),
    "chunks of containers": by_map_of_containers,
    "chunks of a method": by_map_of_method,
    "put": by_put,
    "queue": by_queue,
    "joblib": by_joblib,
    "children": by_children,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_call_takes_the_buffer_as_it_was(address: str, way: str) -> None:
    with sync.init(address=address, num_cpus=2):
        assert WAYS[way]() == EXPECTED


@pytest.mark.parametrize(
    "when",
    [
        "before the node is open",
        "from_thread",
        # Inline, a thread is refused while the loop's thread runs a task.
        pytest.param("sync", marks=pytest.mark.needs("threads")),
    ],
)
async def test_a_call_beside_a_loop_takes_it_as_it_was(address: str, when: str) -> None:
    def in_a_thread(call: Callable[[Any], Any]) -> Results:
        return sync.get([call(buffer) for buffer in refilled()])

    opening = aiogpu.init(address=address, num_cpus=2)
    if when == "before the node is open":
        async with asyncio.TaskGroup() as group:
            group.create_task(opening.__aenter__())
            await asyncio.sleep(0)
            handles = [tasks.read_on_loop.remote(buffer) for buffer in refilled()]
        assert await asyncio.gather(*handles) == EXPECTED
    else:
        await opening
        call: Any = tasks.read.remote
        if when == "from_thread":
            call = partial(aiogpu.from_thread, tasks.read_on_loop.remote)
        assert await asyncio.to_thread(in_a_thread, call) == EXPECTED
    await aiogpu.shutdown()


def test_a_chunk_that_ends_early_sends_the_rest_as_it_was(address: str) -> None:
    """`chunk="auto"` takes items back from a slow chunk, and sends them again."""

    def slow() -> Iterator[Any]:
        box: list[int] = []
        for number in range(300):
            box[:] = [number, 0 if number < 250 else 20]
            yield box

    with sync.init(address=address, num_cpus=2):
        results = tasks.wait_and_give.map(slow(), chunk="auto", limit=10_000)
        assert list(results) == list(range(300))


def test_handles_in_chunks_of_an_executor_stay_handles(address: str) -> None:
    with sync.init(address=address, num_cpus=2), sync.Executor() as executor:
        handles = [sync.put(number) for number in range(4)]
        boxes = [{"handle": handle, "buffer": np.zeros(LARGE)} for handle in handles]
        results = executor.map(tasks.get_boxed, boxes, chunksize=2)
        assert list(results) == [0, 1, 2, 3]
