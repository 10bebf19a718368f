"""What every engine must do: one suite over all of them. [Bn] cites the contract."""

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
from tests.contract import tasks
from tests.contract.actor_classes import NamedAsync, NamedSerial, NamedThreaded, name
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


async def test_a_task_runs(address: str) -> None:
    """[B1] [B6] [B9]"""
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


async def test_init_twice_is_an_error_unless_it_is_meant(address: str) -> None:
    """[B6]"""
    async with aiogpu.init(address=address, num_cpus=1) as first:
        with pytest.raises(aiogpu.errors.NodeRunningError, match="ignore_reinit_error"):
            await aiogpu.init(address=address)
        async with aiogpu.init(address=address, ignore_reinit_error=True) as second:
            assert second is first
        assert await tasks.add.remote(1) == 2, "the guest must not end the node"


async def test_resources_are_told(address: str, gate: Gate) -> None:
    """[B3] [B8]"""
    async with aiogpu.init(
        address=address,
        num_cpus=4,
        num_gpus=2,
        memory="4GiB",
        resources={"license": 2},
    ):
        total = {"CPU": 4.0, "GPU": 2.0, "license": 2.0, "memory": 2.0**32}
        assert await aiogpu.cluster_resources() == total
        task = tasks.gated_coroutine.options(
            num_gpus=0.25, memory="1GiB", resources={"license": 2}
        )
        handle = task.remote(gate.path, "a")
        await gate.entered("a")
        left = {"CPU": 3.0, "GPU": 1.75, "license": 0.0, "memory": 3 * 2.0**30}
        assert await aiogpu.available_resources() == left
        gate.release("a")
        await handle


@pytest.mark.needs("at once", "holders")
async def test_status_names_holders_and_reasons(address: str, gate: Gate) -> None:
    """[B8]"""
    async with aiogpu.init(address=address, num_cpus=8, num_gpus=2):
        a = tasks.gated.options(num_gpus=0.7, name="first").remote(gate.path, "a")
        b = tasks.gated.options(num_gpus=0.7).remote(gate.path, "b")
        c = tasks.gated.options(num_gpus=0.5, name="third").remote(gate.path, "c")
        await gate.entered("a", "b")
        status = await aiogpu.status()
        zero, one = status.devices
        assert (zero.kind, zero.id, zero.free) == ("GPU", 0, pytest.approx(0.3))
        (holder,) = zero.holders
        assert (holder.share, holder.task) == (0.7, "first")
        assert holder.pid == gate.pids["a"]
        assert len(one.holders) == 1
        (waiting,) = status.waiting
        assert (waiting.name, waiting.state) == ("third", "waiting")
        assert waiting.request == {"CPU": 1.0, "GPU": 0.5}
        assert waiting.reason == ("waits for GPU 0.5 (free by device: 0: 0.3, 1: 0.3)")
        gate.release("a", "b")
        await gate.entered("c")
        gate.release("c")
        await asyncio.gather(a, b, c)


async def test_what_is_defined_here_travels(address: str) -> None:
    """[B11]"""
    base = 40

    @aiogpu.remote
    def closure(x: int) -> int:
        return base + x

    def recursive(n: int) -> int:
        return 1 if n == 0 else n * recursive(n - 1)

    async with aiogpu.init(address=address, num_cpus=1):
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


async def test_a_module_function_keeps_its_module(address: str) -> None:
    """[B11] It is imported by name, so state and locks of its module are shared."""
    async with aiogpu.init(address=address, num_cpus=1):
        loaded = await tasks.modules.remote("tests.contract.tasks")
        assert loaded == {"tests.contract.tasks": True}


async def test_arguments_and_results_of_all_kinds(address: str) -> None:
    values: list[Any] = [
        None, True, 1, 2**100, 1.5, "text \udc80", b"bytes", [1, [2]], {"a": (1, {2})},
        range(3), Path("x"), ValueError("as a value"), bytearray(b"y" * 300_000),
    ]  # fmt: skip
    async with aiogpu.init(address=address, num_cpus=1):
        for value in values:
            back = await tasks.echo.remote(value)
            assert repr(back) == repr(value)


