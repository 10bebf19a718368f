"""A failure inside aiogpu costs the task concerned, and nothing else.

The tests make handlers of the node's effects fail, as no known input does so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.core import effects
from aiogpu.core.effects import Effect
from aiogpu.engines.local import LocalEngine
from aiogpu.runtime.driver import Driver
from aiogpu.wire.messages import Done, Failed, Message, Put, Submit, Wait
from tests.contract import nested_tasks, tasks, wild_tasks
from tests.contract.actor_classes import Counter
from tests.contract.node_here import node_here
from tests.support.errors import raises
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

OURS: Final = "a bug in aiogpu, not in your program"


class Broken:
    """A node some of whose effects fail.

    Attributes:
        driver: of the node.
        failed: effects that were not carried out.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.failed: list[Effect] = []

    def fail(
        self, kind: type[Effect], when: Callable[[Any], bool], *, times: int = 1
    ) -> None:
        """Make the first effects of a kind fail for which `when` is true."""
        carry_out = self.driver.handlers[kind]

        def way(effect: Effect) -> None:
            if len(self.failed) < times and when(effect):
                self.failed.append(effect)
                raise OverflowError("Integer value out of range")
            carry_out(effect)

        self.driver.handlers[kind] = way


class Logged(logging.Handler):
    """Keeps the records."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
async def broken() -> AsyncIterator[Broken]:
    """A node with one CPU and one GPU, free in the end; failures are logged."""
    logged, log = Logged(), logging.getLogger("aiogpu")
    log.addHandler(logged)
    async with (
        asyncio.timeout(60),
        aiogpu.init(num_cpus=1, num_gpus=1, log_to_driver=False) as session,
    ):
        engine = session._session._engine
        assert isinstance(engine, LocalEngine)
        driver = engine._open_driver
        yield (broken := Broken(driver))
        total = await aiogpu.cluster_resources()
        while await aiogpu.available_resources() != total or driver.scheduler.tasks:
            await asyncio.sleep(0)
        driver.scheduler.check()
        assert not driver._calls
    log.removeHandler(logged)
    records = [each for each in logged.records if "failed to" in each.getMessage()]
    assert len(records) == len(broken.failed)
    assert all(record.exc_info for record in records)


async def refused(handle: Any) -> None:
    """The caller gets the cause, and that it is a bug in aiogpu."""
    error = await raises(errors.InternalError, handle, match=OURS)
    assert "OverflowError: Integer value out of range" in str(error)
    assert isinstance(error.__cause__, OverflowError)


@pytest.mark.parametrize("is_reused", [False, True])
async def test_a_task_that_cannot_be_sent_fails_at_once(
    is_reused: bool, broken: Broken
) -> None:
    """A worker that has run other tasks goes on."""
    before = await tasks.pid.remote() if is_reused else 0
    broken.fail(effects.Assign, lambda effect: effect.is_first is not is_reused)
    await refused(tasks.pid.remote())
    after = await tasks.pid.remote()
    assert len(broken.failed) == 1
    assert not is_reused or after == before


async def test_a_gpu_task_that_cannot_be_sent_fails_at_once(broken: Broken) -> None:
    """Its worker was for this task alone, and ends; the next task gets another."""
    broken.fail(effects.Assign, lambda effect: bool(effect.lease.shares))
    on_gpu = tasks.add.options(num_gpus=1)
    await refused(on_gpu.remote(1))
    assert await on_gpu.remote(1) == 2


async def test_an_actor_that_cannot_be_sent_dies(broken: Broken) -> None:
    broken.fail(effects.Assign, lambda _: True)
    counter = Counter.remote()
    await raises(errors.ActorDiedError, counter, match=OURS)
    await raises(errors.ActorDiedError, lambda: counter.add.remote(1), match=OURS)
    async with Counter.remote() as other:
        assert await other.add.remote(1) == 1


async def test_tasks_that_cannot_be_sent_together_are_sent(broken: Broken) -> None:
    assert await tasks.add.remote(1) == 2
    broken.fail(effects.Ahead, lambda _: True)
    assert await asyncio.gather(*map(tasks.add.remote, range(200))) == [
        i + 1 for i in range(200)
    ]
    assert len(broken.failed) == 1


@pytest.mark.parametrize("times", [1, 9])
async def test_a_request_for_a_worker_is_repeated(times: int, broken: Broken) -> None:
    """After some failures the task fails."""
    broken.fail(effects.Spawn, lambda effect: effect.environment, times=times)
    own = tasks.add.options(runtime_env={"env_vars": {"OWN": "1"}}, max_retries=0)
    if times == 1:
        assert await own.remote(1) == 2
    else:
        await raises(errors.WorkerDiedError, lambda: own.remote(1), match=OURS)
    assert await tasks.add.remote(1) == 2


@pytest.mark.parametrize("kind", [effects.Interrupt, effects.Kill])
async def test_a_worker_that_cannot_be_stopped_is_ended(
    kind: type[Effect], broken: Broken, gate: Gate
) -> None:
    """Its resources are free."""
    broken.fail(kind, lambda _: True)
    deaf = tasks.block_in_c.options(cancel_grace=0.1).remote(gate.path, "deaf")
    await gate.entered("deaf")
    deaf.cancel()
    assert await tasks.add.remote(1) == 2
    assert len(broken.failed) == 1


@pytest.mark.parametrize("kind", [Done, Failed, Wait, Submit, Put])
async def test_a_bad_message_of_a_worker_fails_its_task(
    kind: type[Message], broken: Broken
) -> None:
    """The error does not blame the function, or its use of descriptors."""
    assert await nested_tasks.several.remote([1, 2]) == [2, 3]
    driver: Any = broken.driver
    is_answer = kind in {Done, Failed}
    taker, name = (
        (driver, "on_answer") if is_answer else (driver.requests, "on_message")
    )
    take_in = getattr(taker, name)

    def way(worker: Any, message: Message) -> None:
        if type(message) is kind and not broken.failed:
            broken.failed.append(effects.Retire(worker))
            raise OverflowError("Integer value out of range")
        take_in(worker, message)

    setattr(taker, name, way)
    if kind is Done:
        driver.on_done = lambda worker, done: [way(worker, one) for one in done]
    lost: Any
    if kind is Put:
        lost = wild_tasks.put_and_wait.options(max_retries=0).remote()
    elif kind is Done:
        lost = tasks.add.remote(1)
    elif kind is Failed:
        lost = tasks.fail.remote(KeyError)
    else:
        lost = nested_tasks.several.remote([1, 2])
    if kind is Put:
        error = await raises(errors.WorkerDiedError, lost, match=OURS)
        assert error.cause == "internal"
        assert "not to blame" in str(error)
        assert "escriptor" not in str(error)
    else:
        await raises(errors.InternalError, lost, match=OURS)
    assert await nested_tasks.several.remote([1, 2]) == [2, 3]


class Clumsy:
    """Fails to take a result; keeps an error."""

    def __init__(self) -> None:
        self.error: asyncio.Future[Exception] = asyncio.Future()

    def settle(self, outcome: object) -> None:
        if not isinstance(outcome, Exception):
            raise OverflowError("Integer value out of range")
        self.error.set_result(outcome)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("how", ["gives", "fails"])
async def test_a_result_that_cannot_be_delivered_becomes_an_error(
    how: str, is_shared: bool, broken: Broken
) -> None:
    """Also a result that arrives as part of another result."""
    clumsy = Clumsy()
    head: Any = tasks.add.remote(1) if how == "gives" else tasks.fail.remote(KeyError)
    if is_shared:
        value = head.share()
        value.watch(lambda value: value.pass_to(clumsy))
    else:
        call = broken.driver.call_of(head.task_id)
        assert call is not None
        call.receiver = clumsy
    error = await clumsy.error
    assert isinstance(error, errors.InternalError)
    assert isinstance(error.__cause__, OverflowError)
    broken.failed.append(effects.Settle(head.task_id))
    if not is_shared:
        head.cancel()


async def test_a_request_that_cannot_be_handled_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The program that has joined stays connected."""
    async with asyncio.timeout(60), node_here(tmp_path) as here, here.join():
        driver = here.engine._open_driver
        submit, failed = driver.submit, []

        def broken(*arguments: Any) -> int:
            if not failed:
                failed.append(arguments)
                raise OverflowError("Integer value out of range")
            return submit(*arguments)

        driver.submit = broken  # type: ignore[method-assign]
        first, second = tasks.add.remote(1), tasks.add.remote(2)
        await refused(first)
        assert await second == 3
        assert failed
