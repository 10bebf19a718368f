"""What a node has: the ledger that is built, and the threads that detect."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiogpu.core.devices import Device, DeviceSet
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.detection import in_thread
from aiogpu.engines.inventory import build_ledger
from aiogpu.runtime.cpus import usable_cpus


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