async def test_options_leave_the_original_alone(address: str) -> None:
    """[B9]"""
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        named = tasks.where.options(name="other", num_gpus=0.5)
        assert (await named.remote())["name"] == "other"
        assert (await tasks.where.remote())["resources"] == {"CPU": 1.0}


async def test_a_handle_is_a_future(address: str) -> None:
    """[B14]"""
    async with aiogpu.init(address=address, num_cpus=2):
        handle = tasks.add.remote(1)
        assert asyncio.isfuture(handle)
        assert not handle.done()
        with pytest.raises(aiogpu.errors.MisuseError, match="await"):
            bool(handle)
        assert [await handle, await handle, handle.result()] == [2, 2, 2]
        assert handle.exception() is None
        assert await asyncio.gather(*map(tasks.add.remote, range(5))) == [1, 2, 3, 4, 5]
        done, pending = await asyncio.wait([tasks.add.remote(i) for i in range(3)])
        assert ({h.result() for h in done}, pending) == ({1, 2, 3}, set())
        firsts = [tasks.add.remote(i) for i in range(3)]
        assert {await h for h in asyncio.as_completed(firsts)} == {1, 2, 3}
        assert await asyncio.wait_for(tasks.add.remote(1), 60) == 2
        assert await asyncio.shield(tasks.add.remote(1)) == 2
        async with asyncio.timeout(60):
            assert await tasks.add.remote(1) == 2
        async with asyncio.TaskGroup() as group:
            task = group.create_task(tasks.add.remote(5).coro())
        assert task.result() == 6


async def test_gpu_ids_and_environment(address: str) -> None:
    """[B19] [B20]"""
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=3) as _:
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


async def test_a_switch_leaves_the_variables_of_devices_alone(address: str) -> None:
    """[B25] Only if it is on, with a GPU and without, which is to see none."""
    noset = "AIOGPU_NOSET_CUDA_VISIBLE_DEVICES"
    untouched = os.environ.get("CUDA_VISIBLE_DEVICES")
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        facts = await tasks.where.remote()
        assert (facts["ids"], facts["visible"]) == ([], "")
        for gpus, assigned in ((0, ""), (1, "0")):
            for switch, visible in (("1", untouched), ("0", assigned)):
                task = tasks.where.options(
                    num_gpus=gpus, runtime_env={"env_vars": {noset: switch}}
                )
                facts = await task.remote()
                assert facts["visible"] == visible
                assert facts["ids"] == [0] * gpus


@pytest.mark.needs("at once")
async def test_fractions_pack_on_the_fullest_device(address: str, gate: Gate) -> None:
    """[B21] [B22] Three halves on three GPUs sit on 0, 0, 1."""
    async with aiogpu.init(address=address, num_cpus=8, num_gpus=3):
        half = tasks.where_gated.options(num_gpus=0.5)
        handles = []
        for name in "abc":
            handles.append(half.remote(gate.path, name))
            await gate.entered(name)
        gate.release(*"abc")
        assert await asyncio.gather(*handles) == [[0], [0], [1]]


@pytest.mark.needs("at once")
async def test_four_quarters_share_one_gpu_at_once(address: str, gate: Gate) -> None:
    """[B21]"""
    async with aiogpu.init(address=address, num_cpus=5, num_gpus=1):
        quarter = tasks.where_gated.options(num_gpus=0.25)
        handles = [quarter.remote(gate.path, name) for name in "abcde"]
        await gate.entered(*"abcd")
        assert gate.inside == set("abcd")
        gate.release("a")
        await gate.entered("e")
        gate.release(*"bcde")
        assert await asyncio.gather(*handles) == [[0]] * 5


