"""Parts of a worker in the process of the tests, and the driver's connection."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiogpu.client.current import Context, current
from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.codec import FrameReader, encode
from aiogpu.wire.messages import Message
from aiogpu.worker.connection import Channel
from aiogpu.worker.environment import Threads
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import TaskClient
from aiogpu.worker.stdio import Stdio
from aiogpu.worker.zygote.preload import Imports


class DriverEnd:
    """The driver's end of a connection; listens, and sends and reads messages."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{directory}/node.sock")
        self._listener.listen()
        self._reader = FrameReader()
        self._messages: list[Message] = []
        self.socket: Any = None

    @property
    def path(self) -> str:
        return f"{self.directory}/node.sock"

    def accept(self) -> Message:
        """Accept the connection and return its greeting."""
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(60)
        return self.next()

    def next(self) -> Message:
        """Return the next message; EOFError if the connection is closed."""
        while not self._messages:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def send(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def hang_up(self) -> None:
        self.socket.close()

    def close_listener(self) -> None:
        """Refuse connections from now on."""
        self._listener.close()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self._listener.close()


@pytest.fixture
def page() -> Iterator[ControlPage]:
    descriptor = ControlPage.create()
    page = ControlPage.open(descriptor)
    os.close(descriptor)
    yield page
    page.close()


@pytest.fixture
def interrupts(page: ControlPage) -> Iterator[Interrupts]:
    """The interrupts of slot 3, which handle SIGINT while the test runs."""
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(page)
    interrupts.use_slot(3)
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
    """A worker's channel to `driver`."""
    channel = Channel(interrupts)
    channel.connect(driver.path, 5)
    driver.accept()
    yield channel
    channel.close()


@pytest.fixture
def executor(channel: Channel, interrupts: Interrupts) -> Iterator[Executor]:
    """A worker's executor, which does not change the threads of libraries."""
    executor = Executor(
        channel, interrupts, Unmoved(), Imports(), Stdio(channel), TaskClient(channel)
    )
    yield executor
    if executor._coroutines is not None:
        executor._coroutines._loop.close()


class Unmoved(Threads):
    """The thread settings of libraries, which stay unchanged."""

    def adapt(self, cpus: float) -> None:
        """Change nothing."""


@pytest.fixture
def context() -> Iterator[Context]:
    """The context of this process, which is restored after the test."""
    before = {name: getattr(current, name) for name in Context.__slots__}
    yield current
    for name, value in before.items():
        setattr(current, name, value)
