"""What actors are measured by is what it is said to be."""

import asyncio
import os

import pytest

import aiogpu
from benchmarks import coroutine_floor
from benchmarks.census import descendants
from benchmarks.crowd import open_floors
from benchmarks.environments import ENVIRONMENTS
from benchmarks.floor import open_floor
from benchmarks.method import FULL, QUICK, Pair
from benchmarks.rows import Goal, latency_row, rate_row
from benchmarks.tasks import Interleaved, Plain
from benchmarks.workloads import many_actors

pytestmark = pytest.mark.either_loop

GOAL = Goal(1.5, "x floor")


async def test_the_coroutine_floor_answers_every_call():
    async with open_floor(coroutine_floor.__name__) as floor:
        assert (
            await asyncio.gather(*(floor.call(n) for n in range(100))) == [None] * 100
        )
        (pid,) = running("benchmarks.coroutine_floor")
    assert pid not in descendants()


def running(module):
    """The processes below this one that run a module; other tests have theirs."""
    pids = []
    for pid in descendants():
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if module.encode() in file.read().split(b"\0"):
                pids.append(pid)
    return pids


async def test_the_floor_is_another_program():
    async with open_floor() as floor:
        assert await floor.call(1) is None
        assert len(running("benchmarks.floor")) == 1


async def test_each_of_many_floors_is_a_process_of_its_own():
    async with open_floors(3) as floors:
        for number in range(4):
            answers = await asyncio.gather(*(floor.call(number) for floor in floors))
            assert answers == [None] * 3
        found = running("benchmarks.crowd")
        assert len(found) == 1 + 3
    assert not {*found} & {*descendants()}


def test_a_floor_of_another_kind_is_judged_by_the_known_one():
    slow = Pair([[90_000]] * 2, [[120_000]] * 2)
    assert "INVALID" in latency_row("x", slow, GOAL, FULL).verdict
    assert latency_row("x", slow, GOAL, FULL, [[30_000]]).verdict == "met"
    assert "INVALID" in latency_row("x", slow, GOAL, FULL, [[31_000]]).verdict


def test_a_rate_tells_what_else_is_to_be_known():
    row = rate_row("x", Pair([[10]], [[20]]), 1, None, FULL, "and more")
    assert row.note == "blocks 0.50 to 0.50; and more"


async def test_an_actor_lives_as_long_as_its_method_is_held():
    environment = ENVIRONMENTS["aiogpu"]()
    await environment.open(num_cpus=1, preload=())
    try:
        for cls in (Plain, Interleaved):
            call = await environment.actor(cls)()
            assert await call(1) is None
            assert (await aiogpu.status()).tasks
            del call
        while (await aiogpu.status()).tasks:
            await asyncio.sleep(0)
    finally:
        await environment.close()


async def test_of_many_actors_all_processes_are_weighed():
    environment = ENVIRONMENTS["aiogpu"]()
    memory, *called = await many_actors.measure(environment, QUICK)
    assert f"{QUICK.actors} actors: workers " in memory.note
    assert "zygote and keepers" in memory.note
    assert 0.1 < memory.p50 < 100
    assert all(row.ratio > 0 for row in called)
    assert not [name for name in descendants().values() if name.startswith("aiogpu")]
    assert os.getpid() not in descendants()
