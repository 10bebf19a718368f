"""Handles and executors of `aiogpu.sync` keep the contract of `concurrent.futures`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

import aiogpu
from aiogpu import errors, sync
from tests.contract.sync_tasks import (
    Counter,
    FalsyError,
    add_one,
    block,
    cancel_twice,
    double,
    fail_falsely,
    read_one,
    wait_long,
)
from tests.support import program
from tests.support.waits import LIMIT

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
def node(address: str) -> Iterator[Any]:
    with sync.init(address=address, num_cpus=2) as node:
        yield node


def in_callback(
    call: Callable[[], Any],
    start: Callable[[str], concurrent.futures.Future[Any]] | None = None,
) -> Any:
    """Call a function in a done-callback on the loop; return its result or error.

    The task of the handle ends when the callback was added. `start` starts `read_one`.
    """
    told: SimpleQueue[Any] = SimpleQueue()

    def tell(_: object) -> None:
        try:
            told.put(call())
        except BaseException as error:
            told.put(error)
            raise

    end, begin = os.pipe()
    handle = (start or sync.remote(read_one).remote)(f"/proc/{os.getpid()}/fd/{end}")
    handle.add_done_callback(tell)
    os.write(begin, b"a")
    for descriptor in (end, begin):
        handle.add_done_callback(lambda _, each=descriptor: os.close(each))
    return told.get(timeout=LIMIT)


def test_a_callback_chains_calls(node: Any) -> None:
    def chain() -> sync.Handle[int]:
        return double.remote(double.remote(1))  # type: ignore[arg-type]

    chained = in_callback(chain)
    assert chained.result(LIMIT) == 4


def test_a_callback_uses_handles_that_were_just_made(node: Any) -> None:
    def use() -> tuple[bool, bool, str]:
        handle = wait_long.remote()
        reports = handle.reports()
        return handle.cancel(), handle.cancelled(), type(reports).__name__

    used = in_callback(use)
    assert used == (True, True, "ResultIterator")


@pytest.mark.needs("interrupts")
def test_a_callback_calls_an_actor_and_an_executor(node: Any) -> None:
    counter = Counter.remote()
    called = in_callback(lambda: counter.add.remote(2))
    assert called.result(LIMIT) == 2
    with sync.Executor() as executor:
        submitted = in_callback(lambda: executor.submit(pow, 2, 3))
        assert submitted.result(LIMIT) == 8
        refused = in_callback(refusal_of(executor))
    assert refused in (None, "would block the event loop")


def refusal_of(executor: sync.Executor) -> Callable[[], str | None]:
    """Shut an executor down in a callback while a call of it runs."""

    def shut_down() -> str | None:
        pending = executor.submit(block)
        try:
            executor.shutdown()
        except errors.MisuseError as error:
            return "would block the event loop" if "block the" in str(error) else ""
        finally:
            pending.cancel()
        return None

    return shut_down


def test_a_callback_cannot_close_the_node(node: Any) -> None:
    refused = in_callback(node.shutdown)
    assert isinstance(refused, errors.MisuseError)
    assert node.is_open
    assert double.remote(2).result(LIMIT) == 4


async def test_callbacks_beside_a_loop_chain_calls(address: str) -> None:
    def in_a_thread() -> int:
        handle = aiogpu.from_thread(add_one.remote, 1)
        chained = in_callback(
            lambda: double.remote(handle),  # type: ignore[arg-type]
            start=partial(aiogpu.from_thread, aiogpu.remote(read_one).remote),
        )
        return int(chained.result(LIMIT))

    async with aiogpu.init(address=address, num_cpus=2):
        assert await asyncio.to_thread(in_a_thread) == 4


def test_calls_keep_their_order_around_a_callback(node: Any) -> None:
    """A callback that uses a posted call makes the calls before it first."""
    counter = Counter.remote()
    handle = double.remote(1)
    seen: list[Any] = []
    handle.add_done_callback(lambda _: seen.append(calls[-1].cancel()))
    calls = [counter.add.remote() for _ in range(20)]
    assert [call.result(LIMIT) for call in calls[:-1]] == [*range(1, 20)]


@pytest.mark.parametrize("timeout", [0, -1, -0.5])
@pytest.mark.needs("interrupts")
def test_a_poll_leaves_nothing(node: Any, timeout: float) -> None:
    handle = wait_long.remote()
    before = {name: len(vars(handle)[name]) for name in ("_done_callbacks", "_waiters")}
    for _ in range(10):
        for poll in (handle.result, handle.exception):
            with pytest.raises(concurrent.futures.TimeoutError):
                poll(timeout=timeout)
        with pytest.raises(TimeoutError):
            sync.get([handle, handle], timeout=0)
    after = {name: len(vars(handle)[name]) for name in before}
    assert after == before
    assert handle.cancel()


@pytest.mark.needs("interrupts")
def test_a_handle_says_that_it_runs(node: Any) -> None:
    handle = wait_long.remote()
    assert bool(handle)
    ends = time.monotonic() + LIMIT
    while not handle.running():
        assert time.monotonic() < ends
    assert not handle.done()
    assert handle.cancel()
    assert handle.cancel(), "as the standard library's"
    assert not handle.running()
    for wait in (handle.result, handle.exception):
        with pytest.raises(concurrent.futures.CancelledError, match="was cancelled"):
            wait(timeout=LIMIT)
        with pytest.raises(errors.TaskCancelledError):
            wait(timeout=LIMIT)
    with pytest.raises(concurrent.futures.CancelledError):
        sync.get([handle])


def test_a_handle_is_a_future_after_the_end_of_its_node(address: str) -> None:
    with sync.init(address=address, num_cpus=1):
        done = double.remote(2)
        assert done.result(LIMIT) == 4
    assert not done.cancel()
    assert done.result(timeout=-1) == 4
    assert not done.running()


def test_an_error_that_is_false_ends_its_handle(node: Any) -> None:
    handle = fail_falsely.remote()
    assert isinstance(handle.exception(LIMIT), FalsyError)
    with pytest.raises(FalsyError):
        handle.result(LIMIT)
    with pytest.raises(FalsyError):
        sync.get([handle])


def test_functions_of_the_standard_library_take_handles(node: Any) -> None:
    handles = [double.remote(i) for i in range(4)]
    done, pending = concurrent.futures.wait([*handles, handles[0]], LIMIT)
    assert (len(done), len(pending)) == (4, 0)
    completed = concurrent.futures.as_completed([*handles, handles[0]], LIMIT)
    assert sorted(handle.result() for handle in completed) == [0, 2, 4, 6]
    ordered = [handle.result() for handle in sync.as_completed([*handles, handles[0]])]
    assert ordered == [0, 2, 4, 6]


def test_a_slow_consumer_gets_results_that_came_in_time(node: Any) -> None:
    with sync.Executor() as executor:
        results = executor.map(abs, [-1, -2], timeout=0)
        in_chunks = executor.map(abs, [-3, -4, -5], timeout=0, chunksize=2)
    assert [*results, *in_chunks] == [1, 2, 3, 4, 5]


@pytest.mark.needs("interrupts")
def test_the_time_of_a_map_is_up(node: Any) -> None:
    with sync.Executor() as executor:
        results = executor.map(lambda _: block(), [1, 2], timeout=-1)
        with pytest.raises(concurrent.futures.TimeoutError):
            list(results)


@pytest.mark.needs("threads")
@pytest.mark.parametrize("cancel_futures", [False, True])
def test_an_executor_is_shut_down_while_others_submit(
    node: Any, cancel_futures: bool
) -> None:
    executor = sync.Executor()
    submitted: list[concurrent.futures.Future[int]] = []
    is_submitting = threading.Event()
    faults: list[BaseException] = []

    def submit() -> None:
        try:
            while True:
                submitted.append(executor.submit(abs, -1))
                is_submitting.set()
        except RuntimeError as error:
            assert "after shutdown" in str(error)  # noqa: PT017
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert is_submitting.wait(LIMIT)
    executor.shutdown(cancel_futures=cancel_futures)
    for thread in threads:
        thread.join()
    assert not faults
    assert all(future.done() for future in submitted)


@pytest.mark.needs("processes")
def test_a_shutdown_cancels_calls_that_have_not_begun(node: Any, tmp_path: Any) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)
    executor = sync.Executor()
    calls = [executor.submit(read_one, pipe) for _ in range(2)]
    ends = time.monotonic() + LIMIT
    while not all(call.running() for call in calls):
        assert time.monotonic() < ends
    waiting = [executor.submit(read_one, pipe) for _ in range(6)]
    executor.shutdown(wait=False, cancel_futures=True)
    assert [call.cancelled() for call in waiting] == [True] * 6
    os.write(end, b"ab")
    assert sorted(call.result(LIMIT) for call in calls) == [b"a", b"b"]
    os.close(end)


@pytest.mark.needs("processes")
def test_a_callback_cancels_calls_that_have_not_begun(node: Any) -> None:
    executor = sync.Executor(num_cpus=2)
    running, waiting = (executor.submit(block) for _ in range(2))
    in_callback(
        partial(executor.shutdown, wait=False, cancel_futures=True),
        start=sync.remote(num_cpus=0)(read_one).remote,
    )
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(LIMIT)
    assert running.cancel()


def test_only_its_task_ends_a_handle(node: Any) -> None:
    handle = double.remote(4)
    for end in (handle.set_result, handle.set_exception):
        with pytest.raises(errors.MisuseError, match="ended by its task alone"):
            end(ValueError())  # type: ignore[arg-type]
    with pytest.raises(errors.MisuseError, match="ended by its task alone"):
        handle.set_running_or_notify_cancel()
    assert handle.result(LIMIT) == 8


@pytest.mark.needs("processes")
def test_the_death_of_a_worker_breaks_an_executor_as_the_librarys(node: Any) -> None:
    with sync.Executor(max_retries=0) as executor:
        died = executor.submit(os._exit, 3)
        with pytest.raises(concurrent.futures.BrokenExecutor) as raised:
            died.result(LIMIT)
        error = raised.value
        assert isinstance(error, aiogpu.WorkerDiedError)
        assert (error.exitcode, error.cause) == (3, "exit")
        assert isinstance(pickle.loads(pickle.dumps(error)), aiogpu.WorkerDiedError)
        assert executor.submit(abs, -1).result(LIMIT) == 1, "unlike the library's"


@pytest.mark.parametrize("chunksize", [0, -1, 1.5])
def test_the_size_of_chunks_is_checked(chunksize: Any) -> None:
    with pytest.raises(ValueError, match=f"chunksize={chunksize} must be a whole"):
        sync.Executor().map(abs, [1], chunksize=chunksize)


@pytest.mark.needs("interrupts")
def test_a_second_cancel_in_a_plain_task_tells_that_it_is_cancelled(node: Any) -> None:
    assert sync.get(cancel_twice.remote()) == [True, True, True]


LAST_CALLS = """
    import atexit, os, aiogpu.sync as ray

    @atexit.register
    def run_last():
        try:
            executor.submit(abs, -1)
        except RuntimeError as error:
            print(error)

    def write():
        os.write(1, b"written")

    executor = ray.Executor()
    {use}
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3),
    reason="this Python starts no thread at a program's end (CPython's gh-113964)",
)
@pytest.mark.parametrize(
    "use",
    [
        "executor.submit(write)",
        "ray.init(num_cpus=1); executor.submit(write)",
        "executor.submit(write); executor.shutdown(wait=False)",
        "executor.submit(write); del executor; executor = ray.Executor()",
    ],
)
def test_a_program_ends_after_the_calls_of_its_executors(use: str) -> None:
    out = program.run(LAST_CALLS.format(use=use))
    assert "written" in out
    assert "cannot schedule new futures after shutdown" in out
