"""What a node has: the ledger that is built, and the threads that detect."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.devices import build_ledger, in_thread
from aiogpu.linux.cgroup import usable_cpus


def gpus(*types: str | None) -> list[DeviceSet]:
    return [DeviceSet("GPU", [Device(i, type=t) for i, t in enumerate(types)])]


def test_what_was_asked_for_is_what_there_is() -> None:
    options = NodeOptions(num_cpus=2.5, resources={"license": 2})
    ledger = build_ledger(options, gpus(None, None))
    told = {"CPU": 2.5, "license": 2.0, "GPU": 2.0}
    assert told.items() <= ledger.totals().items()


def test_detected_types_become_resources() -> None:
    ledger = build_ledger(NodeOptions(num_cpus=1), gpus("A100", "T4", "A100"))
    totals = ledger.totals()
    assert totals["accelerator_type:A100"] == totals["accelerator_type:T4"] == 1.0


@pytest.mark.parametrize(
    "options",
    [
        NodeOptions(num_cpus=1, accelerator_type="A100"),
        NodeOptions(num_cpus=1, resources={"accelerator_type:A100": 1}),
    ],
)
def test_a_declared_type_is_that_of_devices_without_one(options: NodeOptions) -> None:
    ledger = build_ledger(options, gpus(None, "T4"))
    types = [device.type for device in ledger.device_sets["GPU"].devices]
    assert types == ["A100", "T4"]


async def test_a_blocking_function_runs_elsewhere() -> None:
    thread = await in_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    with pytest.raises(KeyError):
        await in_thread(lambda: {}["a"])


async def test_nobody_waits_any_more() -> None:
    started, may_end = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        may_end.wait()

    waiting = asyncio.ensure_future(in_thread(block))
    while not started.is_set():
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_end.set()


@pytest.mark.parametrize("type_", ["A100", "T4"])
def test_what_is_declared_does_not_change_what_is_detected(type_: str) -> None:
    options = NodeOptions(
        num_cpus=1, accelerator_type=type_, resources={f"accelerator_type:{type_}": 3}
    )
    ledger = build_ledger(options, gpus("H100", None))
    types = [device.type for device in ledger.device_sets["GPU"].devices]
    assert types == ["H100", type_]
    totals = ledger.totals()
    assert totals[f"accelerator_type:{type_}"] == 3.0, "the amount given is kept"
    assert totals["accelerator_type:H100"] == 1.0


def test_two_declared_types_say_of_no_device_which_it_is() -> None:
    resources = {"accelerator_type:A100": 1, "accelerator_type:T4": 1}
    ledger = build_ledger(NodeOptions(num_cpus=1, resources=resources), gpus(None))
    assert ledger.device_sets["GPU"].devices[0].type is None


def test_the_cpus_are_those_usable_unless_given() -> None:
    assert build_ledger(NodeOptions(), gpus()).totals()["CPU"] == usable_cpus()
    assert build_ledger(NodeOptions(num_cpus=0), gpus()).totals()["CPU"] == 0.0


class Halt(BaseException):
    """What is no `Exception` comes out of the thread as well."""


async def test_whatever_a_thread_raises_is_raised_at_the_await() -> None:
    error = Halt()

    def fail() -> None:
        raise error

    with pytest.raises(Halt) as caught:
        await in_thread(fail)
    assert caught.value is error


def test_a_thread_may_outlive_the_loop() -> None:
    may_end = threading.Event()
    threads: list[threading.Thread] = []

    def block() -> None:
        threads.append(threading.current_thread())
        may_end.wait()

    async def main() -> None:
        waiting = asyncio.ensure_future(in_thread(block))
        while not threads:
            await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(main())
    may_end.set()
    threads[0].join(5)
    assert not threads[0].is_alive()


GIB = 1 << 30


def both_kinds(*types: str | None) -> list[DeviceSet]:
    cores = DeviceSet("neuron_cores", [Device(0, type="aws-neuron-core")])
    return [*gpus(*types), cores]


def test_what_is_declared_of_gpus_is_of_no_other_kind() -> None:
    """[B35]"""
    options = NodeOptions(
        num_cpus=1,
        num_gpus=1,
        accelerator_type="A100",
        gpu_memory=40 * GIB,
        resources={"neuron_cores": 1},
    )
    ledger = build_ledger(options, both_kinds(None))
    gpu, core = (each.devices[0] for each in ledger.device_sets.values())
    assert (gpu.type, gpu.memory) == ("A100", 40 * GIB)
    assert (core.type, core.memory) == ("aws-neuron-core", 0)
    totals = ledger.totals()
    assert totals["accelerator_type:aws-neuron-core"] == 1.0
    assert (totals["GPU"], totals["neuron_cores"]) == (1.0, 1.0)
    assert "neuron_cores" not in ledger.capacity, "it comes as single devices"


def test_the_type_of_another_kind_says_nothing_of_gpus() -> None:
    resources = {"accelerator_type:aws-neuron-core": 1}
    ledger = build_ledger(NodeOptions(resources=resources), both_kinds(None))
    assert ledger.device_sets["GPU"].devices[0].type is None


def test_a_kind_that_is_declared_as_none_is_not_there() -> None:
    options = NodeOptions(num_cpus=1, resources={"neuron_cores": 0})
    assert "neuron_cores" not in build_ledger(options, gpus()).totals()


@pytest.mark.parametrize(
    ("detected", "warned"), [(79 * GIB, False), (80 * GIB, False), (40 * GIB, True)]
)
def test_declared_memory_is_that_of_gpus_of_which_none_is_known(
    detected: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What was detected counts, and who says something else is told."""
    sets = [DeviceSet("GPU", [Device(0), Device(1, memory=detected)])]
    ledger = build_ledger(NodeOptions(gpu_memory=80 * GIB), sets)
    memory = [device.memory for device in ledger.device_sets["GPU"].devices]
    assert memory == [80 * GIB, detected]
    assert [record.message for record in caplog.records] == [
        "! init(gpu_memory='80GiB') is said of GPUs whose memory is not detected; GPU "
        "1 has 40GiB, and that counts."
    ] * warned


@pytest.mark.parametrize(
    ("types", "warned"), [(["A100", "H100"], True), (["T4", "H100"], False)]
)
def test_a_declared_type_that_no_gpu_has_is_told(
    types: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sets = [DeviceSet("GPU", [Device(n, type_) for n, type_ in enumerate(types)])]
    build_ledger(NodeOptions(accelerator_type="T4"), sets)
    assert [record.message for record in caplog.records] == [
        "! init(accelerator_type='T4') is said of GPUs whose type is not detected; GPU "
        "0 is of type 'A100', and that counts."
    ] * warned


def test_what_is_said_of_gpus_where_there_are_none_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = NodeOptions(accelerator_type="A100", gpu_memory=GIB)
    assert build_ledger(options, gpus()).totals()["GPU"] == 0
    assert [record.message for record in caplog.records] == [
        "! init(accelerator_type='A100', gpu_memory='1GiB') is said of GPUs, and this "
        "node has none; say num_gpus= as well for logical ones."
    ]
