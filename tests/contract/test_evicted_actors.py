"""Idle actors leave so that others can start, and come back with their next call."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import ActorDiedError, OptionError
from tests.contract.evictable_actors import (
    Async,
    Keeper,
    Model,
    Threads,
    hold,
    whole_gpu,
)
from tests.support.gate import Gate
from tests.support.waits import until

pytestmark = [
    pytest.mark.aiogpu(num_cpus=8, num_gpus=1),
    pytest.mark.usefixtures("no_leaks", "node"),
    pytest.mark.needs("processes"),
    pytest.mark.either_loop,
]


async def has_no_actors(node: aiogpu.Node) -> bool:
    """Return whether all actors have ended."""
    return not (await node.status()).actors


async def states(node: aiogpu.Node) -> list[str]:
    """Return the states of the node's actors."""
    return sorted(actor.state for actor in (await node.status()).actors)


@pytest.mark.parametrize("kind", [Model, Keeper, Async, Threads])
async def test_more_models_than_fit_answer_all_calls_in_order(kind: Any) -> None:
    models = [kind.remote() for _ in range(5)]
    for turn in range(3):
        calls = [
            model.call.remote((turn, number)) for number in range(3) for model in models
        ]
        results = await asyncio.gather(*calls)
        values = [result if kind is Async else result[1] for result in results]
        assert values == [(turn, number) for number in range(3) for _ in models]


async def test_an_actor_leaves_only_if_others_wait(node: aiogpu.Node) -> None:
    models = [Model.remote(), Model.remote()]
    pids = await asyncio.gather(*(model.pid.remote() for model in models))
    assert await states(node) == ["alive", "alive"]
    assert await whole_gpu.remote() == "0"
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert await states(node) == ["evicted", "evicted"]
    status = await node.status()
    assert (status.evictions, status.reloads) == (2, 0)
    assert status.waiting_count == 0  # they wait for calls and not for resources
    new = await asyncio.gather(*(model.pid.remote() for model in models))
    assert not set(new) & set(pids)
    status = await node.status()
    assert [actor.evictions for actor in status.actors] == [1, 1]
    assert (status.evictions, status.reloads) == (2, 2)


async def test_a_call_is_not_cut_short(gate: Gate) -> None:
    model = Model.remote("slow")
    running = model.wait_for.remote(gate.path)
    await gate.entered("slow")
    waits = whole_gpu.remote()
    assert "until nobody calls it" in str(await waits.why())
    gate.release("slow")
    assert await running == "slow"
    assert await waits == "0"


async def test_a_minimum_stay_is_kept(node: aiogpu.Node) -> None:
    model = Model.options(evict_after=3600).remote()
    await model.call.remote()
    waits = whole_gpu.remote()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waits), 0.3)
    assert await states(node) == ["alive"]
    del model
    assert await waits == "0"


async def test_objects_are_freed_and_made_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    model = Model.remote("a", str(log))
    await model.call.remote()
    await whole_gpu.remote()
    assert await model.call.remote() == ("a", None, 1)
    assert log.read_text().split("\n")[:3] == ["a made", "a freed", "a made"]


async def test_an_async_actor_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    actor = Async.remote(str(log))
    await actor
    await whole_gpu.remote()
    assert log.read_text() == "closed\n"
    assert [item async for item in actor.count.remote(3)] == [0, 1, 2]


async def test_state_is_kept() -> None:
    keeper = Keeper.remote("k")
    large = os.urandom(2_000_000)
    await keeper.learn.remote(large)
    for number in range(1, 4):
        await whole_gpu.remote()
        assert (await keeper.call.remote())[2] == number
    assert await keeper.known.remote() == (large, 3)


async def test_a_state_that_cannot_be_kept_ends_the_actor() -> None:
    keeper = Keeper.remote("k", how="raises")
    await keeper
    await whole_gpu.remote()
    with pytest.raises(ActorDiedError, match=r"on_evict\(\) has raised .*no state"):
        await keeper.call.remote()


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_death_while_leaving_counts_as_a_death(restarts: int) -> None:
    keeper = Keeper.options(max_restarts=restarts).remote("k", how="dies")
    await keeper.call.remote()
    await whole_gpu.remote()
    if restarts:
        assert await keeper.call.remote() == ("k", None, 1)
    else:
        with pytest.raises(ActorDiedError, match="no restarts left"):
            await keeper.call.remote()


