"""Tasks on every engine. [Bn] cites the contract."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.types import Node
from tests.contract import tasks
from tests.contract.actor_classes import NamedAsync, NamedSerial, NamedThreaded, name
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1, num_gpus=1),
]


async def test_a_task_runs(address: str) -> None:
    """"""
    async with aiogpu.init(address=address, num_cpus=1) as session:
        assert session.is_open
        assert await tasks.add.remote(1, b=2) == 3
        assert await tasks.add.remote(1) == 2
        assert await tasks.double.remote(4) == 8
        is_elsewhere = await tasks.pid.remote() != os.getpid()
        assert is_elsewhere == (address != "inline")
    assert not session.is_open
    session = await aiogpu.init(address=address, num_cpus=1)  # it may be opened again
    assert await tasks.add.remote(1) == 2
    await aiogpu.shutdown()
    await aiogpu.shutdown()
    await session.shutdown()


async def test_a_second_init_raises_or_joins(address: str, node: Node) -> None:
    with pytest.raises(errors.NodeRunningError, match="ignore_reinit_error"):
        await aiogpu.init(address=address)
    async with aiogpu.init(address=address, ignore_reinit_error=True) as second:
        assert second is node
    assert await tasks.add.remote(1) == 2, "the inner block does not end the node"


@pytest.mark.needs("waiting for resources")
@pytest.mark.aiogpu(num_cpus=4, num_gpus=2, memory="4GiB", resources={"license": 2})
async def test_resources_tell_what_is_free(node: Node, gate: Gate) -> None:
    """"""
    total = {"CPU": 4.0, "GPU": 2.0, "license": 2.0, "memory": 2.0**32}
    assert await aiogpu.cluster_resources() == total
    request: Any = {"num_gpus": 0.25, "memory": "1GiB", "resources": {"license": 2}}
    handle = tasks.gated_coroutine.options(**request).remote(gate.path, "a")
    await gate.entered("a")
    free = {"CPU": 3.0, "GPU": 1.75, "license": 0.0, "memory": 3 * 2.0**30}
    assert await aiogpu.available_resources() == free
    gate.release("a")
    await handle


@pytest.mark.needs("at once", "holders")
@pytest.mark.aiogpu(num_cpus=8, num_gpus=2)
async def test_status_names_holders_and_waiting_tasks(node: Node, gate: Gate) -> None:
    a = tasks.gated.options(num_gpus=0.7, name="first").remote(gate.path, "a")
    b = tasks.gated.options(num_gpus=0.7).remote(gate.path, "b")
    c = tasks.gated.options(num_gpus=0.5, name="third").remote(gate.path, "c")
    await gate.entered("a", "b")
    status = await aiogpu.status()
    first, second = status.devices
    assert (first.kind, first.id, first.free) == ("GPU", 0, pytest.approx(0.3))
    (holder,) = first.holders
    assert (holder.share, holder.task) == (0.7, "first")
    assert holder.pid == gate.pids["a"]
    assert len(second.holders) == 1
    (waiting,) = status.waiting
    assert (waiting.name, waiting.state) == ("third", "waiting")
    assert waiting.request == {"CPU": 1.0, "GPU": 0.5}
    assert waiting.reason == "waits for GPU 0.5 (free by device: 0: 0.3, 1: 0.3)"
    gate.release("a", "b")
    await gate.entered("c")
    gate.release("c")
    await asyncio.gather(a, b, c)


async def test_functions_defined_in_a_test_are_sent_by_value(node: Node) -> None:
    base = 40

    @aiogpu.remote
    def closure(x: int) -> int:
        return base + x

    def recursive(n: int) -> int:
        return 1 if n == 0 else n * recursive(n - 1)

    assert await closure.remote(2) == 42
    assert await aiogpu.remote(lambda: "lambda").remote() == "lambda"
    assert await aiogpu.remote(recursive).remote(5) == 120
    assert await aiogpu.remote(math.sqrt).remote(4.0) == 2.0

    @aiogpu.remote
    def redefined() -> int:
        return 1

    first = redefined

    @aiogpu.remote
    def redefined() -> int:  # type: ignore[no-redef]
        return 2

    assert [await first.remote(), await redefined.remote()] == [1, 2]


async def test_a_module_function_keeps_its_module(node: Node) -> None:
    """Workers import the function by name: they share its module's state."""
    module = "tests.contract.tasks"
    assert await tasks.modules.remote(module) == {module: True}


