"""The user code of the benchmarks. Imports little, since workers import it."""

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
"""Prints the nanoseconds from before `init` to after the first result."""
_kept: Final[dict[int, Any]] = {}


class Plain:
    """An actor's class; it keeps nothing."""

    def noop(self, number: int) -> None:
        """Do nothing."""


class Interleaved:
    """The same with a coroutine method."""

    async def noop(self, number: int) -> None:
        """Do nothing."""


def noop(number: int) -> None:
    """Do nothing."""


def count_asyncio(number: int) -> int:
    """How many modules of asyncio this process has loaded."""
    return sum(name.partition(".")[0] == "asyncio" for name in sys.modules)


def busy(number: int) -> int:
    """Be busy for 10 us."""
    from time import perf_counter

    end = perf_counter() + 10e-6
    while perf_counter() < end:
        pass
    return number


def busy_each(numbers: list[int]) -> list[int]:
    """The same for each of some numbers."""
    return [busy(number) for number in numbers]


def wait_for_release(number: int) -> None:
    """Hold what this task was given until that process closes the connection."""
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


async def batch_on_loop(numbers: list[int]) -> list[int]:
    """Hold the event loop for a millisecond."""
    from time import perf_counter

    end = perf_counter() + 0.001
    while perf_counter() < end:
        pass
    return numbers


async def batch_in_thread(numbers: list[int]) -> list[int]:
    """Leave the interpreter to others for a millisecond, as code on a GPU does."""
    from asyncio import to_thread
    from time import sleep

    await to_thread(sleep, 0.001)
    return numbers


def spin(number: int) -> None:
    """Connect to the latch of that process, and be busy for ever.

    The connection ends when this code has stopped.
    """
    from socket import AF_UNIX, socket

    with socket(AF_UNIX) as latch:
        latch.connect(f"\0aiogpu-benchmarks-{number}")
        while True:
            pass


def hold(milliseconds: int) -> tuple[float, float]:
    """Hold what this task was given for so long; by the clock of all processes."""
    from time import monotonic, sleep

    start = monotonic()
    sleep(milliseconds / 1000)
    return start, monotonic()


def hang(number: int) -> None:
    """Connect to the latch of that process, and wait in C for what never comes."""
    from ctypes import CDLL, create_string_buffer
    from socket import AF_UNIX, socket

    # Zeros are a mutex that is free (pthread_mutex_init(3)). No signal ends the wait
    # for one that is taken.
    mutex, lock = create_string_buffer(64), CDLL(None).pthread_mutex_lock
    lock(mutex)
    with socket(AF_UNIX) as latch:
        latch.connect(f"\0aiogpu-benchmarks-{number}")
    lock(mutex)


def take(value: object = None) -> None:
    """Do nothing with what was given, if anything was."""


def give_same(value: object) -> object:
    """Give back what was given."""
    return value


def give_kept(size: int) -> object:
    """An array of that size, made once in a process."""
    import numpy

    if size not in _kept:
        _kept[size] = numpy.ones(size, numpy.uint8)
    return _kept[size]


def take_and_give(value: object, size: int) -> object:
    """Take an array, and give another."""
    return give_kept(size)


def first_of(value: Any) -> int:
    """Look at one element."""
    return int(value[0])


def numbers(count: int) -> Iterator[int]:
    """So many small items."""
    yield from range(count)


async def numbers_async(count: int) -> AsyncIterator[int]:
    """The same as a coroutine."""
    for number in range(count):
        yield number
