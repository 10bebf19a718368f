"""An actor ends soon after its last handle, wherever that has been, and no sooner."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

import aiogpu
from tests.contract import let_go_tasks
from tests.contract.let_go_tasks import Model, Serial, Soft
from tests.support.gate import Gate
from tests.support.until import LIMIT

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]
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


async def test_what_an_idle_actor_was_given_for_a_call() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        for holder in CLASSES:
            idle, model = await holder.remote(), await Model.remote()
            assert await idle.take.remote([model]) == 42
            del model
            await gpu_is_free()


async def test_what_an_idle_actor_has_made_and_given_away() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        for maker in CLASSES:
            idle = await maker.remote()
            (model,) = await idle.make.remote()
            assert await model.answer.remote() == 42
            del model
            await gpu_is_free()


async def test_what_an_actor_was_given_as_a_result() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        for asker in CLASSES:
            maker, idle = await Serial.remote(), await asker.remote()
            for _ in range(2):
                assert await idle.ask.remote(maker) == 42
                await gpu_is_free()


async def test_what_a_task_was_given_as_a_result() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        maker = await Serial.remote()
        for _ in range(2):
            assert await let_go_tasks.ask.remote(maker) == 42
            await gpu_is_free()


async def test_what_an_actor_has_found_twice() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        idle, model = await Serial.remote(), await Model.options(name="it").remote()
        assert await idle.find_twice.remote("it") == 84
        del model
        await gpu_is_free()


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


@pytest.mark.needs("holders")
async def test_what_an_error_has_that_a_task_has_made() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        with pytest.raises(let_go_tasks.HoldingError) as caught:
            await let_go_tasks.fail_with_a_new_one.remote()
        (model,) = caught.value.args
        assert await model.answer.remote() == 42
        del model, caught
        await gpu_is_free()


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


@pytest.mark.parametrize("holder", ["actor", "task"])
@pytest.mark.parametrize("method", let_go_tasks.UNAWAITED)
async def test_what_plain_code_did_not_wait_for(method: str, holder: str) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        # It is idle afterwards, and so is the worker of the task.
        idle = await Serial.remote() if holder == "actor" else None
        for _ in range(2):
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
