"""[B16] Values in shared memory: `put`, who reads them, when they are freed."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import resource
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from benchmarks.processes import shared_memory
from tests.contract import shared_tasks, tasks
from tests.contract import value_tasks as v
from tests.contract.served import ServedEngine
from tests.contract.shared_tasks import Parent, Points, make_slow_value
from tests.faults.leftovers import wait_until_gone
from tests.support.gate import Gate
from tests.support.program import start
from tests.support.until import until

np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2),
]

LARGE = 1 << 20


def held(node: aiogpu.types.Node) -> int:
    """Segments that somebody may still read."""
    engine: Any = node._session._engine
    if isinstance(engine, ServedEngine):
        return engine.segments
    store = getattr(engine, "store", None)
    return 0 if store is None else len(store._segments)


@pytest.mark.usefixtures("each_engine")
async def test_it_is_put_before_the_node_is_open() -> None:
    handle = await aiogpu.put(b"x" * LARGE)
    assert await v.give.remote(handle) == b"x" * LARGE
    del handle
    await aiogpu.shutdown()


async def test_arrays_of_all_kinds(node: aiogpu.types.Node) -> None:
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


@pytest.mark.parametrize("end", [v.Explosive, v.Ending])
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
    stuck = v.give.remote([v.Gated(gate.path, "stuck"), np.ones(LARGE)])
    await gate.entered("stuck")
    stuck.cancel()
    await v.give.remote(1)
    gc.collect()
    await until(lambda: held(node) == 0)


async def test_what_cannot_be_pickled_leaves_nothing(node: aiogpu.types.Node) -> None:
    large = np.ones(LARGE)
    for ask in (
        lambda: aiogpu.put([large, v.Unwilling()]),
        lambda: v.give.remote([large, v.Unwilling()]),
    ):
        with pytest.raises(aiogpu.errors.SerializationError, match="will not travel"):
            ask()
    assert held(node) == 0


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


@pytest.mark.parametrize("size", [10, LARGE])
async def test_what_was_put_does_not_change(size: int, node: aiogpu.types.Node) -> None:
    """Nor can those who get it change it."""
    array = np.zeros(size, np.uint8)
    handle = await aiogpu.put(array)
    array[:] = 1
    assert not (await handle).any()
    assert not (await v.give.remote(handle)).any()
    argument = v.give.remote(array)
    array[:] = 2
    assert (await argument == 1).all()
    if size == LARGE:
        assert not (await argument).flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            await v.change.remote(argument)


async def test_handles_within_values_and_pickles(node: aiogpu.types.Node) -> None:
    inner = v.give.remote([1])
    with pytest.raises(aiogpu.errors.MisuseError, match="already a handle"):
        aiogpu.put(inner)
    outer = await aiogpu.put([inner])
    assert await v.kinds.remote(outer) == ["list"]
    (found,) = await outer
    assert await found == [1]
    with pytest.raises(aiogpu.errors.MisuseError, match="only be pickled"):
        pickle.dumps([outer])


@pytest.mark.parametrize("way", ["plain", "coroutine"])
async def test_tasks_put(way: str, node: aiogpu.types.Node) -> None:
    """What they have put outlives them."""
    soft = way == "coroutine"
    put_and_pass = v.put_and_pass_softly if soft else v.put_and_pass
    put_and_give = v.put_and_give_softly if soft else v.put_and_give
    for value in (1, [None], b"x" * LARGE):
        assert await put_and_pass.remote(value) == value
        assert await v.put_and_get.remote(value) == value
    box = await put_and_give.remote(np.arange(LARGE))
    assert await v.get_nested.remote(box) is not None
    assert (await box["handle"]).sum() == sum(range(LARGE))


@pytest.mark.needs("processes")
async def test_views_in_globals_never_change(address: str) -> None:
    """Though their values were freed, and others were written in their place."""
    async with aiogpu.init(address=address, num_cpus=1) as node:
        for i in range(5):
            await v.keep.remote(np.full(LARGE, i, np.uint8))
            await v.keep.remote(v.give.remote(np.full(LARGE, i, np.uint8)))
            await v.put_and_keep.remote(np.full(LARGE, i, np.uint8))
            for j in range(5):
                await v.give.remote(np.full(LARGE, 100 + j, np.uint8))
                await v.put_and_get.remote(np.full(LARGE, 100 + j, np.uint8))
        assert await v.bytes_kept.remote() == [i // 3 for i in range(15)]
        assert held(node) >= 15
        await v.forget.remote()
        await v.give.remote(1)
        gc.collect()
        await until(lambda: held(node) == 0)


async def test_it_is_freed_with_its_last_holder(node: aiogpu.types.Node) -> None:
    for how in ("put", "result", "nested", "failed"):
        handle: Any = v.give.remote(np.ones(LARGE))
        if how == "put":
            handle = await aiogpu.put(np.ones(LARGE))
        if how == "nested":
            handle = await v.give_boxed.remote({"handle": handle, "a": np.ones(LARGE)})
        elif how == "failed":
            with pytest.raises(v.LoudError):
                await v.fail_with.remote(handle)
        else:
            await v.give.remote(handle)
        await asyncio.wait([v.give.remote(1)])
        del handle
        gc.collect()
        await until(lambda: held(node) == 0)


@pytest.mark.needs("processes")
async def test_workers_that_are_killed(node: aiogpu.types.Node) -> None:
    """Whoever holds a value lets go of it; what is made stays, if it was given."""
    handle = await aiogpu.put(np.ones(LARGE))
    pid = await v.keep.remote(handle)
    os.kill(pid, signal.SIGKILL)
    assert await v.give_sum.remote(handle) == LARGE
    del handle
    await until(lambda: held(node) == 0)
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
async def test_many_live_values(count: int, node: aiogpu.types.Node) -> None:
    handles = [await aiogpu.put(i) for i in range(count)]
    assert await v.give.remote(handles[-1]) == count - 1
    assert await v.total.remote(*handles[:10_000]) == sum(range(min(count, 10_000)))


async def test_many_buffers_and_readers(node: aiogpu.types.Node) -> None:
    """Of one value too, which workers return while it is lent to them again."""
    arrays = [np.full(70_000, i, np.uint8) for i in range(200)]
    back = await v.give.remote(v.give.remote(arrays))
    assert all(a[0] == a[-1] == i for i, a in enumerate(back))
    handle = await aiogpu.put(np.ones(LARGE, np.uint8))
    for _ in range(20):
        found = await asyncio.gather(*(v.give_sum.remote(handle) for _ in range(3)))
        assert found == [LARGE] * 3


@pytest.mark.needs("processes")
async def test_what_is_put_between_much_output(node: aiogpu.types.Node) -> None:
    """The driver hears of it before what was printed is out."""
    for found in await asyncio.gather(*(v.talk_and_pass.remote() for _ in range(2))):
        assert found == LARGE


@pytest.mark.needs("processes")
@pytest.mark.parametrize(("kind", "state"), [("task", "pending"), ("actor", "done")])
async def test_arguments_that_are_too_large_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, state: str
) -> None:
    """Each is small; together they are more than one frame carries."""
    monkeypatch.setattr("aiogpu.runtime.objects.values.LARGEST_PAYLOAD", 1 << 20)
    async with asyncio.timeout(60), aiogpu.init(num_cpus=2):
        parts = [v.give.remote(b"x" * 200_000) for _ in range(6)]
        if state == "done":
            await asyncio.gather(*parts)
        if kind == "task":
            refused = v.how_many.remote(*parts)
        else:
            actor = await v.Numbering.remote()
            refused = actor.how_many.remote(*parts)
        with pytest.raises(
            aiogpu.errors.SerializationError, match=r"have 12\d+ bytes in all"
        ):
            await refused
        assert await v.how_many.remote(*parts[:4]) == 4
        unended = [task.name for task in (await aiogpu.status()).tasks]
        assert unended == ["Numbering"] * (kind == "actor")


np = pytest.importorskip("numpy")


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """This process may open only so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_a_value_travels_in_the_frame(
    node: aiogpu.types.Node,
) -> None:
    await asyncio.gather(*(v.give.remote(i) for i in range(4)))
    with few_descriptors(8):
        handles = [await aiogpu.put(np.full(LARGE, i, np.uint8)) for i in range(12)]
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