async def test_what_can_never_run_fails_at_once(address: str) -> None:
    """[B23]"""
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        with pytest.raises(aiogpu.InfeasibleError, match="GPU 2 of 1") as caught:
            tasks.add.options(num_gpus=2).remote(1)
        assert "{CPU: 1, GPU: 2}" in str(caught.value)
        with pytest.raises(aiogpu.InfeasibleError, match="CPU 2 of 1"):
            tasks.add.options(num_cpus=2).remote(1)
        with pytest.raises(aiogpu.InfeasibleError, match="license"):
            tasks.add.options(resources={"license": 1}).remote(1)
        with pytest.raises(aiogpu.InfeasibleError, match="H100"):
            tasks.add.options(num_gpus=1, accelerator_type="H100").remote(1)
        assert await tasks.add.remote(1) == 2


@pytest.mark.needs("processes")
async def test_an_isolated_task_has_a_process_of_its_own(address: str) -> None:
    """[B26] Its share is free only when that process has ended."""
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        isolated = tasks.pid.options(num_gpus=1)
        pids = [await isolated.remote() for _ in range(3)]
        assert len(set(pids)) == 3
        await tasks.add.options(num_gpus=1).remote(1)
        for pid in pids:
            assert not os.path.exists(f"/proc/{pid}")
        reused = tasks.pid.options(num_gpus=0.5, max_calls=0)
        assert len({await reused.remote() for _ in range(3)}) == 1
        twice = tasks.pid.options(max_calls=2)
        a, b, c = [await twice.remote() for _ in range(3)]
        assert a == b != c


async def test_a_task_cannot_spoil_the_assignment_of_the_next(address: str) -> None:
    """[B19] [B25]"""
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        name = "CUDA_VISIBLE_DEVICES"
        for task, assigned in (
            (tasks.meddle, ""),
            (tasks.meddle.options(num_gpus=1, max_calls=0), "0"),
        ):
            for value in ("7", None, "0,1,2,3", None):
                assert await task.remote(name, value) == assigned


async def test_errors_keep_their_type_and_show_where(address: str) -> None:
    """[B37]"""
    async with aiogpu.init(address=address, num_cpus=1):
        with pytest.raises(KeyError, match="boom") as caught:
            await tasks.fail.remote(KeyError, "boom")
        assert not isinstance(caught.value, aiogpu.AiogpuError)
        trace = str(caught.value.__cause__)
        assert "raise kind(*args)" in trace
        assert "aiogpu/worker" not in trace
        assert await tasks.add.remote(1) == 2


async def test_errors_with_a_constructor_of_their_own_keep_their_type(
    address: str,
) -> None:
    """[B37]"""
    async with aiogpu.init(address=address, num_cpus=1):
        with pytest.raises(tasks.StatusError) as caught:
            await tasks.fail_with_status.remote()
        assert (str(caught.value), caught.value.code) == ("not found: 404", 404)
        why = (
            r"StatusError: not found: 404 \(it cannot be pickled: error\.holds \(a lock"
        )
        with pytest.raises(aiogpu.TaskError, match=why):
            await tasks.fail_with_status.remote(holds_lock=True)


async def test_errors_that_must_not_travel(address: str) -> None:
    """[B37]"""
    kinds = (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit)
    async with aiogpu.init(address=address, num_cpus=1):
        for kind in (*kinds, asyncio.CancelledError):
            with pytest.raises(aiogpu.TaskError, match=kind.__name__) as caught:
                await tasks.fail.remote(kind)
            assert kind.__name__ in caught.value.type_name
            assert "raise kind(*args)" in caught.value.remote_traceback
        assert await tasks.add.remote(1) == 2


