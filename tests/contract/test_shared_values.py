"""Values in shared memory: `put`, who reads them, when they are freed."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import resource
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.types import Node
from benchmarks.processes import shared_memory
from tests.contract import shared_tasks, tasks
from tests.contract import value_tasks as v
from tests.contract.served import ServedEngine
from tests.contract.shared_tasks import Parent, Points, make_slow_value
from tests.faults.leftovers import wait_until_gone
from tests.support.gate import Gate
from tests.support.program import start
from tests.support.waits import until

np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2),
]

LARGE = 1 << 20


def segments_in_use(node: Node) -> int:
    """Return the number of segments that a process may still read."""
    engine: Any = node._session._engine
    if isinstance(engine, ServedEngine):
        return engine.segments
    store = getattr(engine, "store", None)
    return 0 if store is None else len(store._segments)


async def until_freed(node: Node) -> None:
    gc.collect()
    await until(lambda: segments_in_use(node) == 0)


@pytest.mark.usefixtures("each_engine")
async def test_put_works_before_the_node_is_open() -> None:
    handle = aiogpu.put(b"x" * LARGE)
    assert await v.give.remote(handle) == b"x" * LARGE
    del handle
    await aiogpu.shutdown()


async def test_arrays_of_all_kinds_survive_the_way(node: Node) -> None:
    big = 1 << 18
    arrays = [
        *(np.empty(0), np.empty((3, 0, 2)), np.array(7)),
        *(np.arange(big)[::2], np.arange(big).reshape(1024, -1).T),
        *(np.asfortranarray(np.ones((512, 600))), np.ones(big, "<f2")),
        np.broadcast_to(np.arange(3), (200_000, 3)),
        np.array([{"a": 1}, None], object),
        np.zeros(50_000, [("x", "i4"), ("y", "f8")]),
    ]
    for array in arrays:
        back = await v.give.remote(v.give.remote(array))
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert np.array_equal(back, array)


async def test_a_value_is_unpickled_once_if_awaited(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "seen"
    log.touch()
    first = v.sighted.remote(str(log))
    then = v.give.remote(first)
    assert await v.kinds.remote(then) == ["Sighted"]
    if await v.pid.remote() != os.getpid():
        assert str(os.getpid()) not in log.read_text().split()
    before = len(log.read_text().split())
    value = await first
    assert first.result() is value is await first
    assert len(log.read_text().split()) == before + 1
    assert await v.kinds.remote(first) == ["Sighted"]


@pytest.mark.parametrize("end", [v.Explosive, v.Ending])
@pytest.mark.needs("processes")
async def test_an_unreadable_value_leaves_nothing(end: Any, node: Node) -> None:
    box: Any = [end(), np.ones(LARGE)]
    give = v.give.options(max_retries=0)
    with pytest.raises((errors.DeserializationError, aiogpu.WorkerDiedError)):
        await give.remote(box)
    handle = aiogpu.put(box)
    with pytest.raises((errors.DeserializationError, aiogpu.WorkerDiedError)):
        await give.remote(handle)
    del handle, box
    await until_freed(node)


@pytest.mark.needs("processes")
async def test_cancel_stops_an_unpickling_that_hangs(node: Node, gate: Gate) -> None:
    stuck = v.give.remote([v.Gated(gate.path, "stuck"), np.ones(LARGE)])
    await gate.entered("stuck")
    stuck.cancel()
    await v.give.remote(1)
    await until_freed(node)


async def test_a_value_that_cannot_be_pickled_leaves_nothing(node: Node) -> None:
    large = np.ones(LARGE)
    for send in (aiogpu.put, v.give.remote):
        with pytest.raises(errors.SerializationError, match="will not travel"):
            send([large, v.Unwilling()])
    assert segments_in_use(node) == 0


async def test_two_threads_have_a_node_each(node: Node) -> None:
    async def other() -> int:
        async with aiogpu.init(address="local", num_cpus=1):
            handle = aiogpu.put(np.ones(LARGE))
            return int((await v.give.remote(handle)).sum())

    # Not at the same time: an inline node's task makes this process its worker.
    mine = await v.give.remote(np.full(LARGE, 2.0))
    assert await asyncio.to_thread(lambda: asyncio.run(other())) == LARGE
    assert mine.sum() == 2 * LARGE


async def test_values_outlive_their_node(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        kept = [aiogpu.put(np.ones(LARGE)), v.give.remote(np.ones(LARGE))]
        read = await v.give.remote(kept[0])
    assert read.sum() == LARGE
    del kept, read
    gc.collect()


@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_put_value_does_not_change(size: int, node: Node) -> None:
    """Readers do not change it either: each has memory of its own."""
    array = np.zeros(size, np.uint8)
    handle = aiogpu.put(array)
    array[:] = 1
    assert not (await handle).any()
    assert not (await v.give.remote(handle)).any()
    argument = v.give.remote(array)
    array[:] = 2
    assert (await argument == 1).all()
    (await argument)[:] = 3
    assert await v.changes.remote(handle, handle, argument) == [0, 3, 0, 3, 1, 3]
    assert await v.changes.remote(argument, handle, argument) == [1, 3, 0, 3, 1, 3]
    assert not (await handle).any()
    assert (await v.give.remote(argument) == 1).all()


@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_read_only_array_arrives_read_only(size: int, node: Node) -> None:
    array = np.zeros(size, np.uint8)
    array.flags.writeable = False
    for handle in (aiogpu.put(array), v.give.remote(array)):
        assert not (await handle).flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            await v.changes.remote(handle)


async def test_a_tensor_changes_for_one_reader_alone(node: Node) -> None:
    torch = pytest.importorskip("torch")
    handle = aiogpu.put(torch.zeros(LARGE))
    (await handle).add_(1)
    assert await v.changes.remote(handle, handle) == [0, 3, 0, 3]
    assert await v.changes.remote(handle) == [0, 3]


async def test_put_refuses_a_handle_and_keeps_nested_ones(node: Node) -> None:
    inner = v.give.remote([1])
    with pytest.raises(errors.MisuseError, match="already a handle"):
        aiogpu.put(inner)
    outer = aiogpu.put([inner])
    assert await v.kinds.remote(outer) == ["list"]
    (nested,) = await outer
    assert await nested == [1]
    with pytest.raises(errors.MisuseError, match="only be pickled"):
        pickle.dumps([outer])


@pytest.mark.parametrize("way", ["plain", "coroutine"])
async def test_what_tasks_put_outlives_them(way: str, node: Node) -> None:
    soft = "_softly" if way == "coroutine" else ""
    put_and_pass: Any = getattr(v, f"put_and_pass{soft}")
    put_and_give: Any = getattr(v, f"put_and_give{soft}")
    for value in (1, [None], os.urandom(LARGE)):
        assert await put_and_pass.remote(value) == value
        assert await v.put_and_get.remote(value) == value
    box = await put_and_give.remote(np.arange(LARGE))
    assert await v.get_nested.remote(box) is not None
    assert (await box["handle"]).sum() == sum(range(LARGE))


@pytest.mark.needs("processes")
async def test_views_in_globals_never_change(address: str) -> None:
    """Their values were freed, and others were written in the same memory."""
    async with aiogpu.init(address=address, num_cpus=1) as node:
        for i in range(5):
            await v.keep.remote(np.full(LARGE, i, np.uint8))
            await v.keep.remote(v.give.remote(np.full(LARGE, i, np.uint8)))
            await v.put_and_keep.remote(np.full(LARGE, i, np.uint8))
            for j in range(5):
                await v.give.remote(np.full(LARGE, 100 + j, np.uint8))
                await v.put_and_get.remote(np.full(LARGE, 100 + j, np.uint8))
        assert await v.bytes_kept.remote() == [i // 3 for i in range(15)]
        assert segments_in_use(node) >= 15
        await v.forget.remote()
        await v.give.remote(1)
        await until_freed(node)


async def test_a_value_is_freed_with_its_last_holder(node: Node) -> None:
    for how in ("put", "result", "nested", "failed"):
        handle: Any = v.give.remote(np.ones(LARGE))
        if how == "put":
            handle = aiogpu.put(np.ones(LARGE))
        if how == "nested":
            handle = await v.give_boxed.remote({"handle": handle, "a": np.ones(LARGE)})
        elif how == "failed":
            with pytest.raises(v.LoudError):
                await v.fail_with.remote(handle)
        else:
            await v.give.remote(handle)
        await asyncio.wait([v.give.remote(1)])
        del handle
        await until_freed(node)


@pytest.mark.needs("processes")
async def test_a_killed_worker_releases_what_it_read(node: Node) -> None:
    """A result that was given outlives its worker."""
    handle = aiogpu.put(np.ones(LARGE))
    pid = await v.keep.remote(handle)
    os.kill(pid, signal.SIGKILL)
    assert await v.give_sum.remote(handle) == LARGE
    del handle
    await until(lambda: segments_in_use(node) == 0)
    maker = v.Serial.remote()
    pid = await maker.own_pid.remote()
    large = maker.add.remote(np.ones(LARGE), 1)
    await asyncio.wait([large])
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert await v.give_sum.remote(large) == 2 * LARGE
    assert (await large).sum() == 2 * LARGE
    del large
    doomed = v.make_and_kill.remote(LARGE)
    for lost in (v.give_sum.remote(doomed), doomed):
        with pytest.raises(aiogpu.WorkerDiedError):
            await lost


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
async def test_many_values_are_held_at_once(count: int, node: Node) -> None:
    handles = [aiogpu.put(i) for i in range(count)]
    assert await v.give.remote(handles[-1]) == count - 1
    assert await v.total.remote(*handles[:10_000]) == sum(range(min(count, 10_000)))


async def test_many_buffers_and_readers_share_values(node: Node) -> None:
    """Workers also return one value while the node lends it to them again."""
    arrays = [np.full(70_000, i, np.uint8) for i in range(200)]
    back = await v.give.remote(v.give.remote(arrays))
    assert all(a[0] == a[-1] == i for i, a in enumerate(back))
    handle = aiogpu.put(np.ones(LARGE, np.uint8))
    for _ in range(20):
        sums = await asyncio.gather(*(v.give_sum.remote(handle) for _ in range(3)))
        assert sums == [LARGE] * 3


@pytest.mark.needs("processes")
async def test_a_value_put_amid_much_output_arrives(node: Node) -> None:
    """The driver reads the value's message before it has written the output."""
    talking = (v.talk_and_pass.remote() for _ in range(2))
    assert await asyncio.gather(*talking) == [LARGE] * 2


