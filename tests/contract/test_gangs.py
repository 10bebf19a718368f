"""Gangs: ranks that begin together, know each other, and end together."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.api.actors.gang import ADDRESS
from aiogpu.errors import MisuseError
from tests.contract import gang_tasks, tasks
from tests.contract.gang_tasks import Distributed, Ranked
from tests.support.waits import until, until_free

pytestmark = [
    pytest.mark.aiogpu(num_cpus=8, num_gpus=2),
    pytest.mark.usefixtures("no_leaks", "node"),
    pytest.mark.needs("processes"),
    pytest.mark.either_loop,
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which each rank leaves a file as it begins."""
    directory = tmp_path / "ranks"
    directory.mkdir()
    return directory


async def test_ranks_have_their_variables_before_their_code() -> None:
    env = {"env_vars": {"OWN": "mine", "RANK": "wrong"}}
    results = await aiogpu.gang(
        gang_tasks.variables,
        3,
        num_gpus=0.5,
        args=(1, 2),
        kwargs={"three": 3},
        runtime_env=env,
    )
    ports = {now["MASTER_PORT"] for now, *_ in results}
    assert len(ports) == 1
    for rank, (now, at_import, gpu, own, args, kwargs) in enumerate(results):
        assert (
            now
            == at_import
            == {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "3",
                "MASTER_ADDR": ADDRESS,
                "MASTER_PORT": ports.copy().pop(),
            }
        )
        assert (gpu, own) == (("0", "0", "1")[rank], "mine")
        assert (args, kwargs) == ((1, 2), {"three": 3})


async def test_the_options_of_a_class_hold_for_its_ranks() -> None:
    """But its ranks are not named, restarted, evicted or detached one by one."""
    decorate: Any = aiogpu.remote(
        num_gpus=0.5,
        name="one",
        max_restarts=3,
        lifetime="detached",
        evict_after=0,
        runtime_env={"env_vars": {"OWN": "mine"}},
    )
    shared = decorate(gang_tasks.Plain)
    async with aiogpu.gang(shared, 3) as ranks:
        assert await ranks.call("share") == [
            ("0", "mine"),
            ("0", "mine"),
            ("1", "mine"),
        ]
    async with aiogpu.gang(shared, 2, num_gpus=1) as ranks:
        assert await ranks.call("share") == [("0", "mine"), ("1", "mine")]


async def test_calls_reach_all_ranks_in_order(place: Path) -> None:
    async with aiogpu.gang(Ranked, 2, num_gpus=1, args=(str(place),)) as ranks:
        assert len(ranks) == 2
        first = await ranks.call("count")
        (zero, one), second = ranks.actors, await ranks.call("count")
        assert [rank for rank, *_ in first] == [0, 1]
        assert second == [(rank, pid, 2) for rank, pid, _ in first]
        assert await one.count.remote() == (*second[1][:2], 3)
        assert await zero.count.remote() == (*second[0][:2], 3)
    await until_free()
    with pytest.raises(aiogpu.ActorDiedError, match="the gang Ranked was closed"):
        await ranks.call("count")


async def test_all_ranks_begin_or_none(place: Path) -> None:
    held = await aiogpu.lease(num_gpus=1)
    gang = aiogpu.gang(Ranked, 2, num_gpus=1, args=(str(place),), name="pair")
    entering = asyncio.ensure_future(gang.__aenter__())
    await until(lambda: is_waiting("pair"))
    assert await tasks.pid.remote() > 0
    assert os.listdir(place) == []
    await held.release()
    assert len((await entering).actors) == 2
    await gang.close()


async def is_waiting(name: str) -> bool:
    status = await aiogpu.status()
    return any(group.name == name for group in status.placements)


ERRORS: dict[str, tuple[type[Exception], str]] = {
    "raises": (LookupError, "no such rank"),
    "dies": (aiogpu.AiogpuError, "the last words of 1"),
}
NOTE = "Raised by rank 1 of the 3 of {}; the other ranks were ended."


