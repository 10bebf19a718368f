"""[B32] What nobody holds any more is given up: actors, values, memory, descriptors.

An actor ends soon after its last handle, wherever that has been, and no sooner.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import aiogpu
from aiogpu.engines.local import LocalEngine
from aiogpu.linux.procfs import read_numbers
from aiogpu.serialization.references import SHARED_FROM
from tests.contract import let_go_tasks, tasks
from tests.contract.let_go_tasks import Model, Serial, Soft
from tests.support.gate import Gate
from tests.support.program import run
from tests.support.until import LIMIT, until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]
CLASSES: list[Any] = [Serial, Soft]
MAKING = ("make_and_drop", "make_and_call")


async def gpu_is_free() -> None:
    """Return when no model lives any more."""
    gc.collect()
    async with asyncio.timeout(LIMIT):
        while (await aiogpu.available_resources())["GPU"] != 1:
            await asyncio.sleep(0)


async def gpu_can_be_had() -> None:
    """Return when another model has had it, after all that had asked before."""
    gc.collect()
    async with asyncio.timeout(LIMIT):
        await Model.remote()
    await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
async def test_what_an_idle_actor_was_given_or_has_made_or_found() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        for holder in CLASSES:
            idle, model = await holder.remote(), await Model.remote()
            assert await idle.take.remote([model]) == 42
            del model
            await gpu_is_free()
            (model,) = await idle.make.remote()
            assert await model.answer.remote() == 42
            del model
            await gpu_is_free()
            del idle
        idle, model = await Serial.remote(), await Model.options(name="it").remote()
        assert await idle.find_twice.remote("it") == 84
        del model
        await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
async def test_what_an_actor_or_a_task_was_given_as_a_result() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        maker = await Serial.remote()
        for asker in CLASSES:
            idle = await asker.remote()
            for _ in range(2):
                assert await idle.ask.remote(maker) == 42
                await gpu_is_free()
        for _ in range(2):
            assert await let_go_tasks.ask.remote(maker) == 42
            await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize(
    ("pickle_it", "refusal"),
    [
        (let_go_tasks.send_with_a_lock, aiogpu.errors.SerializationError),
        (let_go_tasks.pickle_by_hand, aiogpu.errors.MisuseError),
    ],
    ids=["unpicklable", "by hand"],
)
async def test_what_was_pickled_and_not_sent(
    address: str, pickle_it: Callable[[Any], None], refusal: type[Exception]
) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        model, is_refused = await Model.remote(), False
        try:
            pickle_it(model)
        except refusal:
            is_refused = True
        # By hand only Ray refuses it, which has to count who holds it.
        by_hand = pickle_it is let_go_tasks.pickle_by_hand
        assert is_refused is (not by_hand or address == "ray")
        del model
        await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
async def test_what_was_put() -> None:
    """The value holds the actor until nobody has the value."""
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        model = await Model.remote()
        value: Any = await aiogpu.put([model])
        del model
        gc.collect()
        (again,) = await value
        assert await again.answer.remote() == 42
        del again, value
        await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
@pytest.mark.needs("holders")
async def test_what_an_error_has_that_a_task_has_made() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        with pytest.raises(let_go_tasks.HoldingError) as caught:
            await let_go_tasks.fail_with_a_new_one.remote()
        (model,) = caught.value.args
        assert await model.answer.remote() == 42
        del model, caught
        await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
@pytest.mark.needs("processes", "holders")
async def test_what_a_constructor_was_given_that_is_called_again() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        model = await Model.remote()
        asking = await let_go_tasks.Asking.remote(model)
        del model
        first = await asking.pid.remote()
        aiogpu.kill(asking, no_restart=False)
        assert await asking.pid.remote() != first
        await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("holder", ["actor", "task"])
async def test_what_plain_code_did_not_wait_for(holder: str) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        # It is idle afterwards, and so is the worker of the task.
        idle = await Serial.remote() if holder == "actor" else None
        for method in let_go_tasks.UNAWAITED:
            models = [] if method in MAKING else [await Model.remote()]
            if idle is None:
                told = let_go_tasks.do.remote(method, models)
            else:
                told = getattr(idle, method).remote(models)
            del models
            assert await asyncio.wait([told])
            assert isinstance(told.exception(), ValueError | None)
            del told
            await gpu_can_be_had()


@pytest.mark.usefixtures("each_engine")
@pytest.mark.needs("processes")
async def test_what_the_frames_of_a_workers_last_error_hold(gate: Gate) -> None:
    """The worker is idle afterwards: no task follows, and no collector runs."""
    async with aiogpu.init(num_cpus=1):
        for task in (let_go_tasks.fail_with, let_go_tasks.fail_softly_with):
            name = task.__name__
            with pytest.raises(ValueError, match=name):
                await task.remote(gate.path, name)
            await gate.entered(name)
        with pytest.raises(ValueError, match="stream"):
            async for _ in let_go_tasks.fail_amid_items.remote(gate.path, "stream"):
                pass
        await gate.entered("stream")


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("holder", ["actor", "task"])
async def test_what_an_answer_has_that_nobody_waits_for(holder: str) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        making = await Serial.remote()
        idle = await Serial.remote() if holder == "actor" else None
        for _ in range(2):
            if idle is None:
                await let_go_tasks.leave.remote(making)
            else:
                await idle.make_another_leave_one.remote([making])
            # Until then it may not be made yet.
            (model,) = await making.make.remote()
            await asyncio.wait([model.answer.remote()])
            del model
            await gpu_is_free()


@pytest.mark.usefixtures("each_engine")
async def test_a_result_keeps_it_whatever_another_call_sends_meanwhile() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        maker = await Soft.remote()
        made = maker.make_at_the_gate.remote()
        while await maker.count.remote() < 1:
            await asyncio.sleep(0)
        called = maker.call_at_the_gate.remote()
        while await maker.count.remote() < 2:
            await asyncio.sleep(0)
        await maker.open.remote()
        await called
        # The task that was sent in the same turn has ended; what it held has gone.
        for _ in range(20):
            await maker.count.remote()
        (model,) = await made
        assert await model.answer.remote() == 42


# A task that goes on for long: what it has let go of is free meanwhile


COUNT = 8


@pytest.mark.parametrize("way", ["items", "results", "values"])
@pytest.mark.parametrize("task", [let_go_tasks.take, let_go_tasks.take_softly])
async def test_values_that_it_has_had(task: object, way: str, gate: Gate) -> None:
    assert isinstance(task, aiogpu.types.RemoteFunction)
    async with aiogpu.init(num_cpus=1) as session:
        taking = task.remote(gate.path, way, COUNT, SHARED_FROM)
        await gate.entered("taken")
        engine = session._session._engine
        assert isinstance(engine, LocalEngine)
        memory = engine.store.memory
        # The last one may be told with what is said next.
        await until(lambda: memory.used <= 2 * SHARED_FROM)
        gate.release("taken")
        await taking


async def test_an_actor_that_it_has_dropped(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        taking = let_go_tasks.drop_an_actor.remote(gate.path)
        await gate.entered("taken")
        async with asyncio.timeout(20):
            while (await aiogpu.status()).actors:
                pass
        gate.release("taken")
        await taking


# Many workers, started and ended: nobody who stays grows by it

SLACK = 2 << 10
"""KiB by which a process may grow for reasons of its own: its allocator's pools."""