@pytest.mark.needs("processes")
@pytest.mark.parametrize(("kind", "state"), [("task", "pending"), ("actor", "done")])
async def test_arguments_that_are_too_large_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, state: str
) -> None:
    """Each is small; together they exceed one frame."""
    monkeypatch.setattr("aiogpu.runtime.objects.values.LARGEST_PAYLOAD", 1 << 20)
    async with asyncio.timeout(60), aiogpu.init(num_cpus=2):
        parts = [v.give.remote(b"x" * 200_000) for _ in range(6)]
        if state == "done":
            await asyncio.gather(*parts)
        counter: Any = v if kind == "task" else await v.Numbering.remote()
        with pytest.raises(
            errors.SerializationError, match=r"have 12\d+ bytes in total"
        ):
            await counter.how_many.remote(*parts)
        assert await v.how_many.remote(*parts[:4]) == 4
        running = [task.name for task in (await aiogpu.status()).tasks]
        assert running == ["Numbering"] * (kind == "actor")


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Let this process open only so many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_a_value_travels_in_the_frame(node: Node) -> None:
    await asyncio.gather(*(v.give.remote(i) for i in range(4)))
    with few_descriptors(8):
        handles = [aiogpu.put(np.full(LARGE, i, np.uint8)) for i in range(12)]
        for i, handle in enumerate(handles):
            assert (await v.give_sum.remote(handle)) == i * LARGE