async def test_large_results_are_unpickled_in_turns_of_their_own(turns: None) -> None:
    """They do not hold the loop until all are; handles end in order."""
    many = 12
    for wait in (lambda handle: handle, lambda handle: handle.coro()):
        shared_tasks.unpickled_in.clear()
        # A node each: a worker that is warm answers before all of them wait.
        async with aiogpu.init(num_cpus=1):
            handles = [make_slow_value.remote(number) for number in range(many)]
            assert await asyncio.gather(*map(wait, handles)) == [*range(many)]
        assert len(set(shared_tasks.unpickled_in)) == many
    async with aiogpu.init(num_cpus=1):
        ended: list[int] = []
        handles = [
            make_slow_value.remote(0),
            v.kinds.remote(),
            make_slow_value.remote(2),
        ]
        for number, handle in enumerate(handles):
            handle.add_done_callback(lambda _, number=number: ended.append(number))
        await asyncio.gather(*handles)
        assert ended == [0, 1, 2]
        handles = [make_slow_value.remote(number) for number in range(3)]
        handles[0].add_done_callback(lambda _: handles[2].cancel())
        results = await asyncio.gather(*handles, return_exceptions=True)
        assert results[:2] == [0, 1]
        assert isinstance(results[2], asyncio.CancelledError)


