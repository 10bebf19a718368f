"""What a node says to whoever starts it, and a plan on its way to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from aiogpu.daemon.place import Place
from aiogpu.daemon.process import Plan
from aiogpu.daemon.readiness import Ready, report_failure, report_ready, wait_for_report
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import AiogpuError, DeviceError, NodeStartError

READY = Ready(4711, {"CPU": 2.0, "GPU": 1.0}, "/there/node.sock", "/there/logs")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test has closed it


def test_it_is_ready(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    report_ready(writing, READY)
    assert wait_for_report(reading, 0) == READY


def test_it_has_failed(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    report_failure(writing, DeviceError("no such device"))
    with pytest.raises(DeviceError, match="no such device"):
        wait_for_report(reading, 0)


@pytest.mark.parametrize("name", ["RemoteTraceback", "annotations", "NewerError"])
def test_it_has_failed_of_what_is_not_known_here(
    pipe: tuple[int, int], name: str
) -> None:
    reading, writing = pipe
    report_failure(writing, type(name, (AiogpuError,), {})("strange"))
    with pytest.raises(NodeStartError, match="strange"):
        wait_for_report(reading, 0)


def test_it_has_ended_without_a_word(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, b'{"rea')
    os.close(writing)
    assert wait_for_report(reading, 0) is None


def test_it_says_nothing(pipe: tuple[int, int]) -> None:
    with pytest.raises(TimeoutError):
        wait_for_report(pipe[0], 0)


def test_nobody_listens_any_more(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    report_ready(writing, READY)


def test_a_plan_arrives_as_it_was() -> None:
    options = NodeOptions(
        num_cpus=2.5, num_gpus=4, resources={"license": 2}, preload=("json", "math")
    )
    place = Place.at("/there/node.sock", "/elsewhere")
    plan = Plan(options, place, 3.5, ("/a", "/b"))
    assert Plan.unpacked(plan.packed()) == plan
    assert plan.ends_within == 22
    assert plan.opens_within == 240
