"""The user code of the benchmarks. Imports little: every worker imports it."""

import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

FIRST_RESULT: Final = """
from time import perf_counter_ns
from aiogpu import init, remote, run

@remote
def noop(number):
    return None

async def main():
    start = perf_counter_ns()
    async with init():
        await noop.remote(1)
        print(perf_counter_ns() - start, flush=True)

run(main())
"""
"""Prints the nanoseconds from `init` to the first result."""
_kept: Final[dict[int, Any]] = {}


class Plain:
    """An actor without state."""

    def noop(self, number: int) -> None:
        """Do nothing."""


class Interleaved:
    """An actor with a coroutine method."""

    async def noop(self, number: int) -> None:
        """Do nothing."""


def noop(number: int) -> None:
    """Do nothing."""


def count_asyncio(number: int) -> int:
    """Count the modules of asyncio in this process."""
    return sum(name.partition(".")[0] == "asyncio" for name in sys.modules)


def be_busy(seconds: float) -> None:
    """Keep the core busy."""
    from time import perf_counter

    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def busy(number: int) -> int:
    """Be busy for 10 us."""
    be_busy(10e-6)
    return number


def busy_each(numbers: list[int]) -> list[int]:
    """Be busy for 10 us for each of the numbers."""
    return [busy(number) for number in numbers]


def wait_for_release(number: int) -> None:
    """Keep this task's resources until process `number` closes the connection."""
    from socket import AF_UNIX, socket

    with socket(AF_UNIX) as latch:
        latch.connect(f"\0aiogpu-benchmarks-{number}")
        latch.recv(1)


def use_numpy(number: int) -> int:
    """Import numpy and add up some numbers."""
    import numpy

    return int(numpy.arange(1_000).sum())


def use_torch(number: int) -> int:
    """Import torch and add up some numbers."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    return int(torch.arange(1_000).sum())


def spin(number: int) -> None:
    """Connect to the latch of process `number`, and be busy for ever.

    The connection ends when this code has stopped.
    """
    from socket import AF_UNIX, socket

    with socket(AF_UNIX) as latch:
        latch.connect(f"\0aiogpu-benchmarks-{number}")
        while True:
            pass


def hold(milliseconds: int) -> tuple[float, float]:
    """Keep this task's resources for a time; return the begin and the end.

    `monotonic` is the same clock in all processes.
    """
    from time import monotonic, sleep

    start = monotonic()
    sleep(milliseconds / 1000)
    return start, monotonic()


def hang(number: int) -> None:
    """Connect to the latch of process `number`, and wait in C for ever."""
    from ctypes import CDLL, create_string_buffer
    from socket import AF_UNIX, socket

    # Zeros are a free mutex (pthread_mutex_init(3)). No signal ends the wait for a
    # locked one.
    mutex, lock = create_string_buffer(64), CDLL(None).pthread_mutex_lock
    lock(mutex)
    with socket(AF_UNIX) as latch:
        latch.connect(f"\0aiogpu-benchmarks-{number}")
    lock(mutex)


def take(value: object = None) -> None:
    """Ignore the argument."""


def give_same(value: object) -> object:
    """Return the argument."""
    return value


def give_kept(size: int) -> object:
    """Return an array of that size, which a process makes once."""
    import numpy

    if size not in _kept:
        _kept[size] = numpy.ones(size, numpy.uint8)
    return _kept[size]


def take_and_give(value: object, size: int) -> object:
    """Take an array, and return another one."""
    return give_kept(size)


def first_of(value: Any) -> int:
    """Return the first element."""
    return int(value[0])


def numbers(count: int) -> Iterator[int]:
    """Yield `count` small items."""
    yield from range(count)


async def numbers_async(count: int) -> AsyncIterator[int]:
    """Yield `count` small items from a coroutine."""
    for number in range(count):
        yield number