async def test_what_nobody_waits_for_is_not_unpickled(turns: None) -> None:
    async with aiogpu.init(num_cpus=1):
        handle = make_slow_value.remote(1)
        while not handle.done():
            await asyncio.sleep(0)
        assert shared_tasks.unpickled_in == []
        assert await handle == 1
        assert len(shared_tasks.unpickled_in) == 1


# What holds of the local engine's segments

A, B = b"ab"


def full_of(byte: int) -> memoryview:
    return memoryview(bytes([byte]) * LARGE)


async def test_what_lies_there_already_is_not_copied() -> None:
    async with aiogpu.init(num_cpus=1):
        handle = await aiogpu.put(full_of(A))
        before = shared_memory()
        given = await shared_tasks.give_back.remote(handle)
        again = await shared_tasks.give_back.remote(given)
        put = await aiogpu.put(given)
        del handle, given
        assert shared_memory() - before < LARGE
        for _ in range(3):
            assert await shared_tasks.count.remote(full_of(B), B) == LARGE
        assert set(again) == set(await put) == {A}
        assert await shared_tasks.count.remote(again, A) == LARGE


async def test_what_was_changed_by_force_is_copied_and_seen_by_nobody_else() -> None:
    async with aiogpu.init(num_cpus=1):
        handle = await aiogpu.put(full_of(A))
        changed = await shared_tasks.change_by_force.remote(handle)
        assert (changed[0], changed[1]) == (B, A)
        assert set(await handle) == {A}
        assert await shared_tasks.count.remote(handle, A) == LARGE


async def test_a_worker_that_is_killed_while_it_writes_one() -> None:
    async with aiogpu.init(num_cpus=1):
        await shared_tasks.make.remote(A, LARGE)
        assert await tasks.add.remote(1) == 2
        # Now it has one that it may write again, which it does by copying.
        before = shared_memory()
        with pytest.raises(aiogpu.WorkerDiedError, match="SIGBUS"):
            await shared_tasks.die_while_writing.remote(LARGE)
        assert await tasks.add.remote(1) == 2
        assert shared_memory() < before


async def test_past_the_limit_values_go_to_disk_and_come_back(tmp_path: Path) -> None:
    options = {"object_memory": LARGE, "spill_directory": tmp_path}
    async with aiogpu.init(num_cpus=1, **options):
        before = shared_memory()
        handles = [await aiogpu.put(full_of(A)) for _ in range(3)]
        handles += [shared_tasks.make.remote(A, LARGE) for _ in range(3)]
        await asyncio.wait(handles)
        assert shared_memory() - before <= 2 * LARGE
        for handle in handles:
            assert await shared_tasks.count.remote(handle, A) == LARGE
            assert set(await handle) == {A}
        assert os.listdir(tmp_path) == []


