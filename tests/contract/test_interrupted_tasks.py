"""What runs a task in a worker of Ray's, interrupted; needs Ray, but no cluster."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from inspect import isasyncgenfunction
from itertools import count
from typing import Any

import pytest

from aiogpu.client.current import host_of_task
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.serialization.serializer import dump_arguments
from aiogpu.worker import invoke
from aiogpu.worker.invoke import Functions
from tests.contract.tripwire import Tripwire

pytestmark = pytest.mark.ray


class Written:
    """A task as it comes to a worker, without a program that has sent it."""

    name = "written"
    resources: dict[str, float] = {}  # noqa: RUF012 - never written to
    kinds = ()
    retried = b""

    def __init__(self, function: Callable[..., Any]) -> None:
        from aiogpu.engines.ray.engine import RayEngine

        self.functions = Functions()
        self.functions[0] = function
        self.make_engine = RayEngine.inside


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that runs tasks."""
    cluster = pytest.importorskip("aiogpu.engines.ray.cluster")
    from aiogpu.engines.ray import task_worker

    monkeypatch.setattr(cluster, "task_id", lambda: "00" * 24)
    monkeypatch.setattr(task_worker, "set_up_process", lambda *_place: None)
    monkeypatch.setattr(task_worker, "SLICE", 0)
    monkeypatch.setattr(task_worker, "_thread", task_worker._Thread())
    handler = signal.getsignal(signal.SIGINT)
    yield task_worker
    signal.signal(signal.SIGINT, handler)
    if task_worker._thread.loop is not None:
        task_worker._thread.loop.loop.close()


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
        return list(work.stream_task(Written(function), (payload,)))
    return work.run_task(Written(function), (payload,))


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
    modules = (work, invoke, asyncio.base_events, asyncio.runners)
    files = frozenset(module.__file__ for module in modules)
    expected = run(work, awaits), outcome(work, task)
    seen = set()
    for nth in count(1):
        with Tripwire(nth, files) as wire:
            seen.add(outcome(work, task))
        assert asyncio._get_running_loop() is None, nth
        assert not asyncio.all_tasks(work.task_loop().loop), nth
        assert (run(work, awaits), outcome(work, task)) == expected, nth
        assert run(work, waits) == expected[0], nth
        if not wire.is_torn:
            break
    gc.collect()  # what a torn task leaves is not the next test's
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
        calls.call_soon(lambda: done.append("first"))
    monkeypatch.undo()
    calls.call_soon(lambda: done.append("second"))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert done == ["first", "second"]
