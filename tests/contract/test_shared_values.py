"""What holds of values in shared memory, whatever becomes of their holders."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import tempfile
from pathlib import Path

import pytest

import aiogpu
from aiogpu.engines.local import LocalEngine
from benchmarks.census import shared_memory
from tests.contract import shared_tasks, tasks
from tests.faults.remains import gone_within
from tests.support.gate import Gate
from tests.support.program import start
from tests.support.until import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

LARGE = 1 << 20
A, B = b"ab"


def full_of(byte: int) -> memoryview:
    return memoryview(bytes([byte]) * LARGE)


async def test_what_is_put_stays_whatever_becomes_of_the_object() -> None:
    data = bytearray(full_of(A))
    async with aiogpu.init(num_cpus=1):
        handle = await aiogpu.put(memoryview(data))
        given = shared_tasks.count.remote(memoryview(data), A)
        data[:] = full_of(B)
        assert await shared_tasks.count.remote(handle, A) == LARGE
        assert await given == LARGE
        assert (await handle)[0] == A


async def test_nobody_can_change_what_others_see() -> None:
    async with aiogpu.init(num_cpus=1):
        handle = await aiogpu.put(full_of(A))
        with pytest.raises(TypeError, match="read-only"):
            await shared_tasks.try_to_change.remote(handle)
        assert (await handle).readonly
        assert (await handle)[0] == A


async def test_what_is_written_in_vain_is_given_up() -> None:
    """Its descriptor is with the driver, or on the way there."""
    gc.collect()  # tests of segments alone may have left some
    before = shared_memory()
    async with aiogpu.init(num_cpus=1) as session:
        await shared_tasks.write_in_vain.remote(LARGE, 1)  # a new segment
        made = await shared_tasks.make.remote(A, LARGE)
        del made
        for _ in range(2):  # a warm one, then new ones
            await shared_tasks.write_in_vain.remote(LARGE, 3)
        engine = session._session._engine
        assert isinstance(engine, LocalEngine)
        store = engine.store
        (borrowers,) = [store.borrowers(caller) for caller in store._workers.values()]
        await until(lambda: not borrowers.warm)
        await until(lambda: shared_memory() - before < LARGE)
        on_the_way = select.poll()
        assert borrowers._socket is not None
        on_the_way.register(borrowers._socket, select.POLLIN)
        await until(lambda: not on_the_way.poll(0))
        assert not borrowers._arrived
        assert store.memory.used == store.memory.warm == 0
        assert len(await shared_tasks.make.remote(A, LARGE)) == LARGE


async def test_a_view_in_a_global_never_changes() -> None:
    async with aiogpu.init(num_cpus=1):
        await shared_tasks.keep.remote(full_of(A))
        await shared_tasks.keep.remote(shared_tasks.make.remote(A, LARGE))
        for _ in range(20):
            # Each is dropped at once, so what it lay in is written again.
            assert await shared_tasks.count.remote(full_of(B), B) == LARGE
            assert len(await shared_tasks.make.remote(B, LARGE)) == LARGE
        assert await shared_tasks.bytes_kept.remote() == [{A}, {A}]


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


async def test_a_view_outlives_its_handle_and_its_node() -> None:
    async with aiogpu.init(num_cpus=1):
        views = [await shared_tasks.make.remote(A, LARGE)]
        views.append(await (await aiogpu.put(full_of(A))))
        for _ in range(5):
            await shared_tasks.count.remote(full_of(B), B)
    assert [set(view) for view in views] == [{A}, {A}]


async def test_what_is_needed_and_never_comes(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        failing = tasks.fail.remote(ValueError, "no data")
        needs_it = tasks.add.remote(tasks.add.remote(failing))
        with pytest.raises(ValueError, match="no data"):
            await needs_it
        unwanted = tasks.gated.remote(gate.path, "a")
        needs_it = tasks.add.remote(unwanted)
        unwanted.cancel()
        with pytest.raises(aiogpu.TaskCancelledError):
            await needs_it


async def test_a_worker_that_is_killed_while_it_holds_one(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        handle = await aiogpu.put(full_of(A))
        holding = shared_tasks.hold.remote(gate.path, handle)
        await gate.entered("holds")
        os.kill(gate.pids["holds"], signal.SIGKILL)
        with pytest.raises(aiogpu.WorkerDiedError):
            await holding
        assert await shared_tasks.count.remote(handle, A) == LARGE
        before = shared_memory()
        del handle, holding
        await tasks.add.remote(1)
        again = await aiogpu.put(full_of(B))
        assert shared_memory() - before < LARGE, "what it held was not written again"
        assert await shared_tasks.count.remote(again, B) == LARGE


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
        gone_within(5, place)
        out, err = program.communicate(timeout=5)
    assert program.returncode == -signal.SIGKILL, err
    assert str(tmp_path) in out, "nothing was spilled"
    assert os.listdir(tmp_path) == []
