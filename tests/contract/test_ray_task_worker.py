"""Interrupts at any line of the code that runs tasks in Ray's workers. No cluster."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator
from importlib import import_module
from inspect import isasyncgenfunction
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogpu.client.current import current
from aiogpu.errors import MisuseError
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.serialization.serializer import dump_arguments
from aiogpu.worker import invoke
from aiogpu.worker.invoke import Functions

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray import task_worker
from aiogpu.engines.ray.actor_process import decode_call, encode_call
from aiogpu.engines.ray.engine import RayEngine
from aiogpu.engines.ray.task_worker import TaskClient, TaskLoop, interrupts

pytestmark = pytest.mark.ray


class Tripwire:
    """Raises an interrupt at the nth line of these files that the block executes.

    Attributes:
        is_torn: whether there were so many.
    """

    def __init__(self, nth: int, files: Container[str]) -> None:
        self._left = nth
        self._files = files
        self.is_torn = False

    def __enter__(self) -> Tripwire:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self.is_torn or frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self._left -= 1
            if self._left <= 0:
                self.is_torn = True
                signal.raise_signal(signal.SIGINT)
        return self._trace


OWN_CODE: Final = frozenset(
    module.__file__
    for module in (
        task_worker,
        threading,
        asyncio.base_events,
        asyncio.events,
        asyncio.runners,
    )
)
"""The files with the code that runs a loop."""


@pytest.fixture(scope="module")
def client() -> Iterator[TaskClient]:
    """The state of a task that has made no call."""
    made = TaskClient(RayEngine.inside)
    yield made
    made.task_loop.loop.close()


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Restore the handler of the tests' own interrupts."""
    handler = signal.getsignal(signal.SIGINT)
    interrupts.install()
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def task_loop(
    client: TaskClient, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TaskLoop]:
    """A selector whose waits end at once."""
    monkeypatch.setattr(task_worker, "SLICE", 0)
    made = TaskLoop(client.calls)
    yield made
    made.loop.close()


async def turns(number: int = 5) -> str:
    for _ in range(number):
        await asyncio.sleep(0)
    return "turned"


def waits(_task_loop: TaskLoop, client: TaskClient) -> None:
    """Wait like `aiogpu.get`."""
    done: list[bool] = []
    client.calls.call_soon(lambda: done.append(True))
    assert client.wait_until(lambda: bool(done))


def awaits(task_loop: TaskLoop, _client: TaskClient) -> None:
    assert task_loop.run(turns()) == "turned"


def fails(task_loop: TaskLoop, _client: TaskClient) -> None:
    async def fail() -> None:
        raise LookupError

    task_loop.run(fail())


def exits(task_loop: TaskLoop, _client: TaskClient) -> None:
    """Leave the loop in the middle of a turn."""

    async def leave() -> None:
        sys.exit(3)

    async def main() -> None:
        leaving = asyncio.create_task(leave())
        leaving.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await turns(1)

    task_loop.run(main())


def leaves_some(task_loop: TaskLoop, _client: TaskClient) -> None:
    async def leave() -> None:
        asyncio.create_task(turns(1000))  # noqa: RUF006 - it is to be left

    task_loop.run(leave())
    task_loop.cancel_all()
    assert not asyncio.all_tasks(task_loop.loop)


def check_sound(task_loop: TaskLoop, client: TaskClient) -> None:
    """Check that the next task finds the loop in its first state."""
    task_loop.cancel_all()
    assert task_loop.run(turns()) == "turned"
    waits(task_loop, client)
    assert interrupts._depth == 0


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scene", [waits, awaits, fails, exits, leaves_some])
def test_a_loop_survives_an_interrupt_at_any_line(
    scene: Callable[[TaskLoop, TaskClient], None],
    task_loop: TaskLoop,
    client: TaskClient,
) -> None:
    """The interrupt is raised, and leaves nothing that would stop the next task."""
    for nth in count(1):
        raised = None
        with interrupts.enabled(), Tripwire(nth, OWN_CODE) as wire:
            try:
                scene(task_loop, client)
            except (KeyboardInterrupt, LookupError, SystemExit) as error:
                raised = error
        assert interrupts.has_come == wire.is_torn, nth
        assert raised is not None or not wire.is_torn, nth
        try:
            check_sound(task_loop, client)
        except BaseException as error:
            error.add_note(f"after an interrupt at line {nth}")
            raise
        if not wire.is_torn:
            break
    assert nth > 20


