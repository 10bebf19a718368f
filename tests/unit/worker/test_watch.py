"""What wakes a zygote or a keeper, and what ends its watch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiogpu.wire.messages import (
    VERSION,
    Close,
    Hello,
    Keep,
    Lost,
)
from tests.support.program import ROOT, environment
from tests.unit.worker.driver_end import DriverEnd

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
def test_what_ends_it_without_a_word(way: str, watched: Watched) -> None:
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


def test_a_driver_that_does_not_listen_is_noticed_by_sending(
    watched: Watched,
) -> None:
    watched.driver.send(Keep(5))
    watched.driver.hang_up()
    watched.process.kill()
    assert watched.last_words() == "False True"
    assert not os.path.exists(f"/proc/{watched.watcher.pid}")
