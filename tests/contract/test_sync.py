"""Code without an event loop: `aiogpu.sync`, and `from_thread` beside a loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import os
import signal
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu import errors, sync
from tests.contract.sync_tasks import (
    Counter,
    Leaver,
    Named,
    add_one,
    count,
    double,
    double_by_child,
    fail,
    fail_at,
    fill,
    keep,
    report_once,
    split,
    total,
    wait_long,
    where,
)
from tests.support import program


@pytest.fixture(params=["local", "inline"])
def node(request: pytest.FixtureRequest, forked_zygotes: None) -> Iterator[Any]:
    """A node of this thread, which runs no loop."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with sync.init(address=request.param, num_cpus=2, num_gpus=1) as node:
        yield node
    assert not sync.is_initialized()
    assert all(thread.name != "aiogpu-loop" for thread in threading.enumerate())
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


def test_handles_and_values_are_arguments(node: Any) -> None:
    handle = double.remote(4)
    assert handle.result(timeout=60) == 8
    assert handle.done()
    assert handle.exception() is None
    assert sync.get([double.remote(i) for i in range(5)]) == [0, 2, 4, 6, 8]
    kept = sync.put(21)
    assert sync.get(double.remote(kept)) == 42
    assert sync.get(double.remote(double.remote(1))) == 4
    assert sync.get(total.remote([kept, double.remote(2)])) == 25
    first, rest = split.remote("abc")
    assert sync.get([first, rest]) == ["a", "bc"]


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_tasks_wait_for_children(node: Any) -> None:
    doubled, message = double_by_child.remote(3).result()
    assert doubled == 12
    assert message == "wait_long did not end within 0.01 s; it goes on."


def test_errors_keep_their_type(node: Any) -> None:
    with pytest.raises(LookupError, match="here"):
        sync.get([double.remote(1), fail.remote("here")])
    assert isinstance(fail.remote("there").exception(), LookupError)
    with pytest.raises(aiogpu.InfeasibleError, match="CPU 99"):
        double.options(num_cpus=99).remote(1)
    with pytest.raises(aiogpu.InfeasibleError, match="CPU 99"):
        sync.Executor(num_cpus=99).submit(abs, 1)
    with pytest.raises(aiogpu.InfeasibleError, match="CPU 99"):
        Counter.options(num_cpus=99).remote()
    with pytest.raises(errors.MisuseError, match="missing a required argument"):
        double.remote()  # type: ignore[call-arg]
    with pytest.raises(errors.SerializationError, match=r"args\[0\] \(a lock\)"):
        double.remote(threading.Lock())  # type: ignore[arg-type]


def test_the_input_of_a_map_opens_no_other_node(forked_zygotes: None) -> None:
    """Its thread may read an item after the node was shut down."""
    is_reading, is_shut_down = threading.Event(), threading.Event()
    calls: Queue[BaseException | None] = Queue()

    def late() -> Iterator[int]:
        yield 1
        is_reading.set()
        is_shut_down.wait(60)
        try:
            yield double.remote(1).result()
        except BaseException as error:
            calls.put(error)
            raise
        calls.put(None)

    with sync.init(address="inline"):
        results = double.map(late())
        assert next(results) == 2
        assert is_reading.wait(60)
    is_shut_down.set()
    assert isinstance(calls.get(timeout=60), errors.NodeError)
    assert not sync.is_initialized()
    del results


@pytest.mark.parametrize("end", ["read", "closed", "dropped", "failed", "left"])
def test_the_thread_of_a_maps_input_ends_with_the_map(node: Any, end: str) -> None:
    reader: list[threading.Thread] = []

    def numbers() -> Iterator[int]:
        reader.append(threading.current_thread())
        yield from range(3)
        if end == "failed":
            raise KeyError("input")
        if end != "read":
            yield from range(1_000)

    results = double.map(numbers(), limit=2 if end == "dropped" else 2_000)
    if end == "failed":
        with pytest.raises(KeyError, match="input"):
            list(results)
    elif end == "read":
        assert list(results) == [0, 2, 4]
    elif end == "left":
        with results:
            assert next(results) == 0
    else:
        assert next(results) == 0
        if end == "closed":
            results.close()
    del results
    reader[0].join(60)
    assert not reader[0].is_alive()