async def test_values_of_all_kinds_are_passed(node: Node) -> None:
    values: list[Any] = [
        None, True, 1, 2**100, 1.5, "text \udc80", b"bytes", [1, [2]], {"a": (1, {2})},
        range(3), Path("x"), ValueError("as a value"), bytearray(b"y" * 300_000),
    ]  # fmt: skip
    for value in values:
        back = await tasks.echo.remote(value)
        assert repr(back) == repr(value)


async def test_options_leave_the_original_alone(node: Node) -> None:
    named = tasks.where.options(name="other", num_gpus=0.5)
    assert (await named.remote())["name"] == "other"
    assert (await tasks.where.remote())["resources"] == {"CPU": 1.0}


@pytest.mark.aiogpu(num_cpus=2)
async def test_a_handle_is_a_future(node: Node) -> None:
    handle = tasks.add.remote(1)
    assert asyncio.isfuture(handle)
    assert not handle.done()
    with pytest.raises(errors.MisuseError, match="await"):
        bool(handle)
    assert [await handle, await handle, handle.result()] == [2, 2, 2]
    assert handle.exception() is None
    assert await asyncio.gather(*map(tasks.add.remote, range(5))) == [1, 2, 3, 4, 5]
    done, pending = await asyncio.wait([*map(tasks.add.remote, range(3))])
    assert ({h.result() for h in done}, pending) == ({1, 2, 3}, set())
    ended = asyncio.as_completed([*map(tasks.add.remote, range(3))])
    assert {await h for h in ended} == {1, 2, 3}
    assert await asyncio.wait_for(tasks.add.remote(1), 60) == 2
    assert await asyncio.shield(tasks.add.remote(1)) == 2
    async with asyncio.timeout(60):
        assert await tasks.add.remote(1) == 2
    async with asyncio.TaskGroup() as group:
        task = group.create_task(tasks.add.remote(5).coro())
    assert task.result() == 6


async def test_a_task_knows_its_gpus(address: str) -> None:
    """"""
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=3):
        facts = await tasks.where.options(num_gpus=2).remote()
        assert facts["ids"] == [0, 1]
        assert facts["visible"] == "0,1"
        assert facts["order"] == "PCI_BUS_ID"
        assert facts["resources"] == {"CPU": 1.0, "GPU": 2.0}
        assert facts["accelerators"]["GPU"] == ["0", "1"]
        assert not any(facts["accelerators"][kind] for kind in ("TPU", "neuron_cores"))
        assert facts["task"] > 0
        assert facts["worker"] > 0
        assert facts["node"]
    assert aiogpu.get_gpu_ids() == []
    assert aiogpu.get_runtime_context().task_id == 0


async def test_a_switch_leaves_the_device_variables_alone(node: Node) -> None:
    """Without the switch, a task sees its GPU, or none if it has none."""
    noset = "AIOGPU_NOSET_CUDA_VISIBLE_DEVICES"
    untouched = os.environ.get("CUDA_VISIBLE_DEVICES")
    facts = await tasks.where.remote()
    assert (facts["ids"], facts["visible"]) == ([], "")
    for gpus, assigned in ((0, ""), (1, "0")):
        for switch, visible in (("1", untouched), ("0", assigned)):
            variables = {"env_vars": {noset: switch}}
            task = tasks.where.options(num_gpus=gpus, runtime_env=variables)
            facts = await task.remote()
            assert facts["visible"] == visible
            assert facts["ids"] == [0] * gpus


@pytest.mark.needs("at once")
@pytest.mark.aiogpu(num_cpus=8, num_gpus=3)
async def test_fractions_pack_on_the_fullest_device(node: Node, gate: Gate) -> None:
    """Three halves on three GPUs run on 0, 0, 1."""
    half = tasks.where_gated.options(num_gpus=0.5)
    handles = []
    for letter in "abc":
        handles.append(half.remote(gate.path, letter))
        await gate.entered(letter)
    gate.release(*"abc")
    assert await asyncio.gather(*handles) == [[0], [0], [1]]


