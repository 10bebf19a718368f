"""A keeper with a driver of the test: its watch, its worker, and all that it left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.wire.messages import (
    VERSION,
    Close,
    End,
    Ended,
    Fork,
    Forked,
    Hello,
    Keep,
    Lost,
    Signal,
)
from tests.support.program import ROOT, environment, run, start
from tests.unit.worker.conftest import DriverEnd

KEEPER = """
    import os, signal, sys
    from aiogpu.wire.messages import Setup
    from aiogpu.linux import syscalls as kernel
    from aiogpu.worker.zygote.keeper import Keeper

    def daemonise():
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.write(writing, b".")
                signal.pause()
            os._exit(0)
        os.read(reading, 1)

    def worker_main(worker, slot, keeper):
        assert (slot, keeper) == (4, os.getppid())
        kernel.die_with_parent(keeper)
        signal.signal(signal.SIGINT, lambda *_: os._exit(55))
        daemonise()
        os.write(2, f"worker {worker} runs\\n".encode())
        if worker == 1:
            os._exit(11)
        if worker == 9:
            raise RuntimeError("a broken worker")
        while True:
            signal.pause()

    directory, driver = sys.argv[1], int(sys.argv[2])
    setup = Setup([], "node", directory, driver, 0, [])
    Keeper(4, setup, os.pidfd_open(driver), worker_main).run()
    assert kernel.children() == []
"""


class Slot:
    """A keeper's surroundings: its pipes, its driver, the process that it watches."""

    def __init__(self, driver: DriverEnd) -> None:
        self.driver = driver
        self._paths = [f"{driver.directory}/4.{stream}" for stream in (1, 2)]
        self.pipes = []
        for path in self._paths:
            os.mkfifo(path)
            self.pipes.append(os.open(path, os.O_RDWR))
        self.watched = subprocess.Popen(["sleep", "60"])
        pid = str(self.watched.pid)
        self.keeper = start(KEEPER, driver.directory, pid)
        self.greeting = driver.accept()

    def run(self, worker: int) -> int:
        """Have it forked and wait until it runs; gives its process id."""
        self.driver.send(Fork(worker))
        forked = self.driver.next()
        assert isinstance(forked, Forked)
        assert forked.worker == worker
        text = b""
        while not text.endswith(b"runs\n"):
            text += os.read(self.pipes[1], 1000)
        return forked.pid

    def family(self) -> set[int]:
        """All processes that have the keeper's pipes open."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                links = {
                    os.readlink(f"/proc/{name}/fd/{number}")
                    for number in os.listdir(f"/proc/{name}/fd")
                }
            except OSError:
                continue
            if links & set(self._paths):
                found.add(int(name))
        return found - {os.getpid()}

    def ends_well(self) -> None:
        out, err = self.keeper.communicate(timeout=60)
        assert (self.keeper.returncode, out, err) == (0, "", "")
        assert self.family() == set()

    def close(self) -> None:
        for process in (self.keeper, self.watched):
            process.kill()
            process.communicate()
        for descriptor in self.pipes:
            os.close(descriptor)


@pytest.fixture
def slot(runtime_directory: Path) -> Iterator[Slot]:
    place = runtime_directory / "node"
    place.mkdir()
    end = DriverEnd(str(place))
    slot = Slot(end)
    yield slot
    slot.close()
    end.close()
    shutil.rmtree(place, ignore_errors=True)


def test_the_end_of_a_worker_is_reported_when_all_it_left_has_ended(slot: Slot) -> None:
    assert slot.greeting == Hello(VERSION, "keeper", 4, slot.keeper.pid)
    for worker, code in ((1, 11), (9, 1), (1, 11)):
        slot.run(worker)
        assert slot.driver.next() == Ended(worker, code << 8)
        assert slot.family() == {slot.keeper.pid}
    slot.driver.send(Close())
    slot.ends_well()


def test_ending_and_interrupting_the_worker(slot: Slot) -> None:
    slot.run(2)
    slot.driver.send(End(3), Signal(3), Fork(5), Signal(2))
    assert slot.driver.next() == Ended(2, 55 << 8), "words about others mean nothing"
    slot.run(6)
    slot.driver.send(End(6))
    assert slot.driver.next() == Ended(6, int(signal.SIGKILL))
    slot.driver.send(End(6), Signal(6))
    slot.run(7)
    slot.driver.send(Close())
    slot.ends_well()


@pytest.mark.parametrize("way", ["driver's death", "end of file", "garbage"])
def test_whatever_ends_it_leaves_nothing(way: str, slot: Slot) -> None:
    slot.run(2)
    if way == "driver's death":
        slot.watched.kill()
    elif way == "end of file":
        slot.driver.hang_up()
    else:
        assert slot.driver.socket is not None
        slot.driver.socket.sendall(b"\xff" * 8)
    slot.ends_well()
    # Of a driver that lives it is the driver's.
    assert os.path.isdir(slot.driver.directory) == (way != "driver's death")


def test_pipes_that_have_gone_end_it_before_it_begins(
    driver: DriverEnd, runtime_directory: Path
) -> None:
    program = start(KEEPER, str(runtime_directory), str(os.getpid()))
    _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "FileNotFoundError" in err


def test_all_that_a_process_adopted_is_ended() -> None:
    source = """
    import os, signal
    from aiogpu.linux import syscalls as kernel
    from aiogpu.worker.zygote.keeper import end_children
    kernel.adopt_orphans()
    reading, writing = os.pipe()
    # A tree three deep: each death gives the next to us.
    for _ in range(3):
        if os.fork() == 0:
            for depth in range(3):
                if os.fork():
                    break
                os.setsid()
            os.write(writing, b".")
            signal.pause()
    for _ in range(12):
        os.read(reading, 1)
    end_children()
    assert kernel.children() == []
    os.close(writing)
    assert os.read(reading, 1) == b"", "somebody lives"
    end_children()
    """
    run(source)


WATCHER = """
import os, sys
from aiogpu.wire.connection import ZYGOTE
from aiogpu.wire.messages import Close, Lost
from aiogpu.worker.zygote.keeper import Watch
watch = Watch(ZYGOTE, 0, sys.argv[1], os.pidfd_open(int(sys.argv[2])))
while not watch.is_over:
    for message in watch.wait():
        if isinstance(message, Close):
            continue
        if message.slot == 1 and os.fork() == 0:
            watch.leave()
            os._exit(0)
        if message.slot == 2:
            # A child's end wakes it, whatever the driver says or does not say.
            os.waitpid(-1, 0)
        watch.send(Lost(message.slot))