class Careful(asyncio.Future[None]):
    """Raises if it is cancelled while its owner runs."""

    is_busy = False

    def cancel(self, msg: Any | None = None) -> bool:
        assert not self.is_busy
        return super().cancel(msg)


def test_a_coroutine_is_not_cancelled_amid_other_code(task_loop: TaskLoop) -> None:
    """A cancel may have to take a lock that the interrupted code holds."""
    awaited = Careful(loop=task_loop.loop)

    def work() -> None:
        awaited.is_busy = True
        signal.raise_signal(signal.SIGINT)
        awaited.is_busy = False

    async def main() -> None:
        task_loop.loop.call_soon(work)
        await awaited

    with interrupts.enabled(), pytest.raises(KeyboardInterrupt):
        task_loop.run(main())
    assert awaited.cancelled()


def test_a_signal_wakes_a_wait_in_the_selector(
    task_loop: TaskLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time slice, call or timer ends the wait."""
    monkeypatch.setattr(task_worker, "SLICE", 300)
    reached = threading.Event()

    def interrupt() -> None:
        reached.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def main() -> None:
        reached.set()
        await asyncio.Event().wait()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with interrupts.enabled(), pytest.raises(KeyboardInterrupt):
        task_loop.run(main())
    thread.join()


def test_an_interrupt_ends_an_endless_clean_up(task_loop: TaskLoop) -> None:
    """The task's own code has ended, and what it left running is cleaned up."""
    ends: list[str] = []

    async def rest() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            task_loop.loop.call_soon(signal.raise_signal, signal.SIGINT)
            try:
                await asyncio.Event().wait()
            finally:
                ends.append("it was cancelled twice")

    async def leave() -> asyncio.Task[None]:
        left = asyncio.create_task(rest())
        await turns(1)
        return left

    with interrupts.enabled():
        left = task_loop.run(leave())
        with pytest.raises(KeyboardInterrupt):
            task_loop.cancel_all()
    assert ends
    assert left.cancelled()


def test_several_exceptions_may_end_the_loop(task_loop: TaskLoop) -> None:
    """Each exception comes while the first is still being handled."""

    async def leave() -> None:
        await turns(1)
        sys.exit(3)

    async def main() -> None:
        leaving = [asyncio.create_task(leave()) for _ in range(5)]
        for one in leaving:
            one.add_done_callback(asyncio.Task.exception)
        await turns(2)

    with pytest.raises(SystemExit):
        task_loop.run(main())
    task_loop.cancel_all()
    assert task_loop.run(turns()) == "turned"


def test_the_outermost_block_raises_what_was_deferred() -> None:
    steps: list[str] = []

    def work() -> None:
        with interrupts.deferred():
            with interrupts.deferred():
                signal.raise_signal(signal.SIGINT)
                steps.append("in the inner block")
                assert not interrupts.is_due()
            steps.append("in the outer block")
            assert interrupts.is_due()

    with interrupts.enabled(), pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["in the inner block", "in the outer block"]


def test_an_inner_block_leaves_the_wake_up_to_the_outer_block() -> None:
    woken: list[bool] = []
    with interrupts.enabled(), interrupts.deferred(lambda: woken.append(True)):
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
        assert woken  # more than once if the thread that insists was quick
        assert interrupts.take()
        assert not interrupts.take()


def test_threads_defer_no_interrupt() -> None:
    """Threads do not get the main thread's interrupt."""
    seen: list[bool] = []

    def look() -> None:
        with interrupts.deferred():
            seen.append(interrupts.is_due())
        seen.append(interrupts.take())

    with interrupts.enabled(), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert interrupts.take()
    assert seen == [False, False]


def test_an_awaited_object_may_ignore_its_cancel(task_loop: TaskLoop) -> None:
    """This is so in any program; a cancel by the object itself is no interrupt."""

    async def stubborn() -> str:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "stubborn"
        return "not cancelled"

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with interrupts.enabled():
        assert task_loop.run(stubborn()) == "stubborn"
    with interrupts.enabled(), pytest.raises(asyncio.CancelledError):
        task_loop.run(cancelled())


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module whose half-finished import would break its process."""
    text = "import signal\nsignal.raise_signal(signal.SIGINT)\nWHOLE = True\n"
    (tmp_path / "half_way.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "half_way"
    sys.modules.pop("half_way", None)


def test_an_import_is_not_interrupted(half: str) -> None:
    """The interrupt, which may be the only one, comes when the import has ended."""
    seen: list[bool] = []

    def work() -> None:
        seen.append(import_module(half).WHOLE)
        assert not interrupts.has_come
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pass

    with interrupts.enabled(), pytest.raises(KeyboardInterrupt):
        work()
    assert seen == [True]
    assert interrupts.has_come


def test_a_coroutine_gets_the_interrupt_that_an_import_deferred(
    half: str, task_loop: TaskLoop
) -> None:
    """The coroutine imports its own module."""
    with interrupts.enabled():
        import_module(half)
        with pytest.raises(KeyboardInterrupt):
            task_loop.run(asyncio.Event().wait())


def test_an_interrupt_of_one_task_does_not_reach_the_next(half: str) -> None:
    with interrupts.enabled():
        import_module(half)
    interrupts._look(0, None)
    with interrupts.enabled():
        interrupts._look(0, None)
    assert not interrupts.has_come


# A whole task


class Written:
    """Make a task as a worker receives it, without a program."""

    name = "written"
    resources: dict[str, float] = {}  # noqa: RUF012 - never written to
    kinds = ()
    retried = b""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.functions = Functions()
        self.functions[0] = function
        self.make_engine = RayEngine.inside


@pytest.fixture
def work(client: TaskClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the module that runs tasks."""
    cluster = pytest.importorskip("aiogpu.engines.ray.cluster")
    monkeypatch.setattr(cluster, "task_id", lambda: "00" * 24)
    monkeypatch.setattr(task_worker, "set_up_process", lambda *_place: None)
    monkeypatch.setattr(task_worker, "SLICE", 0)
    monkeypatch.setattr(current, "client", client)
    monkeypatch.setattr(current, "task", 0)
    handler = signal.getsignal(signal.SIGINT)
    yield task_worker
    signal.signal(signal.SIGINT, handler)


def task_waits() -> str:
    """Wait like `aiogpu.get`."""
    client: Any = current.client
    done: list[bool] = []
    client.calls.call_soon(lambda: done.append(True))
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
        for number in range(1):
            await asyncio.sleep(0)
            yield number
    finally:
        await asyncio.sleep(0)


async def task_fails() -> str:
    raise LookupError("of its own")


def run(work: Any, function: Callable[[], Any]) -> Any:
    payload = dump_arguments("written", (), {})
    if isasyncgenfunction(function):
        return list(work.stream_task(Written(function), (payload,)))
    return work.run_task(Written(function), (payload,))


def outcome(work: Any, function: Callable[[], Any]) -> str:
    """Run a task; return how it ends."""
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
@pytest.mark.parametrize(
    "task", [task_waits, task_awaits, task_leaves_some, yields_some, task_fails]
)
def test_a_worker_survives_an_interrupt_at_any_line(
    task: Callable[[], Any], work: Any
) -> None:
    """The next task in the worker is not affected."""
    modules = (work, invoke, asyncio.base_events, asyncio.runners)
    files = frozenset(module.__file__ for module in modules)
    expected = run(work, task_awaits), outcome(work, task)
    seen = set()
    for nth in count(1):
        with Tripwire(nth, files) as wire:
            seen.add(outcome(work, task))
        assert asyncio._get_running_loop() is None, nth
        assert not asyncio.all_tasks(work.task_client().task_loop.loop), nth
        assert (run(work, task_awaits), outcome(work, task)) == expected, nth
        assert run(work, task_waits) == expected[0], nth
        if not wire.is_torn:
            break
    gc.collect()  # what a torn task leaves is not the next test's
    assert nth > 50
    assert {"stopped", expected[1]} <= seen


def test_a_thread_left_by_a_task_may_not_start_tasks(work: Any) -> None:
    assert run(work, task_awaits)
    with pytest.raises(MisuseError, match=r"add\.remote\(\) was called after the task"):
        work.task_client().call(1, "add", b"", None)


def test_an_answer_comes_despite_an_interrupt_while_posting(
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


# Calls of actors


@given(
    method=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    payload=st.binary(max_size=50),
)
def test_a_call_is_unpacked_as_it_was_packed(method: str, payload: bytes) -> None:
    assert decode_call(encode_call(method.encode(), payload)) == (method, payload)


def test_arguments_may_come_beside_their_call() -> None:
    assert decode_call(encode_call(b"add")) == ("add", b"")
