"""The tasks and actors of the soak. Light: every worker imports this module."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from random import random
from typing import Any, Final
from zlib import crc32

import aiogpu

faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
"""This process and its forks dump their stacks at the signal."""


QUARTERS: Final = 4
LOCKS: Final = "AIOGPU_SOAK_LOCKS"
"""The variable with the directory of the locks."""


class OverlapError(AssertionError):
    """Two holders have the same share."""


def locked(gpus: list[int], amount: float) -> ExitStack:
    """Lock an amount of each of these GPUs, until the returned stack is closed.

    Each quarter of a GPU is a file. Code with a share locks as many quarters of its GPU
    as the share has. If too few are free, two tasks have the same share, or a task has
    the share of a process that still runs. A lock ends with its process.

    Raises:
        OverlapError: other processes hold too many quarters.
    """
    wanted = min(QUARTERS, round(amount * QUARTERS))
    with ExitStack() as stack:
        for gpu in gpus:
            locks = 0
            for quarter in range(QUARTERS):
                file = stack.enter_context(
                    open(f"{os.environ[LOCKS]}/gpu-{gpu}-{quarter}", "wb")
                )
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locks += 1
                if locks == wanted:
                    break
            else:
                raise OverlapError(
                    f"process {os.getpid()} was given {wanted} quarters of GPU {gpu}, "
                    f"but other processes hold all but {locks}."
                )
        return stack.pop_all()


_kept: Final[dict[str, tuple[memoryview, int]]] = {}
STEP: Final = 4096


class FlakyError(Exception):
    """An error that a retry may avoid."""


@aiogpu.remote
def echo(number: int) -> int:
    return number


@aiogpu.remote
async def sleep(number: int, seconds: float = 0.0) -> int:
    import asyncio

    await asyncio.sleep(seconds)
    return number


@aiogpu.remote
def on_gpu(number: int, amount: float, seconds: float) -> int:
    """Hold the share for a while, under locks."""
    ids = aiogpu.get_gpu_ids()
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    assert visible == ",".join(map(str, ids)), (visible, ids)
    assert len(ids) == max(1, amount), (ids, amount)
    with locked([int(one) for one in ids], amount):
        time.sleep(seconds)
    return number


@aiogpu.remote
def leaves_a_daemon(number: int) -> int:
    """Leave a process behind, which must end with the lease."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return number


@aiogpu.remote
def prints(number: int) -> int:
    for line in range(50):
        print(number, line, "x" * 100)
    os.write(2, b"raw\n")
    return number


@aiogpu.remote
def fail(number: int) -> int:
    raise ValueError(number)


@aiogpu.remote
def flaky(number: int) -> int:
    if random() < 0.5:
        raise FlakyError(number)
    return number


@aiogpu.remote
def die(number: int) -> int:
    """End the process in one of four ways."""
    match number % 4:
        case 0:
            os._exit(3)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2:
            os.kill(os.getpid(), signal.SIGSEGV)
    sys.exit(4)


class RanTwiceError(AssertionError):
    """A task that may run once has run twice."""


@aiogpu.remote(max_retries=0)
def once(number: int, program: int) -> int:
    """Create the trace; fails if an earlier try has done so."""
    try:
        open(trace_of(number, program), "x").close()
    except FileExistsError:
        raise RanTwiceError(number) from None
    return number


def trace_of(number: int, program: int) -> str:
    """Return the path of the file that `once` creates."""
    return f"{os.environ[LOCKS]}/begun-{program}-{number}"


@aiogpu.remote(max_retries=0)
def misbehave(number: int) -> int:
    """Damage the worker process in one of four ways."""
    match number % 4:
        case 0:
            os.closerange(3, 1000)
        case 1:
            os.execvp("true", ["true"])
        case 2:
            if os.fork() == 0:
                return -1  # returns in a process that is no worker
            os.wait()
        case 3:
            os.kill(os.getppid(), signal.SIGKILL)
    return number


@aiogpu.remote
def uninterruptible(number: int) -> int:
    """Ignore every interrupt."""
    while True:
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001 - that is the point
            continue


@aiogpu.remote
def parent(number: int, depth: int) -> int:
    if depth:
        return aiogpu.get(parent.remote(number, depth - 1))
    return aiogpu.get(echo.remote(number))