@pytest.fixture
async def turns() -> AsyncIterator[None]:
    """Count the turns of the loop."""
    shared_tasks.turns = 0
    shared_tasks.unpickled_in.clear()

    async def count() -> None:
        while True:
            shared_tasks.turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    yield
    counting.cancel()
    await asyncio.wait([counting])


async def test_each_large_result_is_unpickled_in_its_own_turn(turns: None) -> None:
    """The loop runs in between; handles end in order."""
    many = 12
    for wait in (lambda handle: handle, lambda handle: handle.coro()):
        shared_tasks.unpickled_in.clear()
        # Open a node for each case: a warm worker answers before all handles wait.
        async with aiogpu.init(num_cpus=1):
            handles = [make_slow_value.remote(number) for number in range(many)]
            assert await asyncio.gather(*map(wait, handles)) == [*range(many)]
        assert len(set(shared_tasks.unpickled_in)) == many
    async with aiogpu.init(num_cpus=1):
        ended: list[int] = []
        slow = make_slow_value.remote
        handles = [slow(0), v.kinds.remote(), slow(2)]
        for number, handle in enumerate(handles):
            handle.add_done_callback(lambda _, number=number: ended.append(number))
        await asyncio.gather(*handles)
        assert ended == [0, 1, 2]
        handles = [make_slow_value.remote(number) for number in range(3)]
        handles[0].add_done_callback(lambda _: handles[2].cancel())
        results = await asyncio.gather(*handles, return_exceptions=True)
        assert results[:2] == [0, 1]
        assert isinstance(results[2], asyncio.CancelledError)


