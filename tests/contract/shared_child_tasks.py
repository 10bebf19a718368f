"""Tasks that hand on the handle of a child that ends at that very moment.

They meet the test at named pipes, which also work while the test keeps the node's loop
from running.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiogpu


class Points:
    """Places where a task and the test wait for each other, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, *names: str) -> None:
        for name in names:
            os.mkfifo(self.directory / name)

    def arrive(self, name: str) -> None:
        """The task's side."""
        with (self.directory / name).open("w") as pipe:
            pipe.write(name)

    def meet(self, name: str) -> None:
        """The test's side."""
        assert (self.directory / name).read_text() == name


class PickledLast:
    """Arrives at a point when it is pickled, that is after what stands before it."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self.points.arrive("shared")
        return str, ("last",)


@aiogpu.remote(max_calls=1)
def child(points: Points) -> str:
    points.arrive("child runs")
    points.arrive("child goes on")
    # A process ends after it has sent its last answer.
    atexit.register(points.arrive, "child has answered")
    return "a result"


def begin(points: Points) -> list[Any]:
    handle = child.remote(points)
    points.arrive("parent runs")
    points.arrive("parent goes on")
    return [handle, PickledLast(points)]


@aiogpu.remote(max_calls=1)
def hand_on(points: Points) -> list[Any]:
    return begin(points)


@aiogpu.remote(max_calls=1)
async def hand_on_softly(points: Points) -> list[Any]:
    return begin(points)


@aiogpu.remote(max_retries=0)
def hand_on_and_die(points: Points) -> Iterator[list[Any]]:
    yield begin(points)
    os.kill(os.getpid(), signal.SIGKILL)


@aiogpu.remote
class Parent:
    def hand_on_and_leave(self, points: Points) -> Iterator[list[Any]]:
        yield begin(points)
        aiogpu.exit_actor()
