"""The tasks of the soak. Light to import, since workers import it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from random import random
from typing import Final
from zlib import crc32

import aiogpu
from benchmarks.soak import stacks
from benchmarks.soak.shares import held

stacks.tell_when_asked()

_kept: Final[dict[str, tuple[memoryview, int]]] = {}
STEP: Final = 4096


class FlakyError(Exception):
    """What may go well the next time."""


@aiogpu.remote
def echo(number: int) -> int:
    return number


@aiogpu.remote
async def soft(number: int, seconds: float = 0.0) -> int:
    from asyncio import sleep

    await sleep(seconds)
    return number


@aiogpu.remote
def spin(number: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return number


@aiogpu.remote
def on_gpu(number: int, amount: float, seconds: float) -> int:
    """Hold its share for a while, as only one may."""
    ids = aiogpu.get_gpu_ids()
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    assert visible == ",".join(map(str, ids)), (visible, ids)
    assert len(ids) == max(1, amount), (ids, amount)
    with held([int(one) for one in ids], amount):
        time.sleep(seconds)
    return number


@aiogpu.remote
def leaves_a_daemon(number: int) -> int:
    """Leave a process behind, which ends with its lease."""
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
    """End the process in one of several ways."""
    match number % 4:
        case 0:
            os._exit(3)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2:
            os.kill(os.getpid(), signal.SIGSEGV)
    sys.exit(4)


class RanTwiceError(AssertionError):
    """What was to be tried once, or not at all, has run."""


@aiogpu.remote(max_retries=0)
def once(number: int, program: int) -> int:
    """Begin once at most, whatever becomes of it."""
    try:
        open(trace_of(number, program), "x").close()
    except FileExistsError:
        raise RanTwiceError(number) from None
    return number


def trace_of(number: int, program: int) -> str:
    """The file that says that it has begun."""
    return f"{os.environ['AIOGPU_SOAK_LOCKS']}/begun-{program}-{number}"


@aiogpu.remote(max_retries=0)
def wild(number: int) -> int:
    """Do to its process what no program should."""
    match number % 4:
        case 0:
            os.closerange(3, 1000)
        case 1:
            os.execvp("true", ["true"])
        case 2:
            if os.fork() == 0:
                return -1  # it comes back, and speaks for nobody
            os.wait()
        case 3:
            os.kill(os.getppid(), signal.SIGKILL)
    return number


@aiogpu.remote
def deaf(number: int) -> int:
    """Hear of no interrupt."""
    while True:
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001 - it is deaf
            continue


@aiogpu.remote
def parent(number: int, depth: int) -> int:
    if depth:
        return aiogpu.get(parent.remote(number, depth - 1))
    return aiogpu.get(echo.remote(number))


@aiogpu.remote
async def soft_parent(number: int) -> int:
    from asyncio import gather

    return max(await gather(*(soft.remote(number) for _ in range(3))))


@aiogpu.remote
def forgetful(number: int) -> int:
    """Leave children behind, which end with it."""
    for _ in range(3):
        deaf.remote(number)
    return number


@aiogpu.remote
def count(to: int, fatal_at: int = -1) -> Iterator[int]:
    for number in range(to):
        if number == fatal_at:
            os._exit(5)
        yield number


@aiogpu.remote
async def count_softly(to: int) -> AsyncIterator[int]:
    for number in range(to):
        yield number


@aiogpu.remote
def pass_on(to: int) -> Iterator[int]:
    yield from count.remote(to)  # type: ignore[misc]


def filled(size: int, number: int) -> memoryview:
    """So many bytes that hang on the number."""
    return memoryview(number.to_bytes(8, "big") * (size // 8))


def fingerprint(view: memoryview) -> int:
    """Of a part of its bytes."""
    return crc32(bytes(view[::STEP]), len(view))


@aiogpu.remote
def make(size: int, number: int) -> memoryview:
    return filled(size, number)


@aiogpu.remote
def measure(view: memoryview) -> int:
    return fingerprint(view)


@aiogpu.remote
def relay(view: memoryview) -> memoryview:
    """Give what lies in memory already."""
    return view


@aiogpu.remote
def measure_inside(views: list[aiogpu.Handle[memoryview]]) -> list[int]:
    return [fingerprint(aiogpu.get(view)) for view in views]


@aiogpu.remote
def keep(view: memoryview) -> int:
    """Keep it in this process; what was kept before must not have changed."""
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
    """Have so much memory for a moment."""
    block = bytearray(megabytes << 20)
    block[::STEP] = b"x" * len(range(0, len(block), STEP))
    return len(block) >> 20