async def test_a_result_is_not_unpickled_before_it_is_awaited(turns: None) -> None:
    async with aiogpu.init(num_cpus=1):
        handle = make_slow_value.remote(1)
        while not handle.done():
            await asyncio.sleep(0)
        assert shared_tasks.unpickled_in == []
        assert await handle == 1
        assert len(shared_tasks.unpickled_in) == 1


# Segments of the local engine

A, B = b"ab"


def full_of(byte: int) -> memoryview:
    return memoryview(bytes([byte]) * LARGE)


async def test_a_value_in_shared_memory_is_not_copied() -> None:
    async with aiogpu.init(num_cpus=1):
        handle = aiogpu.put(full_of(A))
        before = shared_memory()
        given = await shared_tasks.give_back.remote(handle)
        again = await shared_tasks.give_back.remote(given)
        put = aiogpu.put(given)
        del handle, given
        assert shared_memory() - before < LARGE
        for _ in range(3):
            assert await shared_tasks.count.remote(full_of(B), B) == LARGE
        assert set(again) == set(await put) == {A}
        assert await shared_tasks.count.remote(again, A) == LARGE


async def test_a_value_changed_by_force_is_seen_by_no_other() -> None:
    async with aiogpu.init(num_cpus=1):
        handle = aiogpu.put(full_of(A))
        changed = await shared_tasks.change_by_force.remote(handle)
        assert (changed[0], changed[1]) == (B, A)
        assert set(await handle) == {A}
        assert await shared_tasks.count.remote(handle, A) == LARGE


async def test_a_worker_killed_while_it_writes_leaves_no_memory() -> None:
    async with aiogpu.init(num_cpus=1):
        await shared_tasks.make.remote(A, LARGE)
        assert await tasks.add.remote(1) == 2
        # The worker now has a segment to write again, which it does by copying.
        before = shared_memory()
        with pytest.raises(aiogpu.WorkerDiedError, match="SIGBUS"):
            await shared_tasks.die_while_writing.remote(LARGE)
        assert await tasks.add.remote(1) == 2
        assert shared_memory() < before


async def test_past_the_limit_values_go_to_disk_and_come_back(tmp_path: Path) -> None:
    options = {"object_memory": LARGE, "spill_directory": tmp_path}
    async with aiogpu.init(num_cpus=1, **options):
        before = shared_memory()
        handles = [aiogpu.put(full_of(A)) for _ in range(3)]
        handles += [shared_tasks.make.remote(A, LARGE) for _ in range(3)]
        await asyncio.wait(handles)
        assert shared_memory() - before <= 2 * LARGE
        for handle in handles:
            assert await shared_tasks.count.remote(handle, A) == LARGE
            assert set(await handle) == {A}
        assert os.listdir(tmp_path) == []