@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("target", ["function", "class"])
async def test_all_ranks_end_with_the_first_that_fails(
    target: str, how: str, place: Path
) -> None:
    kind, text = ERRORS[how]

    async def run() -> None:
        if target == "function":
            await aiogpu.gang(gang_tasks.fails, 3, args=(str(place), how), num_gpus=0.5)
        else:
            async with aiogpu.gang(Ranked, 3, args=(str(place),)) as ranks:
                await ranks.call("once", how)

    with pytest.raises(kind, match=text) as caught:
        await run()
    name = "fails" if target == "function" else "Ranked"
    assert NOTE.format(name) in caught.value.__notes__
    await until_free()
    pids = [name.partition("-")[2] for name in os.listdir(place) if "-" in name]
    await until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("target", ["function", "class"])
async def test_a_gang_starts_anew(target: str, how: str, place: Path) -> None:
    if target == "function":
        results = await aiogpu.gang(
            gang_tasks.fails, 2, args=(str(place), how), max_restarts=1
        )
        assert results == [0, 1]
        return
    gang = aiogpu.gang(Ranked, 2, args=(str(place),), max_restarts=1)
    async with gang as ranks:
        before = await ranks.call("count")
        assert await ranks.call("once", how) == [(0, 1), (1, 1)], "the call is repeated"
        after = await ranks.call("count")
        assert {pid for _, pid, _ in before}.isdisjoint(pid for _, pid, _ in after)
        assert ranks.restarts_left == 0


async def test_a_constructor_that_fails_ends_the_gang(place: Path) -> None:
    with pytest.raises(aiogpu.ActorDiedError) as caught:
        await aiogpu.gang(Ranked, 2, num_gpus=1, args=(str(place), 1))
    assert isinstance(caught.value.__cause__, LookupError)
    await until_free()


async def test_a_hung_rank_ends_at_its_time_limit(place: Path) -> None:
    with pytest.raises(aiogpu.TaskTimeoutError):
        await aiogpu.gang(
            gang_tasks.fails, 2, args=(str(place), "hangs"), run_timeout=0.5
        )
    async with aiogpu.gang(Ranked, 2, args=(str(place),)) as ranks:
        with pytest.raises(aiogpu.TaskTimeoutError):
            await ranks.call("hang")
        with pytest.raises(aiogpu.ActorDiedError, match="has ended: TaskTimeoutError"):
            await ranks.call("count")
    await until_free()


async def test_a_cancelled_call_ends_all_ranks(place: Path) -> None:
    async with aiogpu.gang(Ranked, 2, num_gpus=1, args=(str(place),)) as ranks:
        pids = [str(pid) for _, pid, _ in await ranks.call("count")]
        calling = asyncio.ensure_future(ranks.call("once", "hangs"))
        await until((place / "failed").exists)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await until(lambda: not any(map(is_alive, pids)))
        with pytest.raises(aiogpu.ActorDiedError, match="a call of it was cancelled"):
            await ranks.call("count")
    await until_free()


