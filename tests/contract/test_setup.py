"""The option `setup`: once in each worker process, on each engine."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import pytest

import aiogpu
from aiogpu.errors import OptionError, WorkerSetupError
from aiogpu.serialization.exceptions import RemoteTraceback
from tests.contract import setup_tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

PROCESSES = pytest.mark.parametrize("address", ["local", "node", "ray"], indirect=True)
"""The engines with worker processes."""

here: dict[str, int] = {}


def fill() -> None:
    here["calls"] = here.get("calls", 0) + 1


@PROCESSES
async def test_it_runs_once_in_a_process_for_all_functions(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        found = await asyncio.gather(*(setup_tasks.count.remote() for _ in range(5)))
        found += [each async for each in setup_tasks.count.map(range(6), chunk=2)]
        found += [each async for each in setup_tasks.counts.remote()]
        found.append(await setup_tasks.count_async.remote())
    assert all(ran == [pid] for pid, ran in found), found


@PROCESSES
async def test_each_fresh_process_runs_it_once(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        fresh = setup_tasks.count.options(max_calls=1)
        found = await asyncio.gather(*(fresh.remote() for _ in range(3)))
    assert all(ran == [pid] for pid, ran in found), found
    assert len({pid for pid, _ in found}) == 3


@PROCESSES
async def test_a_function_sent_by_value_shares_its_globals(address: str) -> None:
    state = {"loaded": 0}

    def load() -> None:
        state["loaded"] += 1

    def read(_: int) -> int:
        return state["loaded"]

    remote = aiogpu.remote(setup=load)(read)
    async with aiogpu.init(address=address, num_cpus=1):
        assert [await remote.remote(0) for _ in range(3)] == [1, 1, 1]
        assert [each async for each in remote.map(range(4), chunk=2)] == [1] * 4
        other = remote.options(setup=None, name="other")
        assert await other.remote(0) == 0, "another function for the worker"


@PROCESSES
async def test_an_error_names_the_setup_and_the_next_call_tries_again(
    address: str, tmp_path: Path
) -> None:
    env = {"env_vars": {"AIOGPU_TEST_SETUP": str(tmp_path / "tried")}}
    remote = setup_tasks.answer.options(runtime_env=env)
    async with aiogpu.init(address=address, num_cpus=1):
        with pytest.raises(WorkerSetupError) as caught:
            await remote.remote()
        assert await remote.remote() == 42
        (tmp_path / "tried").unlink()
        again = remote.options(retry_exceptions=[WorkerSetupError], name="again")
        assert await again.options(max_calls=1).remote() == 42
    assert str(caught.value) == (
        "answer cannot run in this worker: its setup fail_first() raised "
        "ConnectionError: no database"
    )
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert 'raise ConnectionError("no database")' in str(caught.value.__cause__)


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
async def test_run_timeout_counts_the_task_alone(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        remote = setup_tasks.child.options(
            setup=setup_tasks.start_a_task, run_timeout=60
        )
        assert await remote.remote() == 7


async def test_on_inline_it_runs_once_in_the_program() -> None:
    remote = aiogpu.remote(setup=fill)(len)
    async with aiogpu.init(address="inline", num_cpus=2):
        assert await asyncio.gather(*(remote.remote("ab") for _ in range(3))) == [2] * 3
    assert here == {"calls": 1}


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(7, id="a number"),
        pytest.param(lambda path: None, id="with an argument"),
        pytest.param(asyncio.sleep, id="a coroutine function"),
        pytest.param(setup_tasks.count, id="a remote function"),
    ],
)
def test_it_must_be_a_plain_function(setup: object) -> None:
    with pytest.raises(OptionError, match="a plain function without arguments"):
        setup_tasks.child.options(setup=setup)  # type: ignore[arg-type]


def test_a_partial_function_is_a_plain_function() -> None:
    setup_tasks.child.options(setup=functools.partial(print, "ready"))


def test_actors_have_constructors() -> None:
    with pytest.raises(OptionError, match="setup is not an option of an actor"):
        aiogpu.remote(setup=fill)(dict)  # type: ignore[type-var]