class Size(NamedTuple):
    """How large a process is."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        numbers = read_numbers(f"/proc/{pid}/status")
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(numbers["RssAnon"], descriptors, numbers["Threads"])


def sizes() -> dict[int, tuple[str, Size]]:
    """Driver, zygotes and keepers."""
    found = {os.getpid(): ("driver", Size.of(os.getpid()))}
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.name()
            if name.startswith(("aiogpu-zygote", "aiogpu-keep")):
                found[process.pid] = (name, Size.of(process.pid))
        except (psutil.NoSuchProcess, KeyError, OSError):
            continue  # a worker, which comes and goes
    return found


async def run_many(count: int) -> None:
    task = tasks.add.options(num_gpus=0.25)
    results = await asyncio.gather(*(task.remote(number) for number in range(count)))
    assert results == list(range(1, count + 1))


async def settle() -> None:
    """Wait until all shares are free and no worker is about to end."""
    task = tasks.add.options(num_gpus=1)
    assert await task.remote(1) == 2


@pytest.mark.parametrize(
    "count", [100, pytest.param(1000, marks=pytest.mark.slow)], ids=str
)
async def test_who_stays_does_not_grow(count: int) -> None:
    # Without a zygote that learns: its next generation would take its place.
    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=()):
        await run_many(50)
        await settle()
        before = sizes()
        assert {"driver", "aiogpu-zygote"} <= {name for name, _ in before.values()}
        await run_many(count)
        await settle()
        after = sizes()
    assert len(after) < len(before) + 10, "keepers and zygotes end as well"
    stayed = before.keys() & after.keys()
    assert len(stayed) >= 3, "driver, zygote and at least one keeper"
    for pid in stayed:
        name, was = before[pid]
        _, now = after[pid]
        told = f"{name}: {was} became {now}"
        assert now.threads == was.threads, told
        assert now.descriptors <= was.descriptors + 2, told
        assert now.memory <= was.memory + SLACK, told


# [B2] A program's garbage collector is the program's: aiogpu never changes it

PROGRAM = """
    import asyncio, gc

    called = []
    def note(name):
        setattr(gc, name, lambda *_: called.append(name))
    for name in ("disable", "enable", "freeze", "unfreeze", "set_threshold"):
        note(name) if MODE == "calls" else None

    class Young: ...

    async def main():
        young = Young()
        import aiogpu
        task = aiogpu.remote(abs)
        async with aiogpu.init(num_cpus=1, num_gpus=1):
            assert await task.remote(-1) == 1
            assert await task.options(num_gpus=1).remote(-1) == 1
        return [
            generation for generation in range(3)
            if any(one is young for one in gc.get_objects(generation))
        ]

    if MODE == "ages":
        gc.set_threshold(1 << 30)  # collects nothing by itself, and is switched on
    print(asyncio.run(main()), called)
"""


def test_no_setting_of_the_collector_is_touched() -> None:
    told = run(PROGRAM.replace("MODE", "'calls'"))
    assert told.strip().endswith("[]"), told


def test_a_young_object_is_as_young_after_a_start_and_two_tasks() -> None:
    assert run(PROGRAM.replace("MODE", "'ages'")).strip() == "[0] []"