async def test_a_cancelled_gang_of_a_function_ends(place: Path) -> None:
    running = asyncio.ensure_future(
        aiogpu.gang(gang_tasks.fails, 2, args=(str(place), "hangs"), num_gpus=1)
    )
    await until((place / "failed").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until_free()


async def test_the_port_is_kept_for_the_gang(place: Path) -> None:
    async with (
        aiogpu.gang(gang_tasks.Ranked, 1, args=(str(place),)) as ranks,
        aiogpu.gang(gang_tasks.Ranked, 1, args=(str(place),)) as others,
    ):
        ports = [held._port.getsockname()[1] for held in (ranks, others)]
        assert len(set(ports)) == 2
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((ADDRESS, ports[0]))
        with socket.socket() as first:  # as the store of the first rank does
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind(("", ports[0]))
            first.listen()
    with socket.socket() as anyone:
        anyone.bind((ADDRESS, ports[0]))


def generator() -> Any:
    yield 1


def two() -> Any:
    return 1, 2


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no ranks": (lambda: aiogpu.gang(tasks.pid, 0), "size=0 must be a whole number"),
    "no number": (lambda: aiogpu.gang(tasks.pid, "2"), "size='2' must be a whole"),
    "no function": (lambda: aiogpu.gang(7, 2), "gang() was given 7; give it a class"),
    "generator": (lambda: aiogpu.gang(generator, 2), "generator is a generator; a"),
    "unknown": (lambda: aiogpu.gang(tasks.pid, 2, num_gpu=1), "num_gpu"),
    "placement": (lambda: aiogpu.gang(tasks.pid, 2, bundle=1), "leave bundle out"),
    "eviction": (
        lambda: aiogpu.gang(Ranked, 2, evict_after=1),
        "leave evict_after out",
    ),
    "choices of the function": (
        lambda: aiogpu.gang(
            aiogpu.remote(any_of=[{"num_gpus": 1}, {"num_cpus": 1}])(two), 2
        ),
        "leave any_of out",
    ),
    "several results": (
        lambda: aiogpu.gang(aiogpu.remote(num_returns=2)(two), 2),
        "leave num_returns out",
    ),
    "restarts": (
        lambda: aiogpu.gang(tasks.pid, 2, max_restarts=-2),
        "max_restarts=-2 must be",
    ),
}


@pytest.mark.parametrize("way", WRONG)
def test_wrong_arguments_are_refused(way: str) -> None:
    call, text = WRONG[way]
    with pytest.raises((aiogpu.OptionError, MisuseError)) as refused:
        call()
    assert text in str(refused.value)


async def test_wrong_uses_are_refused() -> None:
    gang = aiogpu.gang(tasks.pid, 1)
    with pytest.raises(MisuseError, match=r"write `async with aiogpu.gang\(...\)`"):
        gang.__enter__()
    with pytest.raises(MisuseError, match=r"write `await aiogpu.gang\(pid, 1\)`"):
        await gang.__aenter__()
    await gang
    with pytest.raises(MisuseError, match="was already awaited"):
        await gang
    with pytest.raises(aiogpu.InfeasibleError, match="GPU"):
        await aiogpu.gang(tasks.pid, 3, num_gpus=1)


@pytest.mark.own_node
async def test_one_task_at_a_time_is_no_gang() -> None:
    refused = pytest.raises(MisuseError, match="the gang pid needs processes of this")
    opening = aiogpu.init(address="inline", num_cpus=2)
    entering = asyncio.ensure_future(opening.__aenter__())
    await asyncio.sleep(0)
    with refused:  # although the node is not open yet
        await aiogpu.gang(tasks.pid, 2)
    await entering
    with refused:
        await aiogpu.gang(tasks.pid, 2)
    await aiogpu.shutdown()


@pytest.mark.own_node
def test_gangs_without_a_loop(place: Path) -> None:
    with aiogpu.sync.init(num_cpus=4, num_gpus=2):
        assert aiogpu.sync.gang(gang_tasks.rank, 3) == [0, 1, 2]
        gang = aiogpu.sync.gang(Ranked, 2, num_gpus=1, args=(str(place),))
        with gang as ranks:
            assert [rank for rank, *_ in ranks.call("count")] == [0, 1]
            assert len(ranks) == 2
            with pytest.raises(LookupError, match="no such rank"):
                ranks.call("once", "raises")
        with pytest.raises(aiogpu.OptionError, match="size=0"):
            aiogpu.sync.gang(gang_tasks.rank, 0)


async def test_ranks_of_torch_train_together() -> None:
    pytest.importorskip("torch")
    async with aiogpu.gang(Distributed, 2, num_gpus=1) as ranks:
        (zero, first), (one, second) = await ranks.call("fit", steps=3)
        assert (zero, one) == (0, 1)
        assert first == second, "the gradients are shared"
        with pytest.raises(aiogpu.AiogpuError) as caught:
            await ranks.call("leave")
    assert any("rank" in note for note in caught.value.__notes__)
    await until_free()