async def test_a_full_disk_raises_an_object_memory_error() -> None:
    # No user can make a file in /proc.
    async with aiogpu.init(num_cpus=1, object_memory=LARGE, spill_directory="/proc"):
        handle = aiogpu.put(full_of(A))
        for send in (aiogpu.put, lambda value: shared_tasks.count.remote(value, A)):
            with pytest.raises(errors.ObjectMemoryError, match="object_memory="):
                send(full_of(A))
        with pytest.raises(errors.ObjectMemoryError, match=r"make ran, but .*/proc"):
            await shared_tasks.make.remote(A, LARGE)
        assert await shared_tasks.count.remote(handle, A) == LARGE
        del handle
        while True:
            # The worker's next message says that it needs the value no more.
            await tasks.add.remote(1)
            try:
                aiogpu.put(full_of(B))
            except errors.ObjectMemoryError:
                continue
            break


KILLED = """
    import os, signal, sys
    import aiogpu

    async def main(place):
        async with aiogpu.init(num_cpus=1, object_memory=1<<20, spill_directory=place):
            handles = [aiogpu.put(memoryview(bytes(1 << 20))) for _ in range(3)]
            links = map(readlink, os.listdir("/proc/self/fd"))
            print([link for link in links if "deleted" in link], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def readlink(fd):
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""

    aiogpu.run(main(sys.argv[1]))
"""


def test_a_killed_driver_leaves_no_spilled_file(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as place:
        program = start(KILLED, str(tmp_path), XDG_RUNTIME_DIR=place)
        program.wait(timeout=60)
        wait_until_gone(5, place)
        out, err = program.communicate(timeout=5)
    assert program.returncode == -signal.SIGKILL, err
    assert str(tmp_path) in out, "no value was spilled"
    assert os.listdir(tmp_path) == []


async def test_memory_written_and_not_sent_is_freed() -> None:
    """Its descriptor is with the driver, or on the way there."""
    gc.collect()  # tests of segments alone may have left some
    before = shared_memory()
    async with aiogpu.init(num_cpus=1):
        await shared_tasks.write_in_vain.remote(LARGE, 1)  # a new segment
        await shared_tasks.make.remote(A, LARGE)
        for _ in range(2):  # a warm segment, then new ones
            await shared_tasks.write_in_vain.remote(LARGE, 3)
        await until(lambda: shared_memory() - before < LARGE)
        assert len(await shared_tasks.make.remote(A, LARGE)) == LARGE


# A race: a child ends while its parent returns the child's handle. The test blocks the
# loop of its node while the child answers and the parent shares the handle, so that the
# node reads the answer first, and the handle after it.


@pytest.fixture
async def points(tmp_path: Path) -> AsyncIterator[Points]:
    points = Points(tmp_path)
    points.add("child runs", "child goes on", "child has answered")
    points.add("parent runs", "parent goes on", "shared")
    async with aiogpu.init(address="local", num_cpus=4):
        yield points


async def race(points: Points) -> None:
    """Have the child answer before the node reads that its handle is shared."""
    for name in ("parent runs", "child runs"):
        await asyncio.to_thread(points.meet, name)
    for name in ("child goes on", "child has answered", "parent goes on", "shared"):
        points.meet(name)


async def test_a_childs_result_is_lost_with_a_parent_that_dies(points: Points) -> None:
    """The result went to a process that has ended."""
    stream = shared_tasks.hand_on_and_die.remote(points)
    await race(points)
    handle, _ = await anext(stream)
    async with asyncio.timeout(20):
        with pytest.raises(aiogpu.WorkerDiedError, match="the result is lost"):
            await handle
    with pytest.raises(aiogpu.WorkerDiedError, match="signal 9"):
        await anext(stream)


@pytest.mark.parametrize("giver", ["task", "coroutine", "actor"])
async def test_a_childs_handle_outlives_its_parent(giver: str, points: Points) -> None:
    if giver == "actor":
        actor = await Parent.remote()
        stream = actor.hand_on_and_leave.remote(points)
        await race(points)
        handle, _ = await anext(stream)
    else:
        hand_on: Any = shared_tasks.hand_on
        if giver == "coroutine":
            hand_on = shared_tasks.hand_on_softly
        parent = hand_on.remote(points)
        await race(points)
        handle, _ = await parent
    async with asyncio.timeout(20):
        assert await handle == "a result"
