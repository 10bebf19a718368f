"""A keeper with a fake driver: its worker, orphaned processes, and its own end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.wire.messages import VERSION, Close, End, Ended, Fork, Forked, Hello, Signal
from tests.support.program import run, start
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
    """A slot with its keeper, its pipes, its driver, and the watched process."""

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
        """Fork a worker and wait until it runs; return its process id."""
        self.driver.send(Fork(worker))
        forked = self.driver.next()
        assert isinstance(forked, Forked)
        assert forked.worker == worker
        text = b""
        while not text.endswith(b"runs\n"):
            text += os.read(self.pipes[1], 1000)
        return forked.pid

    def family(self) -> set[int]:
        """Return the processes that have the keeper's pipes open."""
        family = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                links = {
                    os.readlink(f"/proc/{name}/fd/{number}")
                    for number in os.listdir(f"/proc/{name}/fd")
                }
            except OSError:
                continue
            if links & set(self._paths):
                family.add(int(name))
        return family - {os.getpid()}

    def assert_clean_end(self) -> None:
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
    directory = runtime_directory / "node"
    directory.mkdir()
    end = DriverEnd(str(directory))
    slot = Slot(end)
    yield slot
    slot.close()
    end.close()
    shutil.rmtree(directory, ignore_errors=True)


def test_end_of_a_worker_is_reported_after_its_orphans_ended(slot: Slot) -> None:
    assert slot.greeting == Hello(VERSION, "keeper", 4, slot.keeper.pid)
    for worker, code in ((1, 11), (9, 1), (1, 11)):
        slot.run(worker)
        assert slot.driver.next() == Ended(worker, code << 8)
        assert slot.family() == {slot.keeper.pid}
    slot.driver.send(Close())
    slot.assert_clean_end()


def test_keeper_ends_and_interrupts_only_its_worker(slot: Slot) -> None:
    slot.run(2)
    slot.driver.send(End(3), Signal(3), Fork(5), Signal(2))
    assert slot.driver.next() == Ended(2, 55 << 8), "orders for others are ignored"
    slot.run(6)
    slot.driver.send(End(6))
    assert slot.driver.next() == Ended(6, int(signal.SIGKILL))
    slot.driver.send(End(6), Signal(6))
    slot.run(7)
    slot.driver.send(Close())
    slot.assert_clean_end()


@pytest.mark.parametrize("planted", ["link", "file", "other"])
def test_keeper_writes_only_to_a_pipe_of_this_user(
    planted: str, tmp_path: Path
) -> None:
    """Otherwise the output of root's tasks could go to a file that others choose."""
    victim, path = tmp_path / "victim", tmp_path / "4.1"
    victim.write_text("before")
    if planted == "link":
        path.symlink_to(victim)
    elif planted == "file":
        os.link(victim, path)
    elif os.geteuid() == 0:
        os.mkfifo(path)
        os.chown(path, 54321, 54321)
    else:
        pytest.skip("only root has a second user")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    keeper = start(KEEPER, str(tmp_path), str(os.getpid()))
    _, err = keeper.communicate(timeout=60)
    os.close(reader)
    assert keeper.returncode == 1
    assert "OSError" in err or "UnexpectedFileError" in err
    assert str(path) in err
    assert victim.read_text() == "before"


@pytest.mark.parametrize("way", ["driver's death", "end of file", "garbage"])
def test_keeper_that_ends_leaves_no_processes(way: str, slot: Slot) -> None:
    slot.run(2)
    if way == "driver's death":
        slot.watched.kill()
    elif way == "end of file":
        slot.driver.hang_up()
    else:
        slot.driver.socket.sendall(b"\xff" * 8)
    slot.assert_clean_end()
    # A living driver removes its directory itself.
    assert os.path.isdir(slot.driver.directory) == (way != "driver's death")


def test_end_children_ends_all_adopted_processes() -> None:
    run("""
    import os, signal
    from aiogpu.linux import syscalls as kernel
    from aiogpu.worker.zygote.keeper import end_children
    kernel.adopt_orphans()
    reading, writing = os.pipe()
    # Trees of three levels: each death makes the next level our children.
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
    assert os.read(reading, 1) == b"", "a process is left"
    end_children()
    """)