async def test_without_room_on_disk_either_it_is_an_error() -> None:
    # Nobody can make a file there.
    async with aiogpu.init(num_cpus=1, object_memory=LARGE, spill_directory="/proc"):
        handle = await aiogpu.put(full_of(A))
        with pytest.raises(aiogpu.errors.ObjectMemoryError, match="object_memory="):
            aiogpu.put(full_of(A))
        with pytest.raises(aiogpu.errors.ObjectMemoryError, match="object_memory="):
            shared_tasks.count.remote(full_of(A), A)
        with pytest.raises(
            aiogpu.errors.ObjectMemoryError, match=r"make ran, but .*/proc"
        ):
            await shared_tasks.make.remote(A, LARGE)
        assert await shared_tasks.count.remote(handle, A) == LARGE
        del handle
        while True:
            # The worker says that it needs it no more with its next message.
            await tasks.add.remote(1)
            try:
                await aiogpu.put(full_of(B))
            except aiogpu.errors.ObjectMemoryError:
                continue
            break


KILLED = """
    import os, signal, sys
    import aiogpu

    async def main(place):
        async with aiogpu.init(
            num_cpus=1, object_memory=1 << 20, spill_directory=place
        ):
            handles = [await aiogpu.put(memoryview(bytes(1 << 20))) for _ in range(3)]
            links = [link for link in map(readlink, fds()) if "deleted" in link]
            print(links, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def fds():
        return os.listdir("/proc/self/fd")

    def readlink(fd):
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""

    aiogpu.run(main(sys.argv[1]))
"""


def test_of_a_driver_that_is_killed_nothing_is_left(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as place:
        program = start(KILLED, str(tmp_path), XDG_RUNTIME_DIR=place)
        program.wait(timeout=60)
        wait_until_gone(5, place)
        out, err = program.communicate(timeout=5)
    assert program.returncode == -signal.SIGKILL, err
    assert str(tmp_path) in out, "nothing was spilled"
    assert os.listdir(tmp_path) == []


async def test_what_is_written_in_vain_is_given_up() -> None:
    """Its descriptor is with the driver, or on the way there."""
    gc.collect()  # tests of segments alone may have left some
    before = shared_memory()
    async with aiogpu.init(num_cpus=1):
        await shared_tasks.write_in_vain.remote(LARGE, 1)  # a new segment
        made = await shared_tasks.make.remote(A, LARGE)
        del made
        for _ in range(2):  # a warm one, then new ones
            await shared_tasks.write_in_vain.remote(LARGE, 3)
        await until(lambda: shared_memory() - before < LARGE)
        assert len(await shared_tasks.make.remote(A, LARGE)) == LARGE


# Handles of children in results, where the child ends as its handle is handed on: the
# test blocks the loop of its node while the child answers and its parent shares the
# handle. The node reads the answer first and the handle after it, as in the race.


@pytest.fixture
async def points(tmp_path: Path) -> AsyncIterator[Points]:
    points = Points(tmp_path)
    points.add("child runs", "child goes on", "child has answered")
    points.add("parent runs", "parent goes on", "shared")
    async with aiogpu.init(address="local", num_cpus=4):
        yield points


async def race(points: Points) -> None:
    """Have the child answer before the node hears that its handle is shared."""
    await asyncio.to_thread(points.meet, "parent runs")
    await asyncio.to_thread(points.meet, "child runs")
    for name in (
        *("child goes on", "child has answered"),
        *("parent goes on", "shared"),
    ):
        points.meet(name)


async def test_of_a_task_that_dies(points: Points) -> None:
    """The answer went to a process that nobody can ask any more."""
    stream = shared_tasks.hand_on_and_die.remote(points)
    await race(points)
    handle, _ = await anext(stream)
    async with asyncio.timeout(20):
        with pytest.raises(aiogpu.WorkerDiedError, match="the result is lost"):
            await handle
    with pytest.raises(aiogpu.WorkerDiedError, match="signal 9"):
        await anext(stream)


@pytest.mark.parametrize("giver", ["task", "coroutine", "actor"])
async def test_a_childs_handle_of_one_that_ends(giver: str, points: Points) -> None:
    if giver == "actor":
        actor = await Parent.remote()
        stream = actor.hand_on_and_leave.remote(points)
        await race(points)
        handle, _ = await anext(stream)
    else:
        softly = giver == "coroutine"
        hand_on = shared_tasks.hand_on_softly if softly else shared_tasks.hand_on
        parent = hand_on.remote(points)
        await race(points)
        handle, _ = await parent
    async with asyncio.timeout(20):
        assert await handle == "a result"
