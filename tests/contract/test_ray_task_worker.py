"""Interrupts of the code that runs tasks in Ray's workers. No cluster."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from inspect import isasyncgenfunction
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogpu.client.current import current
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import MisuseError
from aiogpu.serialization.serializer import dump_arguments
from aiogpu.worker.invoke import Functions

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray import cluster, process
from aiogpu.engines.ray.actor_process import decode_call, encode_call
from aiogpu.engines.ray.engine import RayEngine
from aiogpu.engines.ray.process import TaskClient
from aiogpu.engines.ray.values import TaskFailure

pytestmark = pytest.mark.ray


class Tripwire:
    """Raises an interrupt at the nth line of one file that the block executes.

    Attributes:
        is_torn: whether there were so many.
    """

    def __init__(self, nth: int, file: str | None) -> None:
        self._left = nth
        self._file = file
        self.is_torn = False

    def __enter__(self) -> Tripwire:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self.is_torn or frame.f_code.co_filename != self._file:
            return None
        if event == "line":
            self._left -= 1
            if self._left <= 0:
                self.is_torn = True
                signal.raise_signal(signal.SIGINT)
        return self._trace


class Written:
    """Code as a worker receives it, without a program."""

    name = "written"
    retried = b""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.functions = Functions()
        self.functions[0] = function

    def set_up_process(self) -> None:
        """The test has done it."""


def inside(loop: asyncio.AbstractEventLoop) -> RayEngine:
    return RayEngine(NodeOptions(), loop, is_in_task=True)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process a worker of Ray's, without Ray."""
    monkeypatch.setattr(cluster, "task_id", lambda: "01" * 24)
    monkeypatch.setattr(current, "client", TaskClient(inside))
    monkeypatch.setattr(current, "task", 0)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def run(function: Callable[[], Any]) -> Any:
    payload = dump_arguments("written", (), {})
    code: Any = Written(function)
    if isasyncgenfunction(function):
        return list(process.stream_task(code, (payload,)))
    return process.run_task(code, (payload,))


def outcome(function: Callable[[], Any]) -> str:
    """Run a task; return how it ends."""
    try:
        run(function)
    except TaskFailure as error:
        return error.failed.type_name
    except KeyboardInterrupt:
        return "left to Ray"
    except RuntimeError:
        return "torn while its loop was closed"
    return "done"


def task_waits() -> str:
    """Wait like `aiogpu.get`."""
    client: Any = current.client
    done: list[bool] = []
    client.calls.loop.call_soon_threadsafe(done.append, True)
    assert client.wait_until(lambda: bool(done))
    return "done"


async def task_awaits() -> str:
    await asyncio.sleep(0)
    return "done"


async def task_leaves_some() -> str:
    async def rest() -> None:
        await asyncio.Event().wait()

    asyncio.create_task(rest())  # noqa: RUF006 - it is to be left
    await asyncio.sleep(0)
    return "done"


async def yields_some() -> AsyncIterator[int]:
    try:
        await asyncio.sleep(0)
        yield 1
    finally:
        await asyncio.sleep(0)


async def task_fails() -> str:
    raise LookupError("of its own")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "task", [task_waits, task_awaits, task_leaves_some, yields_some, task_fails]
)
def test_a_worker_survives_an_interrupt_at_any_line(
    task: Callable[[], Any], worker: None
) -> None:
    """The next task in the worker is not affected."""
    expected = outcome(task)
    seen = set()
    for nth in count(1):
        with Tripwire(nth, process.__file__) as wire:
            seen.add(outcome(task))
        assert (outcome(task_awaits), outcome(task)) == ("done", expected), nth
        if not wire.is_torn:
            break
    gc.collect()  # what a torn task leaves is not the next test's
    assert nth > 20
    assert seen >= {"left to Ray", expected}


def test_an_interrupt_wakes_an_idle_loop(worker: None) -> None:
    """No time slice, call or timer ends the wait."""
    reached = threading.Event()

    def interrupt() -> None:
        reached.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def task() -> None:
        asyncio.get_running_loop().call_soon(reached.set)
        await asyncio.Event().wait()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert outcome(task) == "left to Ray"
    thread.join()


def test_an_import_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: None
) -> None:
    """Half an import would break the worker; the task is interrupted after it."""
    text = "import signal\nsignal.raise_signal(signal.SIGINT)\nWHOLE = True\n"
    (tmp_path / "half_way.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[bool] = []

    def task() -> None:
        seen.append(import_module("half_way").WHOLE)
        while True:
            pass

    assert outcome(task) == "left to Ray"
    assert seen == [True]
    sys.modules.pop("half_way", None)


def test_a_thread_left_by_a_task_may_not_start_tasks(worker: None) -> None:
    assert outcome(task_awaits) == "done"
    client: Any = current.client
    with pytest.raises(MisuseError, match=r"add\.remote\(\) was called after the task"):
        client.call(1, "add", b"", None)


# Calls of actors


@given(
    method=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    payload=st.binary(max_size=50),
)
def test_a_call_is_unpacked_as_it_was_packed(method: str, payload: bytes) -> None:
    assert decode_call(encode_call(method.encode(), payload)) == (method, payload)


def test_arguments_may_come_beside_their_call() -> None:
    assert decode_call(encode_call(b"add")) == ("add", b"")