@pytest.mark.needs("at once")
@pytest.mark.aiogpu(num_cpus=5, num_gpus=1)
async def test_four_quarters_share_one_gpu_at_once(node: Node, gate: Gate) -> None:
    quarter = tasks.where_gated.options(num_gpus=0.25)
    handles = [quarter.remote(gate.path, name) for name in "abcde"]
    await gate.entered(*"abcd")
    assert gate.inside == set("abcd")
    gate.release("a")
    await gate.entered("e")
    gate.release(*"bcde")
    assert await asyncio.gather(*handles) == [[0]] * 5


async def test_an_infeasible_task_fails_at_once(node: Node) -> None:
    with pytest.raises(aiogpu.InfeasibleError, match="GPU 2 of 1") as caught:
        tasks.add.options(num_gpus=2).remote(1)
    assert "{CPU: 1, GPU: 2}" in str(caught.value)
    requests: dict[str, dict[str, Any]] = {
        "CPU 2 of 1": {"num_cpus": 2},
        "license": {"resources": {"license": 1}},
        "H100": {"num_gpus": 1, "accelerator_type": "H100"},
    }
    for message, request in requests.items():
        with pytest.raises(aiogpu.InfeasibleError, match=message):
            tasks.add.options(**request).remote(1)
    assert await tasks.add.remote(1) == 2


