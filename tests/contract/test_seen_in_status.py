"""What `status()` shows beside tasks: actors, failures; and `why` by number."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.actor_classes import Counter

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


@pytest.mark.needs("listed actors")
async def test_actors_are_listed_while_they_live() -> None:
    async with aiogpu.init(num_cpus=1):
        named = Counter.options(name="tally", lifetime="detached").remote()
        plain = Counter.remote()
        pids = [await one.pid.remote() for one in (named, plain)]
        first, second = (await aiogpu.status()).actors
        told = (first.name, first.class_name, first.state, first.is_detached)
        assert told == ("tally", "Counter", "alive", True)
        assert (first.holders, second.holders) == (2, 1)
        assert (second.name, second.client, second.calls) == (None, first.client, 0)
        assert [first.pid, second.pid] == pids
        aiogpu.kill(named)
        assert [one.id for one in (await aiogpu.status()).actors] == [second.id]


@pytest.mark.needs("listed actors")
async def test_an_actor_that_waits_for_its_place_is_listed_last() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        living = Counter.options(num_gpus=1).remote()
        await living.add.remote()
        waiting = Counter.options(num_gpus=1).remote()
        first, second = (await aiogpu.status()).actors
        assert (second.state, second.worker, second.pid) == ("pending", None, 0)
        told = await aiogpu.why(second.id)
        assert (told.name, told.state) == ("Counter", "waiting")
        assert first.worker is not None
        del living, waiting


async def test_why_asks_by_number() -> None:
    async with aiogpu.init(num_cpus=1):
        async with aiogpu.placement([{"CPU": 1}]):
            handle = tasks.pid.remote()
            seen = (await aiogpu.status()).tasks
            (task,) = (one for one in seen if one.name == "pid")
            assert (await aiogpu.why(task.id)).name == "pid"
        await handle
        with pytest.raises(
            aiogpu.errors.NoSuchTaskError, match=f"no task {task.id} that"
        ):
            await aiogpu.why(task.id)


@pytest.mark.parametrize("number", [-1, "3", True, 1.5])
async def test_why_wants_a_number(number: int) -> None:
    with pytest.raises(
        aiogpu.OptionError, match=r"asks for a task's number.*handle\.why"
    ):
        await aiogpu.why(number)


@pytest.mark.needs("processes")
async def test_failures_are_remembered_the_latest_first(tmp_path: Path) -> None:
    async with aiogpu.init(num_cpus=1):
        counter = Counter.remote()
        with pytest.raises(KeyError):
            await tasks.fail.remote(KeyError, "x")
        with pytest.raises(aiogpu.WorkerDiedError):
            await tasks.exit_at_once.options(max_retries=0).remote(3)
        with pytest.raises(TypeError):
            await counter.add.remote("no number")
        tried_again = tasks.fail_until.options(retry_exceptions=True)
        await tried_again.remote(str(tmp_path / "count"), 1, ValueError)
        called, died, raised = (await aiogpu.status()).failures
        assert (called.name, called.error) == ("Counter.add", "TypeError")
        assert (died.name, died.error) == ("exit_at_once", "WorkerDiedError")
        assert (raised.name, raised.error, raised.message) == (
            "fail",
            "KeyError",
            "'x'",
        )
        assert 0 <= called.seconds <= died.seconds <= raised.seconds < 60


@pytest.mark.needs("processes")
async def test_who_runs_out_of_time_has_failed_and_who_is_cancelled_has_not() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        actor = Counter.options(num_gpus=1).remote()
        await actor.add.remote()
        late = tasks.pid.options(num_gpus=1, timeout=0.01).remote()
        cancelled = tasks.pid.options(num_gpus=1).remote()
        with pytest.raises(aiogpu.TaskTimeoutError):
            await late
        cancelled.cancel()
        await tasks.pid.remote()
        (failed,) = (await aiogpu.status()).failures
        told = (failed.name, failed.error, failed.message)
        assert told == ("pid", "TaskTimeoutError", "0.01 s")