def test_streams_and_maps_are_plain_iterators(node: Any) -> None:
    assert list(count.remote(4)) == [0, 1, 2, 3]
    with count.remote(1_000_000) as items:
        assert next(items) == 0
    assert list(double.map(range(20))) == [2 * i for i in range(20)]
    assert list(double.map([double.remote(1), double.remote(2)])) == [4, 8]
    assert list(double.map(double.remote(i) for i in range(3))) == [0, 4, 8]
    read = []

    def endless() -> Iterator[int]:
        i = 0
        while True:
            read.append(i)
            yield double.remote(i).result() // 2  # blocks, in a thread of its own
            i += 1

    with double.map(endless(), limit=3) as doubled:
        assert [next(doubled) for _ in range(4)] == [0, 2, 4, 6]
    assert len(read) <= 9

    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("input")

    with pytest.raises(KeyError, match="input"):
        list(double.map(broken()))
    with pytest.raises(
        errors.MisuseError, match="takes an iterable or an async iterable"
    ):
        double.map(3)  # type: ignore[arg-type]


def test_actors_answer_calls(node: Any) -> None:
    counter = sync.get(Counter.options(name="c").remote(10))
    assert sync.get([counter.add.remote() for _ in range(3)]) == [11, 12, 13]
    assert list(counter.upto.remote(3)) == [0, 1, 2]
    assert sync.get(sync.get_actor("c").add.remote(more=5)) == 18
    assert sync.get(counter.add.remote(double.remote(1))) == 20
    with pytest.raises(AttributeError, match="Counter has no method ad"):
        counter.ad.remote()
    with pytest.raises(errors.MisuseError, match=r"write `actor\.add\.remote"):
        counter.add()
    sync.kill(counter)
    with pytest.raises(aiogpu.ActorDiedError):
        counter.add.remote().result()
    with Counter.remote() as other:
        last = other.add.remote()
    assert last.result() == 1
    with pytest.raises(errors.ActorNameError):
        sync.get_actor("nobody")


def test_a_pool_shares_out_calls(node: Any) -> None:
    counters = [Counter.remote(), Counter.remote()]
    pool: Any = sync.ActorPool(counters)
    with pytest.raises(errors.MisuseError, match=r"write `pool\.add\.remote"):
        pool.add()
    with sync.ActorPool(lambda: Counter.remote(5), 1) as made:
        assert made.add.remote().result() == 6
        assert list(made.add.map([1, 1])) == [7, 8]
    assert pool.add.remote(0).result() == 0
    assert [*pool] == counters


def test_each_actor_of_a_pool_is_called(node: Any) -> None:
    with sync.ActorPool(Named, 2) as pool:
        pids = sync.get([actor.pid.remote() for actor in pool])
        assert len(pids) == len(pool) == 2
        # These names are also of methods of Ray's pool.
        assert sync.get(pool.map.remote(3)) == 4
        assert list(pool.map.map([1, 2])) == [2, 3]
        assert sync.get(pool.has_free.remote()) == "the actor's"