@pytest.mark.needs("processes")
async def test_an_isolated_task_has_its_own_process(node: Node) -> None:
    """The share is free only when the process has ended."""
    isolated = tasks.pid.options(num_gpus=1)
    pids = {await isolated.remote() for _ in range(3)}
    assert len(pids) == 3
    await tasks.add.options(num_gpus=1).remote(1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    reused = tasks.pid.options(num_gpus=0.5, max_calls=0)
    assert len({await reused.remote() for _ in range(3)}) == 1
    twice = tasks.pid.options(max_calls=2)
    a, b, c = [await twice.remote() for _ in range(3)]
    assert a == b != c


async def test_a_task_cannot_spoil_the_next_tasks_devices(node: Node) -> None:
    """"""
    for gpus, assigned in ((0, ""), (1, "0")):
        task = tasks.meddle.options(num_gpus=gpus, max_calls=0)
        for value in ("7", None, "0,1,2,3", None):
            assert await task.remote("CUDA_VISIBLE_DEVICES", value) == assigned


async def test_errors_keep_their_type_and_show_where(node: Node) -> None:
    with pytest.raises(KeyError, match="boom") as caught:
        await tasks.fail.remote(KeyError, "boom")
    assert not isinstance(caught.value, aiogpu.AiogpuError)
    trace = str(caught.value.__cause__)
    assert "raise kind(*args)" in trace
    assert "aiogpu/worker" not in trace
    assert await tasks.add.remote(1) == 2


async def test_errors_with_their_own_constructor_keep_their_type(node: Node) -> None:
    with pytest.raises(tasks.StatusError) as caught:
        await tasks.fail_with_status.remote()
    assert (str(caught.value), caught.value.code) == ("not found: 404", 404)
    why = r"StatusError: not found: 404 \(it cannot be pickled: error\.holds \(a lock"
    with pytest.raises(aiogpu.TaskError, match=why):
        await tasks.fail_with_status.remote(holds_lock=True)


async def test_control_flow_errors_become_task_errors(address: str, node: Node) -> None:
    kinds = [StopIteration, SystemExit, GeneratorExit, asyncio.CancelledError]
    if address != "ray":  # where it counts as a cancel of the task
        kinds.append(KeyboardInterrupt)
    for kind in kinds:
        with pytest.raises(aiogpu.TaskError, match=kind.__name__) as caught:
            await tasks.fail.remote(kind)
        assert kind.__name__ in caught.value.type_name
        assert "raise kind(*args)" in caught.value.remote_traceback
    assert await tasks.add.remote(1) == 2


class Truthless(Exception):
    """Has no truth value."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class Deceiver(type(Exception)):  # type: ignore[misc]
    """A class of exceptions with which `isinstance` raises."""

    def __instancecheck__(cls, _instance: object) -> bool:
        raise RuntimeError("do not ask")


async def test_errors_whose_methods_raise_are_passed() -> None:
    odd = Deceiver("Odd", (Exception,), {})
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(Truthless):
            await tasks.fail.options(retry_exceptions=[OSError]).remote(Truthless)
        with pytest.raises(KeyError):
            await tasks.fail.options(retry_exceptions=[odd]).remote(KeyError)


async def test_an_error_names_what_cannot_be_pickled(node: Node) -> None:
    """"""
    lock = threading.Lock()
    with pytest.raises(errors.SerializationError, match=r"args\[0\]\['db'\]\[1\]"):
        tasks.echo.remote({"db": [1, lock]})

    @aiogpu.remote
    def uses_lock() -> object:
        return lock

    place = r"uses_lock\.__closure__\.lock \(a lock\)"
    with pytest.raises(errors.SerializationError, match=place):
        uses_lock.remote()
    with pytest.raises(errors.SerializationError, match=r"result\['lock'\]\[0\]"):
        await tasks.unpicklable.remote()
    with pytest.raises(aiogpu.TaskError, match="AwkwardError: 1"):
        await tasks.fail_awkwardly.remote()
    assert await tasks.add.remote(1) == 2


async def test_an_error_tells_what_cannot_be_unpickled(node: Node) -> None:
    unreadable = errors.DeserializationError
    for expression in ("1/0", "__import__('sys').exit(3)"):
        handle = tasks.unreadable.remote(expression)
        with pytest.raises(unreadable, match="unpickled"):
            await handle
        lost = tasks.unreadable.remote(expression)
        (error,) = await asyncio.gather(lost, return_exceptions=True)
        for gathered in (handle.exception(), error):
            assert isinstance(gathered, unreadable)
        with pytest.raises(unreadable, match="cannot load"):
            await tasks.echo.remote(tasks.UnreadableResult(expression))
        assert await tasks.add.remote(1) == 2


@pytest.mark.needs("modules")
async def test_a_failed_import_in_a_worker_raises(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "only_in_driver.py"
    module.write_text("import aiogpu\n@aiogpu.remote\ndef f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_in_driver

    async with aiogpu.init(address=address, num_cpus=1):
        assert await only_in_driver.f.remote() == 1
        module.unlink()
        fresh = only_in_driver.f.options(max_calls=1)
        with pytest.raises(errors.DeserializationError, match="only_in_driver"):
            await fresh.remote()
        assert await tasks.add.remote(1) == 2


@pytest.mark.needs("processes")
@pytest.mark.aiogpu(num_cpus=2, log_to_driver=False)
async def test_a_worker_that_dies_fails_its_task_alone(node: Node, gate: Gate) -> None:
    """The error tells pid, exit code or signal, and last output."""
    other = tasks.gated.remote(gate.path, "other")
    await gate.entered("other")
    with pytest.raises(aiogpu.WorkerDiedError, match="exited with code 7") as exited:
        await tasks.exit_at_once.remote(7)
    assert (exited.value.exitcode, exited.value.signal) == (7, None)
    assert exited.value.last_output == ("last words",)
    assert exited.value.pid > 0
    with pytest.raises(aiogpu.WorkerDiedError, match="SIGSEGV") as killed:
        await tasks.kill_self.remote(int(signal.SIGSEGV))
    assert (killed.value.exitcode, killed.value.signal) == (None, 11)
    with pytest.raises(aiogpu.WorkerDiedError):
        await tasks.close_all_descriptors.remote()
    gate.release("other")
    assert await other == "other"


@pytest.mark.needs("waiting for resources")
async def test_timeout_stops_a_task_in_any_state(node: Node, gate: Gate) -> None:
    seconds = 0.2
    while "running" not in gate.pids:
        waits = tasks.gated_coroutine.options(timeout=seconds, name="waits")
        running = waits.remote(gate.path, "running")
        waiting = tasks.add.options(timeout=seconds / 2).remote(1)
        with pytest.raises(TimeoutError, match=rf"{seconds / 2:g} s"):
            await waiting
        with pytest.raises(aiogpu.TaskTimeoutError, match=rf"waits .* {seconds:g} s"):
            await running
        seconds *= 2  # the worker may have taken longer to start
    await gate.entered("running-cancelled")
    assert await tasks.add.options(timeout=60).remote(1) == 2


@pytest.mark.needs("interrupts")
async def test_timeout_stops_busy_code(node: Node, gate: Gate) -> None:
    seconds = 0.2
    while "running" not in gate.pids:
        running = tasks.spin.options(timeout=seconds).remote(gate.path, "running")
        with pytest.raises(aiogpu.TaskTimeoutError, match=rf"spin .* {seconds:g} s"):
            await running
        seconds *= 2  # the worker may have taken longer to start
    await gate.entered("running-interrupted")
    assert await tasks.add.options(timeout=60).remote(1) == 2


@pytest.mark.needs("waiting for resources")
async def test_a_closed_node_fails_its_tasks(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        running = tasks.gated_coroutine.remote(gate.path, "a")
        waiting = tasks.add.remote(1)
        await gate.entered("a")
    for handle in (running, waiting):
        with pytest.raises(errors.NodeClosedError, match="shut down"):
            await handle
    await gate.entered("a-cancelled")


@pytest.mark.needs("processes")
async def test_a_closed_node_leaves_no_process(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
    with pytest.raises(errors.NodeClosedError, match="shut down"):
        await running
    assert not os.path.exists(f"/proc/{gate.pids['a']}")


@pytest.mark.needs("processes")
async def test_a_fork_of_a_worker_gives_no_result(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = await tasks.pid.remote()
    for _ in range(5):
        assert await tasks.fork_and_return.remote() == worker
        assert capsys.readouterr().out.endswith(") from the child\n")
        assert await tasks.fork_and_exit.remote(7) == (worker, 7)
    assert await tasks.pid.remote() == worker


async def test_asyncio_tasks_end_with_their_task(node: Node, gate: Gate) -> None:
    await tasks.leave_asyncio_task.remote(gate.path)
    await gate.entered("rest-ended")


@pytest.mark.aiogpu(num_cpus=2, num_gpus=2)
async def test_a_thousand_tasks_run(node: Node) -> None:
    reused = tasks.add.options(num_gpus=0.25, max_calls=0)
    results = await asyncio.gather(*map(reused.remote, range(1000)))
    assert results == list(range(1, 1001))


# Names that code in a worker sees of its task or call


@pytest.mark.parametrize(
    "kind",
    [
        NamedSerial,
        pytest.param(NamedThreaded, marks=pytest.mark.needs("threads")),
        NamedAsync,
    ],
)
async def test_calls_are_named_after_actor_and_method(node: Node, kind: Any) -> None:
    own = kind.__name__
    actor = await kind.remote()
    assert await actor.called.remote() == f"{own}.called"
    assert await actor.made.remote() == own
    assert await anext(aiter(actor.called.map([1], chunk=1))) == f"{own}.called"
    assert await aiogpu.remote(name).remote() == "name"
    if kind is NamedThreaded:
        assert await actor.beside.remote() == f"{own}.beside"
        other = actor.called.options(concurrency_group="side")
        assert await other.remote() == f"{own}.called"


async def test_interleaved_calls_have_their_own_names(node: Node) -> None:
    actor = await NamedAsync.remote()
    names, other = await asyncio.gather(actor.softly.remote(), actor.second.remote())
    assert names == ["NamedSoftly.softly"] * 3
    assert other == "NamedSoftly.second"


async def test_the_status_names_the_machine(node: Node) -> None:
    [machine] = (await aiogpu.status()).nodes
    assert (machine.is_alive, machine.host) == (True, os.uname().nodename)
    assert machine.total["CPU"] == 1
    assert machine.id == await tasks.node_id.remote()