async def test_an_actor_that_does_not_leave_is_killed(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    if address is not None:
        pytest.skip("the limit is that of the node's process")
    monkeypatch.setattr("aiogpu.core.scheduler.contention.eviction.LIMIT", 0.2)
    keeper = Keeper.options(max_restarts=1).remote("k", how="hangs")
    await keeper
    assert await whole_gpu.remote() == "0"
    assert await keeper.call.remote() == ("k", None, 1)


async def test_an_argument_may_need_what_the_actor_holds() -> None:
    model = Model.options(num_gpus=1).remote("m")
    await model
    assert await model.call.remote(whole_gpu.remote()) == ("m", "0", 1)


async def test_handles_names_and_ends(node: aiogpu.Node) -> None:
    model = Model.options(name="model").remote("m")
    await model
    await whole_gpu.remote()
    assert await states(node) == ["evicted"]
    again = await aiogpu.get_actor("model")
    await model
    del model
    assert await again.call.remote() == ("m", None, 1)
    await whole_gpu.remote()
    aiogpu.kill(again)
    with pytest.raises(ActorDiedError):
        await again.call.remote()
    del again
    async with Model.remote() as last:
        await last
        await whole_gpu.remote()
    await until(lambda: has_no_actors(node))


async def test_the_last_handle_ends_an_evicted_actor(node: aiogpu.Node) -> None:
    model = Model.remote()
    await model
    await whole_gpu.remote()
    del model
    await until(lambda: has_no_actors(node))


async def test_cancelled_calls_of_an_evicted_actor(gate: Gate) -> None:
    model = Model.remote("m")
    await model
    held = hold.remote(gate.path)
    await gate.entered("held")
    late = model.call.remote(1)
    late.cancel()
    gate.release("held")
    await held
    assert (await model.call.remote(2))[1] == 2


async def test_no_call_is_lost_under_kills(node: aiogpu.Node) -> None:
    models = [Model.remote(str(number)) for number in range(4)]
    rng = random.Random(48)

    async def ask(number: int) -> None:
        for turn in range(12):
            model = models[number]
            name, value, _ = await model.call.remote(turn)
            assert (name, value) == (str(number), turn)

    async def kill() -> None:
        for _ in range(10):
            workers = [actor.pid for actor in (await node.status()).actors if actor.pid]
            if workers:
                with suppress(ProcessLookupError):  # ended meanwhile
                    os.kill(rng.choice(workers), signal.SIGKILL)
            await whole_gpu.remote()

    await asyncio.gather(kill(), *map(ask, range(4)))


class Half:
    """Has one of the two methods."""

    def on_evict(self) -> int:
        """Return the state."""
        return 1


class Late:
    """Has coroutines."""

    async def on_evict(self) -> int:
        """Return the state."""
        return 1

    def on_return(self, state: int) -> None:
        """Take the state."""


@pytest.mark.parametrize("cls", [Half, Late])
def test_both_methods_must_fit(cls: type) -> None:
    with pytest.raises(OptionError, match="both `def on_evict"):
        aiogpu.remote(evict_after=1)(cls)
    aiogpu.remote(num_gpus=1)(cls)


@pytest.mark.parametrize("value", [-1, "soon", True])
def test_a_bad_stay_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="evict_after"):
        Model.options(evict_after=value)


async def test_no_actor_leaves_an_inline_node(node: aiogpu.Node) -> None:
    """It is always idle: an actor that wants the same share gets it."""
    await aiogpu.shutdown()
    async with aiogpu.init(address="inline", num_gpus=1):
        models = [Model.remote() for _ in range(3)]
        calls = [model.call.remote() for _ in range(2) for model in models]
        results = await asyncio.gather(*calls)
    assert [number for _, _, number in results] == [1, 1, 1, 2, 2, 2]
