"""Tasks and actors with signal handlers that raise."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly, say


class HandlerError(Exception):
    """Raised by a handler."""


def fail(number: int, _frame: FrameType | None) -> None:
    raise HandlerError(number)


def raise_later(path: str) -> None:
    """Raise an exception in the main thread, as libraries with time limits do."""
    pass_gate(path, "thread")
    thread = threading.main_thread().ident
    assert thread is not None
    while sys._current_frames()[thread].f_code.co_name != "_wait":
        os.sched_yield()
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(HandlerError)
    )
    assert raised == 1
    say(path, "raised")


@aiogpu.remote
class Serial:
    def __init__(self) -> None:
        signal.signal(signal.SIGUSR1, fail)
        signal.signal(signal.SIGCHLD, fail)

    def pid(self) -> int:
        return os.getpid()

    def leave_child(self) -> None:
        """Start a child that ends soon, as a data loader's worker that is killed."""
        self.child = subprocess.Popen(["sleep", "0.05"])

    def child_has_ended(self) -> bool:
        return self.child.poll() is not None

    def run_into_alarm(self) -> None:
        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            pass

    def raise_amid_calls(self, path: str) -> int:
        """Let a thread raise an exception in the main thread after this call."""
        threading.Thread(target=raise_later, args=[path]).start()
        return os.getpid()

    def print_in_handler(self) -> int:
        """Print in a handler that interrupts other prints."""
        ticks = 0

        def tick(_number: int, _frame: FrameType | None) -> None:
            nonlocal ticks
            ticks += 1
            print("tick")

        signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        while ticks < 100:
            print("x" * 5000)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return ticks


@aiogpu.remote(max_concurrency=2)
class Threaded:
    def __init__(self) -> None:
        signal.signal(signal.SIGUSR1, fail)

    def pid(self) -> int:
        return os.getpid()


@aiogpu.remote
class Soft:
    def __init__(self) -> None:
        signal.signal(signal.SIGUSR1, fail)

    async def pid(self) -> int:
        return os.getpid()

    async def wait(self, path: str) -> int:
        await pass_gate_softly(path, "inside")
        return os.getpid()

    async def run_into_alarm(self) -> None:
        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            pass

    async def exit_in_background(self) -> None:
        async def leave() -> None:
            sys.exit(3)

        self.task: Any = asyncio.ensure_future(leave())


@aiogpu.remote
async def await_alarm() -> None:
    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    await asyncio.sleep(60)


@aiogpu.remote
def set_handler() -> int:
    signal.signal(signal.SIGUSR1, fail)
    return os.getpid()


@aiogpu.remote
def raise_amid_tasks(path: str) -> int:
    threading.Thread(target=raise_later, args=[path]).start()
    return os.getpid()


@aiogpu.remote
def pid() -> int:
    return os.getpid()


def load_with_workers() -> tuple[int, list[int]]:
    """Return this process's id, and those of the workers of a torch DataLoader."""
    from torch.utils.data import DataLoader

    data: Any = list(range(8))
    loader: Any = DataLoader(data, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    kept.append((loader, iterator))
    return os.getpid(), [worker.pid for worker in iterator._workers]


kept: list[Any] = []


@aiogpu.remote
class Loading:
    def load(self) -> tuple[int, list[int]]:
        return load_with_workers()

    def pid(self) -> int:
        return os.getpid()
