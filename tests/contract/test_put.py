"""[B16] Values in shared memory: what they are, who reads them, when they are freed."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import keepers, odd_pickles
from tests.contract import value_tasks as v
from tests.contract.served import ServedEngine
from tests.support.gate import Gate
from tests.support.until import until

np = pytest.importorskip("numpy")

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

LARGE = 1 << 20


@pytest.fixture
async def node(address: str) -> AsyncIterator[aiogpu.types.Node]:
    """Two CPUs."""
    async with (
        asyncio.timeout(60),
        aiogpu.init(address=address, num_cpus=2) as session,
    ):
        yield session


def held(node: aiogpu.types.Node) -> int:
    """Segments that somebody may still read."""
    engine: Any = node._session._engine
    if isinstance(engine, ServedEngine):
        return engine.segments
    store = getattr(engine, "store", None)
    return 0 if store is None else len(store._segments)


@pytest.mark.parametrize("size", [10, LARGE])
async def test_what_was_put_does_not_change(size: int, node: aiogpu.types.Node) -> None:
    array = np.zeros(size, np.uint8)
    handle = await aiogpu.put(array)
    array[:] = 1
    assert not (await handle).any()
    assert not (await v.give.remote(handle)).any()
    argument = v.give.remote(array)
    array[:] = 2
    assert (await argument == 1).all()


@pytest.mark.usefixtures("each_engine")
async def test_it_is_put_before_the_node_is_open() -> None:
    handle = await aiogpu.put(b"x" * LARGE)
    assert await v.give.remote(handle) == b"x" * LARGE
    del handle
    await aiogpu.shutdown()


@pytest.mark.parametrize("task", [v.put_and_pass, v.put_and_pass_softly, v.put_and_get])
async def test_tasks_put(task: Any, node: aiogpu.types.Node) -> None:
    for value in (1, [None], b"x" * LARGE):
        assert await task.remote(value) == value


@pytest.mark.needs("processes")
async def test_what_a_task_has_put_and_read_never_changes(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1) as node:
        for i in range(5):
            await v.put_and_keep.remote(np.full(LARGE, i, np.uint8))
            for j in range(5):
                await v.put_and_get.remote(np.full(LARGE, 100 + j, np.uint8))
            assert (await v.look.remote() == i).all()
        await v.forget.remote()
        await v.give.remote(1)
        gc.collect()
        await until(lambda: held(node) == 0)


@pytest.mark.parametrize("task", [v.put_and_give, v.put_and_give_softly])
async def test_what_a_task_has_put_outlives_it(
    task: Any, node: aiogpu.types.Node
) -> None:
    box = await task.remote(np.arange(LARGE))
    assert await v.get_nested.remote(box) is not None
    assert (await box["handle"]).sum() == sum(range(LARGE))


async def test_a_handle_is_put_within_a_value_only(node: aiogpu.types.Node) -> None:
    inner = v.give.remote([1])
    with pytest.raises(aiogpu.errors.MisuseError, match="is a handle already"):
        aiogpu.put(inner)
    outer = await aiogpu.put([inner])
    assert await v.kinds.remote(outer) == ["list"]
    (found,) = await outer
    assert await found == [1]


async def test_arrays_are_read_only_and_not_copied(node: aiogpu.types.Node) -> None:
    found = await v.give.remote(np.ones(LARGE))
    assert not found.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 2


async def test_arrays_of_all_kinds(node: aiogpu.types.Node) -> None:
    arrays = [
        *(np.empty(0), np.empty((3, 0, 2)), np.array(7)),
        *(np.arange(LARGE)[::2], np.arange(LARGE).reshape(1024, -1).T),
        *(np.asfortranarray(np.ones((512, 600))), np.ones(LARGE, "<f2")),
        np.broadcast_to(np.arange(3), (200_000, 3)),
        np.array([{"a": 1}, None], object),
        np.zeros(50_000, [("x", "i4"), ("y", "f8")]),
    ]
    for array in arrays:
        back = await v.give.remote(v.give.remote(array))
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert np.array_equal(back, array)


async def test_a_thousand_buffers(node: aiogpu.types.Node) -> None:
    arrays = [np.full(70_000, i % 256, np.uint8) for i in range(1000)]
    back = await v.give.remote(v.give.remote(arrays))
    assert all(a[0] == a[-1] == i % 256 for i, a in enumerate(back))


async def test_it_is_decoded_once_and_only_if_it_is_awaited(
    node: aiogpu.types.Node, tmp_path: Path
) -> None:
    log = tmp_path / "seen"
    log.touch()
    first = v.sighted.remote(str(log))
    then = v.give.remote(first)
    assert await v.kinds.remote(then) == ["Sighted"]
    if await v.pid.remote() != os.getpid():
        assert str(os.getpid()) not in log.read_text().split()
    before = len(log.read_text().split())
    found = await first
    assert first.result() is found is await first
    assert len(log.read_text().split()) == before + 1
    assert await v.kinds.remote(first) == ["Sighted"]


@pytest.mark.parametrize("how", ["put", "result", "nested", "failed"])
async def test_it_is_freed_with_its_last_holder(
    how: str, node: aiogpu.types.Node
) -> None:
    for _ in range(3):
        handle: Any = v.give.remote(np.ones(LARGE))
        if how == "put":
            handle = await aiogpu.put(np.ones(LARGE))
            await v.give.remote(handle)
        elif how == "nested":
            handle = await v.give_boxed.remote({"handle": handle, "a": np.ones(LARGE)})
        elif how == "failed":
            with pytest.raises(odd_pickles.LoudError):
                await v.fail_with.remote(handle)
        else:
            await v.give.remote(handle)
        await asyncio.wait([v.give.remote(1)])
    del handle
    gc.collect()
    await until(lambda: held(node) == 0)


@pytest.mark.needs("processes")
async def test_a_view_in_a_global_never_changes(address: str) -> None:
    """Though its value was freed, and others were written."""
    async with aiogpu.init(address=address, num_cpus=1) as node:
        for i in range(10):
            await v.keep.remote(np.full(LARGE, i, np.uint8))
            for j in range(5):
                await v.give.remote(np.full(LARGE, 100 + j, np.uint8))
            assert (await v.look.remote() == i).all()
        assert held(node) >= 10
        await v.forget.remote()
        await v.give.remote(1)
        gc.collect()
        await until(lambda: held(node) == 0)


@pytest.mark.needs("processes")
async def test_a_worker_that_holds_a_segment_is_killed(node: aiogpu.types.Node) -> None:
    pid = await v.keep.remote(np.ones(LARGE))
    assert held(node) == 1
    os.kill(pid, signal.SIGKILL)
    await until(lambda: held(node) == 0)
    assert await v.give.remote(5) == 5


@pytest.mark.needs("processes")
async def test_the_maker_of_a_value_is_killed(node: aiogpu.types.Node) -> None:
    """It stays, for whoever has a handle."""
    maker = keepers.Serial.remote()
    pid = await maker.own_pid.remote()
    large = maker.add.remote(np.ones(LARGE), 1)
    await asyncio.wait([large])
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert (await v.give.remote(large)).sum() == 2 * LARGE
    assert (await large).sum() == 2 * LARGE


@pytest.mark.parametrize("end", [odd_pickles.Explosive, odd_pickles.Ending])
@pytest.mark.needs("processes")
async def test_what_cannot_be_unpickled_in_a_worker(
    end: Any, node: aiogpu.types.Node
) -> None:
    box = [end(), np.ones(LARGE)]
    errors = aiogpu.errors.DeserializationError, aiogpu.WorkerDiedError
    with pytest.raises(errors):
        await v.give.options(max_retries=0).remote(box)
    handle = await aiogpu.put(box)
    with pytest.raises(errors):
        await v.give.options(max_retries=0).remote(handle)
    del handle, box
    gc.collect()
    await until(lambda: held(node) == 0)


@pytest.mark.needs("processes")
async def test_unpickling_that_hangs_can_be_cancelled(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    stuck = v.give.remote([odd_pickles.Gated(gate.path, "stuck"), np.ones(LARGE)])
    await gate.entered("stuck")
    stuck.cancel()
    await v.give.remote(1)
    gc.collect()
    await until(lambda: held(node) == 0)


async def test_what_cannot_be_pickled_leaves_nothing(node: aiogpu.types.Node) -> None:
    large = np.ones(LARGE)
    for ask in (
        lambda: aiogpu.put([large, odd_pickles.Unwilling()]),
        lambda: v.give.remote([large, odd_pickles.Unwilling()]),
    ):
        with pytest.raises(aiogpu.errors.SerializationError, match="will not travel"):
            ask()
    assert held(node) == 0


async def test_a_handle_is_no_part_of_other_pickles(node: aiogpu.types.Node) -> None:
    handle = await aiogpu.put(1)
    with pytest.raises(aiogpu.errors.MisuseError, match="only be pickled"):
        pickle.dumps([handle])


async def test_ten_thousand_handles_as_arguments(node: aiogpu.types.Node) -> None:
    handles = [await aiogpu.put(i) for i in range(10_000)]
    assert await v.total.remote(*handles) == sum(range(10_000))


@pytest.mark.slow
async def test_a_hundred_thousand_live_values(node: aiogpu.types.Node) -> None:
    handles = [await aiogpu.put(i) for i in range(100_000)]
    assert await v.give.remote(handles[99_999]) == 99_999
    assert await v.total.remote(*handles[::1000]) == sum(range(0, 100_000, 1000))


async def test_two_programs_with_a_node_each(node: aiogpu.types.Node) -> None:
    async def other() -> int:
        async with aiogpu.init(address="local", num_cpus=1):
            handle = await aiogpu.put(np.ones(LARGE))
            return int((await v.give.remote(handle)).sum())

    found: list[int] = []
    # Not at the same time: an inline node's task makes this process its worker.
    mine = await v.give.remote(np.full(LARGE, 2.0))
    thread = threading.Thread(target=lambda: found.append(asyncio.run(other())))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [mine.sum(), *found] == [2 * LARGE, LARGE]


async def test_a_node_closes_with_values_about(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        kept = [await aiogpu.put(np.ones(LARGE)), v.give.remote(np.ones(LARGE))]
        read = await v.give.remote(kept[0])
    assert read.sum() == LARGE
    del kept, read
    gc.collect()
