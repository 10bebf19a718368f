"""What a worker has, inside the tests' own process; given back afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.client.current import Context, current
from aiogpu.memory.control_page import ControlPage
from aiogpu.worker.connection import Channel
from aiogpu.worker.environment import Threads
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import TaskClient
from aiogpu.worker.stdio import Stdio
from aiogpu.worker.zygote.preload import Imports
from tests.unit.worker.driver_end import DriverEnd


@pytest.fixture
def page() -> Iterator[ControlPage]:
    descriptor = ControlPage.create()
    page = ControlPage.open(descriptor)
    os.close(descriptor)
    yield page
    page.close()


@pytest.fixture
def interrupts(page: ControlPage) -> Iterator[Interrupts]:
    """Those of slot 3, handling SIGINT while the test runs."""
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(page)
    interrupts.attend(3)
    interrupts.install()
    yield interrupts
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def driver(runtime_directory: Path) -> Iterator[DriverEnd]:
    end = DriverEnd(str(runtime_directory))
    yield end
    end.close()
    os.unlink(end.path)


@pytest.fixture
def channel(driver: DriverEnd, interrupts: Interrupts) -> Iterator[Channel]:
    """A worker's channel; `driver` has accepted it."""
    channel = Channel(interrupts)
    channel.connect(driver.path, 5)
    driver.accept()
    yield channel
    channel.close()


@pytest.fixture
def executor(channel: Channel, interrupts: Interrupts) -> Executor:
    """A worker's executor, which leaves the threads of libraries alone."""
    return Executor(
        channel,
        interrupts,
        Unmoved(),
        Imports(),
        Stdio(channel),
        TaskClient(channel),
    )


class Unmoved(Threads):
    """Notes how many CPUs it was to adapt to."""

    def __init__(self) -> None:
        super().__init__()
        self.adapted: list[float] = []

    def adapt(self, cpus: float) -> None:
        self.adapted.append(cpus)


@pytest.fixture
def context() -> Iterator[Context]:
    """The context of this process, as it was before afterwards."""
    before = {name: getattr(current, name) for name in Context.__slots__}
    yield current
    for name, value in before.items():
        setattr(current, name, value)