@aiogpu.remote
async def async_parent(number: int) -> int:
    from asyncio import gather

    return max(await gather(*(sleep.remote(number) for _ in range(3))))


@aiogpu.remote
def forgetful(number: int) -> int:
    """Leave child tasks behind, which must end with this task."""
    for _ in range(3):
        uninterruptible.remote(number)
    return number


@aiogpu.remote
def count(to: int, fatal_at: int = -1) -> Iterator[int]:
    for number in range(to):
        if number == fatal_at:
            os._exit(5)
        yield number


@aiogpu.remote
async def count_async(to: int) -> AsyncIterator[int]:
    for number in range(to):
        yield number


@aiogpu.remote
def pass_on(to: int) -> Iterator[int]:
    yield from count.remote(to)  # type: ignore[misc]


def filled(size: int, number: int) -> memoryview:
    """Return `size` bytes that depend on the number."""
    return memoryview(number.to_bytes(8, "big") * (size // 8))


def fingerprint(view: memoryview) -> int:
    """Return a checksum of a part of the bytes."""
    return crc32(bytes(view[::STEP]), len(view))


@aiogpu.remote
def make(size: int, number: int) -> memoryview:
    return filled(size, number)


@aiogpu.remote
def measure(view: memoryview) -> int:
    return fingerprint(view)


@aiogpu.remote
def relay(view: memoryview) -> memoryview:
    """Return an argument that already lies in shared memory."""
    return view


@aiogpu.remote
def measure_inside(views: list[aiogpu.Handle[memoryview]]) -> list[int]:
    return [fingerprint(aiogpu.get(view)) for view in views]


@aiogpu.remote
def keep(view: memoryview) -> int:
    """Keep the view in this process; the previous one must not have changed."""
    if "kept" in _kept:
        before, mark = _kept["kept"]
        if fingerprint(before) != mark:
            raise AssertionError("a view that was kept has changed")
    _kept["kept"] = view, fingerprint(view)
    return fingerprint(view)


@aiogpu.remote(num_returns=2)
def split(number: int) -> tuple[int, int]:
    return number, -number


@aiogpu.remote
def add_up(one: int, other: int) -> int:
    return one + other


@aiogpu.remote
def bloat(megabytes: int) -> int:
    """Use this much memory for a moment."""
    block = bytearray(megabytes << 20)
    block[::STEP] = b"x" * len(range(0, len(block), STEP))
    return len(block) >> 20


class Member:
    """An actor that locks its share for life."""

    def __init__(self, amount: float = 0) -> None:
        self.last = -1
        self.view: memoryview | None = None
        gpus = [int(one) for one in aiogpu.get_gpu_ids()]
        self.share = locked(gpus, amount) if amount else None

    def add(self, number: int) -> int:
        return number + 1

    def fail(self, number: int) -> int:
        raise ValueError(number)

    def spin(self, number: int, seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return number + 1

    def ask(self, number: int) -> int:
        """Submit a task."""
        return aiogpu.get(echo.remote(number + 1))

    def keep(self, view: memoryview) -> int:
        self.view = view
        return fingerprint(view)

    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    def die(self, number: int) -> int:
        os._exit(number % 100)

    def leave(self, number: int) -> int:
        aiogpu.exit_actor()


class AsyncMember(Member):
    """The same actor with coroutines."""

    async def add(self, number: int) -> int:  # type: ignore[override]
        from asyncio import sleep

        await sleep(0)
        return number + 1

    async def wait(self, number: int, seconds: float) -> int:
        from asyncio import sleep

        await sleep(seconds)
        return number + 1

    async def ask(self, number: int) -> int:  # type: ignore[override]
        return await echo.remote(number + 1)


class InOrder(Member):
    """Checks that one caller's calls come in order."""

    def add(self, number: int) -> int:
        assert number > self.last, (number, self.last)
        self.last = number
        return number + 1


@aiogpu.remote
def call(actor: aiogpu.ActorHandle[Any], number: int) -> int:
    """Call an actor from another process."""
    found: int = aiogpu.get(actor.add.remote(number))
    return found


SERIAL = aiogpu.remote(InOrder)
THREADED = aiogpu.remote(max_concurrency=4)(Member)
ASYNC = aiogpu.remote(AsyncMember)