def test_code_of_tasks_uses_the_same_names(node: Any) -> None:
    for name in ("batch", "exit_actor", "report"):
        assert getattr(sync, name) is getattr(aiogpu, name)
    handle = report_once.remote(3)
    assert [report["step"] for report in handle.reports()] == [3]
    leaver = Leaver.remote()
    with pytest.raises(aiogpu.ActorDiedError):
        sync.get(leaver.leave.remote())


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_names_of_ray_work_or_say_what_to_write(node: Any) -> None:
    handle = wait_long.remote()
    with pytest.raises(sync.TaskTimeoutError, match="did not end within 0 s"):
        sync.get(handle, timeout=0)
    with pytest.raises(errors.MisuseError, match=r"kill\(\)"):
        sync.kill(handle)
    handle.cancel()
    assert sync.get(double.remote(1), timeout=60) == 2
    assert sync.ActorDiedError is aiogpu.ActorDiedError
    counter = Counter.remote()
    for owner, name, message in (
        (sync, "nodes", r"'nodes': write `aiogpu.sync.status\(\)`"),
        (sync, "NoSuchError", "has no attribute 'NoSuchError'"),
        (sync.get_runtime_context(), "get_task_id", "use the attribute 'task_id'"),
        (sync.get_runtime_context(), "is_canceled", "use the attribute 'is_stopping'"),
        (counter, "__ray_ready__", r"`aiogpu\.sync\.get\(actor\)` without an event"),
        (counter, "__ray_terminate__", "or `with` without an event loop, which ends"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(owner, name)()
    with pytest.raises(TypeError, match=r"\.options\(num_gpus=\.\.\.\)\.remote"):
        double.remote(1, num_gpus=1)


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_a_queue_passes_items(node: Any) -> None:
    queue: sync.Queue[Any] = sync.Queue(maxsize=3)
    filled = fill.remote(queue, 5)
    assert [queue.get(timeout=60) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert filled.result() is None
    queue.put_batch(iter("abc"))
    assert (queue.full(), queue.qsize(), queue.get_batch(9)) == (True, 3, [*"abc"])
    with pytest.raises(aiogpu.errors.QueueEmptyError):
        queue.get_nowait()
    queue.shutdown()
    with pytest.raises(aiogpu.errors.QueueClosedError):
        queue.put_nowait(1)


def test_the_node_tells_its_resources_and_reserves_them(node: Any) -> None:
    assert node.cluster_resources()["CPU"] == sync.cluster_resources()["CPU"] == 2
    assert sync.available_resources()["GPU"] == 1
    assert sync.is_initialized()
    assert node.is_open
    assert "GPU" in str(sync.status())
    with sync.placement([{"num_cpus": 1, "num_gpus": 1}], name="both") as group:
        assert (group.bundles, len(group)) == (({"CPU": 1.0, "GPU": 1.0},), 1)
        placed = double.options(placement=group, num_cpus=1)
        assert placed.remote(2).result() == 4
    message = r"a node\. Write `aiogpu\.sync\.shutdown\(\)` before another init\(\)"
    with pytest.raises(errors.NodeRunningError, match=message):
        sync.init()
    with pytest.raises(AttributeError, match=r"write `handle\.cancel\(\)`"):
        sync.cancel  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_wait_as_completed_and_cancel_work(node: Any) -> None:
    slow, quick = wait_long.remote(), double.remote(1)
    assert sync.wait([slow, quick]) == ([quick], [slow])
    assert sync.wait([slow], timeout=0) == ([], [slow])
    with pytest.raises(errors.MisuseError, match="more than once; pass each handle"):
        sync.wait([slow, quick, slow])
    assert next(iter(sync.as_completed([slow, quick]))) is quick
    assert list(sync.as_completed([])) == []
    assert concurrent.futures.wait([quick]).done == {quick}
    with pytest.raises(aiogpu.TaskTimeoutError, match=r"within 0\.01 s; it goes on"):
        slow.result(timeout=0.01)
    with pytest.raises(aiogpu.TaskTimeoutError, match="1 of 2 tasks"):
        sync.get([slow, double.remote(1)], timeout=1)
    assert slow.why().state == "running"
    assert node.why(slow.task_id).name == "wait_long"
    assert " in wait_long\n" in node.stack(slow)
    assert slow.cancel()
    assert slow.cancelled()
    assert slow.cancel()
    with pytest.raises(aiogpu.TaskCancelledError):
        slow.result()


def test_reservations_need_no_block(node: Any) -> None:
    group = sync.placement([{"CPU": 1}])
    assert sync.get(group) is group.ready() is group
    assert group.why().state == "running"
    placed = keep.options(placement=group, num_cpus=1).remote(group)
    assert placed.result().id == group.id
    group.remove()
    with pytest.raises(errors.PlacementRemovedError):
        group.ready()
    lease = sync.lease(num_gpus=1)
    with pytest.raises(errors.MisuseError, match=r"`with aiogpu\.sync\.lease"):
        _ = lease.ids
    assert sync.get(lease).ids == [0]
    with pytest.raises(errors.SerializationError, match="pass its ids or its environ"):
        keep.remote(lease)
    lease.release()
    assert not lease.is_held
    with pytest.raises(errors.OptionError, match="has both num_gpus and GPU"):
        sync.placement([{"num_gpus": 1, "GPU": 1}])
    with pytest.raises(errors.InfeasibleError, match="GPU 9 of 1"):
        sync.placement([{"num_gpus": 9}])


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_warnings_name_the_line_of_the_call(node: Any) -> None:
    """On one engine: of each function and argument, a process warns once."""
    large = bytes(1 << 20)

    def call() -> list[Any]:
        return [keep.remote(large).result() for _ in range(8)]

    def map_it() -> list[int]:
        return list(sync.remote(len).map([large] * 8))

    for use in (call, map_it):
        with pytest.warns(aiogpu.errors.AiogpuWarning) as caught:
            use()
        [warning] = caught
        first = use.__code__.co_firstlineno
        assert (warning.filename, warning.lineno) == (__file__, first + 1)
        assert "`handle = aiogpu.sync.put(x)`" in str(warning.message)


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_a_lease_holds_a_gpu(node: Any) -> None:
    with sync.lease(num_gpus=1) as lease:
        assert lease.environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert sync.available_resources()["GPU"] == 0


def test_an_executor_runs_calls(node: Any) -> None:
    with sync.Executor(num_cpus=0.5) as pool:
        assert pool.submit(lambda: 5).result() == 5
        assert pool.submit(pow, 2, exp=3).result() == 8
        assert list(pool.map(pow, [1, 2, 3], [2, 2, 2])) == [1, 4, 9]
        assert list(pool.map(pow, [1, 2, 3], [2, 2, 2], chunksize=2)) == [1, 4, 9]
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(pow, 1, 1)
    with pytest.raises(aiogpu.OptionError, match="num_returns"):
        sync.Executor(num_returns=2)


def test_arguments_that_are_no_handles_are_refused(node: Any) -> None:
    for call in (sync.get, sync.wait, sync.as_completed):
        for wrong in (3, "abc", [3]):
            with pytest.raises(errors.MisuseError, match=r"takes a|was given"):
                list(call(wrong))  # type: ignore[call-overload, arg-type]

    def items(handle: Any) -> Iterator[Any]:
        for item in handle:
            yield [item]

    with pytest.raises(errors.MisuseError, match="cannot be iterated"):
        list(items(double.remote(1)))
    with pytest.raises(errors.MisuseError, match=r"asyncio\.wrap_future"):
        double.remote(1).__await__()
    with pytest.raises(errors.MisuseError, match=r"write `double\.remote"):
        double(1)


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_an_actor_ends_with_its_last_handle(node: Any) -> None:
    counter = Counter.options(num_gpus=1).remote()
    assert counter.add.remote().result() == 1
    assert sync.available_resources()["GPU"] == 0
    del counter
    # The task gets the GPU when the actor has released it.
    assert double.options(num_gpus=1).remote(1).result(timeout=60) == 2


@pytest.mark.parametrize("node", ["local"], indirect=True)
def test_threads_call_at_once(node: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sums = pool.map(
            lambda k: sum(sync.get([double.remote(i) for i in range(50)])) + k, range(8)
        )
        assert list(sums) == [2450 + k for k in range(8)]


# Beside an event loop


@pytest.mark.usefixtures("no_leaks")
async def test_threads_beside_a_loop_use_its_node() -> None:
    with pytest.raises(aiogpu.NoLoopError, match="needs a node"):
        await asyncio.to_thread(aiogpu.from_thread, add_one.remote, 1)

    def work() -> list[Any]:
        return [
            aiogpu.from_thread(add_one.remote, 1).result(timeout=60),
            aiogpu.from_thread(aiogpu.available_resources)["CPU"],
            list(aiogpu.from_thread(add_one.map, [1, 2])),
            aiogpu.from_thread(aiogpu.put, 4).result(timeout=60),
            sync.get(double.remote(3)),
            sync.is_initialized(),
        ]

    async with aiogpu.init(num_cpus=1):
        assert await asyncio.to_thread(work) == [2, 1.0, [2, 3], 4, 6, True]
        handle = await asyncio.to_thread(double.remote, 5)
        assert await asyncio.wrap_future(handle) == 10
        for call in (
            lambda: aiogpu.from_thread(add_one.remote, 1),
            lambda: double.remote(1),
            sync.status,
        ):
            with pytest.raises(errors.MisuseError, match="would block the event loop"):
                call()


# Whole programs

BEGIN = """
    import os, sys, threading, aiogpu, aiogpu.sync as ray

    @ray.remote
    def double(x):
        return 2 * x

    @ray.remote
    def wait_long():
        threading.Event().wait()
"""


def test_a_program_need_not_open_or_close_a_node() -> None:
    assert program.run(f"{BEGIN}\n    print(ray.get(double.remote(4)))") == "8\n"


def test_a_program_passes_an_actor_on_at_once() -> None:
    source = f"""{BEGIN}
    @ray.remote
    class Counter:
        def add(self):
            return 1

    @ray.remote
    def use(counter):
        return ray.get(counter.add.remote())

    print(ray.get(use.remote(Counter.remote())))
    """
    assert program.run(source) == "1\n"


def test_a_call_before_its_node_is_open_is_refused_by_its_result() -> None:
    source = f"""{BEGIN}
    greedy = double.options(num_gpus=99)
    handle = greedy.remote(1)
    for refused in (lambda: ray.get(handle), lambda: greedy.remote(2).result()):
        try:
            refused()
        except ray.InfeasibleError:
            print("refused")
    """
    assert program.run(source) == "refused\nrefused\n"


def test_a_failed_init_leaves_no_thread() -> None:
    source = f"""{BEGIN}
    for options in ({{"num_cpuz": 1}}, {{"preload": ["no_such_module"]}}):
        try:
            ray.init(**options)
        except aiogpu.AiogpuError as error:
            print(type(error).__name__, threading.active_count(), ray.is_initialized())
    """
    assert program.run(source) == "OptionError 1 False\nPreloadError 1 False\n"


def test_a_fork_has_no_node_unless_it_opens_one() -> None:
    source = f"""{BEGIN}
    with ray.init(num_cpus=1):
        print(ray.get(double.remote(1)), flush=True)
        child = os.fork()
        if not child:
            try:
                double.remote(2)
            except aiogpu.errors.NodeError as error:
                print("is a fork of it" in str(error), flush=True)
            with ray.init(num_cpus=1):
                print(ray.get(double.remote(2)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(ray.get(double.remote(3)))
    """
    assert program.run(source) == "2\nTrue\n4\n6\n"


@pytest.mark.parametrize("opening", ["with ray.init(num_cpus=1):", "if ray.init():"])
def test_ctrl_c_ends_a_program_and_its_tasks(opening: str) -> None:
    source = f"""{BEGIN}
    {opening}
        handle = wait_long.remote()
        while handle.why().state != "running":
            pass
        print(os.getpid(), flush=True)
        handle.result()
    """
    running = program.start(source)
    assert running.stdout is not None
    assert int(running.stdout.readline()) == running.pid
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert running.returncode == -signal.SIGINT, "as without aiogpu"
    _, alive = psutil.wait_procs(children, timeout=60)
    assert children
    assert not alive


# Calls of `joblib.Parallel` as tasks


def test_joblib_runs_calls_as_tasks_in_order(no_leaks: None) -> None:
    joblib = pytest.importorskip("joblib", reason="joblib is not installed")
    importlib.import_module("aiogpu.joblib")
    call: Any = joblib.delayed
    with sync.init(num_cpus=2), joblib.parallel_config("aiogpu", num_cpus=1):
        assert joblib.effective_n_jobs(-1) == 2
        results = joblib.Parallel(n_jobs=-1)(call(where)(i) for i in range(50))
        assert [x for x, _ in results] == [*range(50)]
        assert os.getpid() not in {pid for _, pid in results}
        with pytest.raises(KeyError, match="3"):
            joblib.Parallel(n_jobs=2)(call(fail_at)(i, 3) for i in range(10))
        items = joblib.Parallel(n_jobs=2, return_as="generator")(
            call(fail_at)(i, -1) for i in range(5)
        )
        assert list(items) == [*range(5)]
        with pytest.raises(aiogpu.OptionError, match="n_jobs=0"):
            joblib.Parallel(n_jobs=0)([])
    with (
        pytest.raises(aiogpu.OptionError, match="num_gpu"),
        joblib.parallel_config("aiogpu", num_gpu=1),
    ):
        pass


def threads_of_libraries(_number: int) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


def nested(number: int) -> tuple[int, list[int]]:
    import joblib

    call: Any = joblib.delayed
    parallel = joblib.Parallel(n_jobs=2, backend="aiogpu")
    return os.getpid(), parallel(call(abs)(-i) for i in range(number))


def test_joblib_settings_hold_inside_and_after_calls(no_leaks: None) -> None:
    joblib = pytest.importorskip("joblib", reason="joblib is not installed")
    importlib.import_module("aiogpu.joblib")
    call: Any = joblib.delayed
    with sync.init(num_cpus=2):
        with joblib.parallel_config("aiogpu", inner_max_num_threads=3):
            calls = (call(threads_of_libraries)(i) for i in range(2))
            assert joblib.Parallel(n_jobs=2)(calls) == ["3", "3"]
        with joblib.parallel_config("aiogpu"):
            (first, a), (_, b) = joblib.Parallel(n_jobs=2)(
                call(nested)(i) for i in (2, 3)
            )
            assert (a, b) == ([0, 1], [0, 1, 2])
            assert first != os.getpid()
            backend, _ = joblib.parallel.get_active_backend()
            joblib.Parallel(n_jobs=2)(call(abs)(i) for i in range(3000))
            # Else a few slow calls would follow in one batch, one after the other.
            assert backend.compute_batch_size() == 1