class Truthless(Exception):
    """Raises when asked for its truth."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class Deceiver(type(Exception)):  # type: ignore[misc]
    """A class of exceptions that cannot be asked for its instances."""

    def __instancecheck__(cls, _instance: object) -> bool:
        raise RuntimeError("do not ask")


async def test_errors_and_classes_of_errors_that_raise_themselves() -> None:
    odd = Deceiver("Odd", (Exception,), {})
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(Truthless):
            await tasks.fail.options(retry_exceptions=[OSError]).remote(Truthless)
        with pytest.raises(KeyError):
            await tasks.fail.options(retry_exceptions=[odd]).remote(KeyError)


async def test_what_cannot_be_pickled(address: str) -> None:
    """[B37] [B39]"""
    lock = threading.Lock()
    async with aiogpu.init(address=address, num_cpus=1):
        with pytest.raises(
            aiogpu.errors.SerializationError, match=r"args\[0\]\['db'\]\[1\]"
        ):
            tasks.echo.remote({"db": [1, lock]})

        @aiogpu.remote
        def uses_lock() -> object:
            return lock

        with pytest.raises(
            aiogpu.errors.SerializationError,
            match=r"uses_lock\.__closure__\.lock \(a lock\)",
        ):
            uses_lock.remote()
        with pytest.raises(
            aiogpu.errors.SerializationError, match=r"result\['lock'\]\[0\]"
        ):
            await tasks.unpicklable.remote()
        with pytest.raises(aiogpu.TaskError, match="AwkwardError: 1"):
            await tasks.fail_awkwardly.remote()
        assert await tasks.add.remote(1) == 2


async def test_what_cannot_be_unpickled(address: str) -> None:
    unreadable = aiogpu.errors.DeserializationError
    async with aiogpu.init(address=address, num_cpus=1):
        for expression in ("1/0", "__import__('sys').exit(3)"):
            handle = tasks.unreadable.remote(expression)
            with pytest.raises(unreadable, match="unpickled"):
                await handle
            assert isinstance(handle.exception(), unreadable)
            lost = tasks.unreadable.remote(expression)
            (only,) = await asyncio.gather(lost, return_exceptions=True)
            assert isinstance(only, unreadable)
            with pytest.raises(unreadable, match="cannot load"):
                await tasks.echo.remote(tasks.UnreadableResult(expression))
            assert await tasks.add.remote(1) == 2


@pytest.mark.needs("modules")
async def test_a_function_whose_import_fails_in_the_worker(
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
        with pytest.raises(aiogpu.errors.DeserializationError, match="only_in_driver"):
            await fresh.remote()
        assert await tasks.add.remote(1) == 2


@pytest.mark.needs("processes")
async def test_a_worker_that_dies_fails_its_task_alone(
    address: str, gate: Gate
) -> None:
    """[B38] in its simple form: pid, code or signal, last output."""
    async with aiogpu.init(address=address, num_cpus=2, log_to_driver=False):
        other = tasks.gated.remote(gate.path, "other")
        await gate.entered("other")
        with pytest.raises(aiogpu.WorkerDiedError, match="exited with code 7") as one:
            await tasks.exit_at_once.remote(7)
        assert (one.value.exitcode, one.value.signal) == (7, None)
        assert one.value.last_output == ("last words",)
        assert one.value.pid > 0
        with pytest.raises(aiogpu.WorkerDiedError, match="SIGSEGV") as two:
            await tasks.kill_self.remote(int(signal.SIGSEGV))
        assert (two.value.exitcode, two.value.signal) == (None, 11)
        with pytest.raises(aiogpu.WorkerDiedError):
            await tasks.close_all_descriptors.remote()
        gate.release("other")
        assert await other == "other"


async def test_timeout_stops_a_task_wherever_it_is(address: str, gate: Gate) -> None:
    """[B10]"""
    async with aiogpu.init(address=address, num_cpus=1):
        seconds = 0.2
        while "running" not in gate.pids:
            waits = tasks.gated_coroutine.options(timeout=seconds, name="waits")
            running = waits.remote(gate.path, "running")
            waiting = tasks.add.options(timeout=seconds / 2).remote(1)
            with pytest.raises(TimeoutError, match=rf"{seconds / 2:g} s"):
                await waiting
            with pytest.raises(
                aiogpu.TaskTimeoutError, match=rf"waits .* {seconds:g} s"
            ):
                await running
            seconds *= 2  # if its worker has taken longer to begin
        await gate.entered("running-cancelled")
        assert await tasks.add.options(timeout=60).remote(1) == 2


@pytest.mark.needs("interrupts")
async def test_timeout_stops_code_that_is_busy(address: str, gate: Gate) -> None:
    """[B10]"""
    async with aiogpu.init(address=address, num_cpus=1):
        seconds = 0.2
        while "running" not in gate.pids:
            running = tasks.spin.options(timeout=seconds).remote(gate.path, "running")
            with pytest.raises(
                aiogpu.TaskTimeoutError, match=rf"spin .* {seconds:g} s"
            ):
                await running
            seconds *= 2  # if its worker has taken longer to begin
        await gate.entered("running-interrupted")
        assert await tasks.add.options(timeout=60).remote(1) == 2


async def test_work_of_a_closed_node_ends_with_an_error(
    address: str, gate: Gate
) -> None:
    """[B6]"""
    async with aiogpu.init(address=address, num_cpus=1):
        running = tasks.gated_coroutine.remote(gate.path, "a")
        waiting = tasks.add.remote(1)
        await gate.entered("a")
    for handle in (running, waiting):
        with pytest.raises(aiogpu.errors.NodeClosedError, match="shut down"):
            await handle
    await gate.entered("a-cancelled")


@pytest.mark.needs("processes")
async def test_a_closed_node_leaves_no_process(address: str, gate: Gate) -> None:
    """[B6]"""
    async with aiogpu.init(address=address, num_cpus=1):
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
    with pytest.raises(aiogpu.errors.NodeClosedError, match="shut down"):
        await running
    assert not os.path.exists(f"/proc/{gate.pids['a']}")


@pytest.mark.needs("processes")
async def test_a_fork_of_a_worker_does_not_speak_for_it(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        worker = await tasks.pid.remote()
        for _ in range(5):
            assert await tasks.fork_and_return.remote() == worker
            assert capsys.readouterr().out.endswith(") from the child\n")
            assert await tasks.fork_and_exit.remote(7) == (worker, 7)
        assert await tasks.pid.remote() == worker


async def test_nothing_of_a_coroutine_goes_on(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        await tasks.leave_asyncio_task.remote(gate.path)
        await gate.entered("rest-ended")


async def test_many_at_once(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=2):
        reused = tasks.add.options(num_gpus=0.25, max_calls=0)
        results = await asyncio.gather(*(reused.remote(i) for i in range(1000)))
        assert results == list(range(1, 1001))


# What code in a worker is told that it is called


@pytest.mark.parametrize(
    "kind",
    [
        NamedSerial,
        pytest.param(NamedThreaded, marks=pytest.mark.needs("threads")),
        NamedAsync,
    ],
)
async def test_a_call_is_named_after_its_actor_and_method(
    address: str, kind: Any
) -> None:
    """[B20]"""
    own = kind.__name__
    async with aiogpu.init(address=address, num_cpus=1):
        actor = await kind.remote()
        assert await actor.called.remote() == f"{own}.called"
        assert await actor.made.remote() == own
        assert await anext(aiter(actor.called.map([1], chunk=1))) == f"{own}.called"
        assert await aiogpu.remote(name).remote() == "name"
        if kind is NamedThreaded:
            assert await actor.beside.remote() == f"{own}.beside"
            other = actor.called.options(concurrency_group="side")
            assert await other.remote() == f"{own}.called"


async def test_calls_that_interleave_have_names_of_their_own(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = await NamedAsync.remote()
        names, other = await asyncio.gather(
            actor.softly.remote(), actor.second.remote()
        )
        assert names == ["NamedSoftly.softly"] * 3
        assert other == "NamedSoftly.second"


async def test_the_status_names_the_machine(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        [machine] = (await aiogpu.status()).nodes
        assert (machine.is_alive, machine.host) == (True, os.uname().nodename)
        assert machine.total["CPU"] == 2
        assert machine.id == await tasks.node_id.remote()
