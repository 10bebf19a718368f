"""What runs a task in a worker of Ray's, interrupted; needs Ray, but no cluster."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from inspect import isasyncgenfunction
from itertools import count
from typing import Any

import pytest

from aiogpu.client.current import host_of_task
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.serialization.serializer import dump_arguments
from tests.engines.tripwire import Tripwire

pytestmark = pytest.mark.ray


class Written:
    """A task as it comes to a worker, without a program that has sent it."""

    name = "written"
    resources: dict[str, float] = {}  # noqa: RUF012 - never written to
    kinds = ()

    def __init__(self, function: Callable[..., Any]) -> None:
        self.load = lambda: function

    def wants_retry(self, _error: BaseException) -> bool:
        return False


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that runs tasks."""
    ray = pytest.importorskip("aiogpu.engines.ray.ray_api")
    from aiogpu.engines.ray import worker_process as loops
    from aiogpu.engines.ray import worker_process as work

    monkeypatch.setattr(ray, "task_id", lambda: "00" * 24)
    monkeypatch.setattr(work, "take_place", lambda *_place: None)
    monkeypatch.setattr(loops, "SLICE", 0)
    monkeypatch.setattr(loops, "_of_thread", loops._OfThread())
    handler = signal.getsignal(signal.SIGINT)
    yield work
    signal.signal(signal.SIGINT, handler)
    if loops.has_loop():
        loops.task_loop().loop.close()


def waits() -> str:
    """As `aiogpu.get` does."""
    host = host_of_task.get()
    assert host is not None
    done: list[bool] = []
    host.program.call_soon(done.append, True)
    assert host.wait_until(lambda: bool(done))
    return "done"


async def awaits() -> str:
    await asyncio.sleep(0)
    return "done"


async def leaves_some() -> str:
    async def rest() -> None:
        await asyncio.Event().wait()

    asyncio.create_task(rest())  # noqa: RUF006 - it is to be left
    await asyncio.sleep(0)
    return "done"


async def yields_some() -> AsyncIterator[int]:
    try:
        for number in range(1):
            await asyncio.sleep(0)
            yield number
    finally:
        await asyncio.sleep(0)


async def fails() -> str:
    raise LookupError("of its own")


def run(work: Any, function: Callable[[], Any]) -> Any:
    payload = dump_arguments("written", (), {})
    if isasyncgenfunction(function):
        return list(work.pour_task(Written(function), payload, (), ()))
    return work.run_task(Written(function), payload, (), 0, ())


def outcome(work: Any, function: Callable[[], Any]) -> str:
    """How a task ends."""
    from aiogpu.engines.ray.errors import TaskFailure

    try:
        run(work, function)
    except TaskFailure as error:
        return "stopped" if error.failed.kind == STOPPED else error.failed.type_name
    except KeyboardInterrupt:
        return "left to Ray"
    return "done"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("task", [waits, awaits, leaves_some, yields_some, fails])
def test_an_interrupt_at_any_line_of_what_runs_a_task(
    task: Callable[[], Any], work: Any
) -> None:
    """The next task in that worker is none the worse for it."""
    from aiogpu.engines.ray import cancellation as interrupts
    from aiogpu.engines.ray import worker_process as host
    from aiogpu.engines.ray import worker_process as loops

    modules = (work, host, interrupts, loops, asyncio.base_events, asyncio.runners)
    files = frozenset(module.__file__ for module in modules)
    expected = run(work, awaits), outcome(work, task)
    seen = set()
    for nth in count(1):
        with Tripwire(nth, files) as wire:
            seen.add(outcome(work, task))
        assert asyncio._get_running_loop() is None, nth
        assert not asyncio.all_tasks(loops.task_loop().loop), nth
        assert (run(work, awaits), outcome(work, task)) == expected, nth
        assert run(work, waits) == expected[0], nth
        if not wire.is_torn:
            break
    assert nth > 50
    assert {"stopped", expected[1]} <= seen


def test_an_answer_comes_though_plain_code_was_interrupted_at_posting(
    work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiogpu.engines.ray.tasks import Calls

    loop = asyncio.new_event_loop()
    calls, done = Calls(loop), []
    monkeypatch.setattr(
        loop, "call_soon_threadsafe", lambda _call: signal.default_int_handler(2, None)
    )
    with pytest.raises(KeyboardInterrupt):
        calls.post(lambda: done.append("first"))
    monkeypatch.undo()
    calls.post(lambda: done.append("second"))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert done == ["first", "second"]


def test_a_cancelled_call_of_an_actor_ends_no_code_that_runs_its_loop(
    work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is the actor's: all its later calls wait on it."""
    from aiogpu.engines.ray import cancellation as cancels
    from aiogpu.engines.ray.cancellation import interrupts

    heard = cancels.Cancels(f"of-test-{os.getpid()}")
    monkeypatch.setattr(heard, "_is_running", lambda: True)
    before = signal.signal(cancels.INTERRUPT, heard._on_interrupt)
    steps = []

    def call() -> None:
        with heard.heard():
            with interrupts.put_off():
                signal.raise_signal(cancels.INTERRUPT)
                steps.append("the loop's own code goes on")
            steps.append("and the call's own does not")

    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(cancels.INTERRUPT, before)
        assert heard._socket is not None
        heard._socket.close()
    assert heard.has_come
    assert steps == ["the loop's own code goes on"]