print(watch.is_asked, watch.driver_has_left(0 if watch.is_asked else 10))
watch.close()
"""


class Watched:
    """A watching process and the one that stands for its driver."""

    def __init__(self, driver: DriverEnd) -> None:
        self.driver = driver
        self.process = subprocess.Popen(["sleep", "60"])
        self.watcher = subprocess.Popen(
            [sys.executable, "-c", WATCHER, driver.path, str(self.process.pid)],
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.accept() == Hello(VERSION, "zygote", 0, self.watcher.pid)

    def last_words(self) -> str:
        out, _ = self.watcher.communicate(timeout=60)
        assert self.watcher.returncode == 0
        return out.splitlines()[-1]

    def close(self) -> None:
        for process in (self.process, self.watcher):
            process.kill()
            process.communicate()


@pytest.fixture
def watched(driver: DriverEnd) -> Iterator[Watched]:
    watched = Watched(driver)
    yield watched
    watched.close()


def test_messages_and_children_wake_it(watched: Watched) -> None:
    for slot in (1, 2, 3):
        watched.driver.send(Keep(slot))
        assert watched.driver.next() == Lost(slot)
    watched.driver.send(Keep(4), Close())
    assert watched.driver.rest() == [Lost(4)]
    assert watched.last_words() == "True False"


@pytest.mark.parametrize("way", ["a death", "a loss", "garbage", "out of turn"])
def test_what_ends_a_watch_without_a_message(way: str, watched: Watched) -> None:
    if way == "a loss":
        watched.driver.hang_up()
    elif way == "garbage":
        assert watched.driver.socket is not None
        watched.driver.socket.sendall(b"\xff" * 8)
    elif way == "out of turn":
        watched.driver.send(Lost(1))
    # A dying driver's connection may end well before its pidfd says so.
    watched.process.kill()
    assert watched.last_words() == "False True"
