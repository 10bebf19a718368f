"""Tasks and actors of `aiogpu.sync`: light to import, since workers import them."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import aiogpu
from aiogpu import sync


@sync.remote
def double(x: int) -> int:
    return 2 * x


@sync.remote
def keep(x: Any) -> Any:
    return x


@sync.remote
def total(numbers: list[Any]) -> int:
    return sum(sync.get(numbers))


@sync.remote
def fail(word: str) -> None:
    raise LookupError(word)


def block() -> None:
    threading.Event().wait()


@sync.remote
def wait_long() -> None:
    block()


@sync.remote
def fill(queue: Any, n: int) -> None:
    for number in range(n):
        queue.put(number)


@sync.remote
def count(n: int) -> Iterator[int]:
    yield from range(n)


@sync.remote
def double_by_child(x: int) -> tuple[int, str]:
    """Wait for children in two ways, and once too short a time; return the error."""
    child = wait_long.remote()
    try:
        child.result(timeout=0.01)
    except aiogpu.TaskTimeoutError as error:
        message = str(error)
    child.cancel()
    return sync.get(double.remote(x)) + double.remote(x).result(timeout=60), message


@sync.remote(num_returns=2)
def split(text: str) -> tuple[str, str]:
    return text[:1], text[1:]


@sync.remote
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, more: int = 1) -> int:
        self.value += more
        return self.value

    def upto(self, n: int) -> Iterator[int]:
        yield from range(n)


@aiogpu.remote
def add_one(x: int) -> int:
    return x + 1


def where(x: int) -> tuple[int, int]:
    return x, os.getpid()


def fail_at(x: int, bad: int) -> int:
    if x == bad:
        raise KeyError(x)
    return x


class FalsyError(Exception):
    def __bool__(self) -> bool:
        return False


@sync.remote
def fail_falsely() -> None:
    raise FalsyError("falsy")


@sync.remote
def start_double(x: int) -> Any:
    """Return the handle of a child, in a list too."""
    child = double.remote(x)
    return child, [child]


@sync.remote
def make_counter(start: int) -> Any:
    return {"counter": Counter.remote(start)}


@sync.remote
def yield_handles(n: int) -> Iterator[Any]:
    for x in range(n):
        yield sync.put(2 * x)


@sync.remote
def return_queue(queue: Any) -> Any:
    return [queue]


@sync.remote
class Maker:
    """An actor whose class has attributes, and whose methods return handles."""

    LIMIT = 5

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    def start(self, x: int) -> Any:
        return [double.remote(x)]


async def use_a_handle() -> list[int]:
    """Code on the loop that gets handles of the loop in a result."""
    found = await aiogpu.remote(start_double.__wrapped__).remote(3)
    return [await found[0], await found[1][0]]


def read_one(path: str) -> bytes:
    """Read a byte of a pipe, which blocks until the test has written one."""
    return os.read(os.open(path, os.O_RDONLY), 1)


@sync.remote
def cancel_twice() -> list[bool]:
    child = wait_long.remote()
    return [child.cancel(), child.cancel(), child.cancelled()]


@sync.remote
def get_failed() -> list[list[str]]:
    """Wait for a failing child in three ways; return the names of the frames."""
    names = []
    child = fail.remote("here")
    for wait in (sync.get, lambda _: child.result(), aiogpu.get):
        try:
            wait(child)
        except LookupError as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.name for frame in frames if frame.filename == __file__]
            others = len(frames) - len(own)
            names.append([*own[:1], *["other"] * others])
    return names


@sync.remote
class Named:
    """Has methods with names of methods of a pool."""

    def pid(self) -> int:
        return os.getpid()

    def map(self, x: int) -> int:
        return x + 1

    def has_free(self) -> str:
        return "the actor's"


@sync.remote
class Leaver:
    def leave(self) -> None:
        sync.exit_actor()


@sync.remote
def report_once(step: int) -> None:
    sync.report(step=step)


@sync.remote
class Turns:
    """Lets calls of `Waiter` end, by name."""

    def __init__(self) -> None:
        import asyncio

        self._ended = dict[str, asyncio.Event]()
        self._make = asyncio.Event

    async def let(self, *names: str) -> None:
        for name in names:
            self._ended.setdefault(name, self._make()).set()

    async def wait(self, name: str) -> str:
        await self._ended.setdefault(name, self._make()).wait()
        return name


@sync.remote
class Waiter:
    """Waits for its turns, and notes them."""

    def __init__(self) -> None:
        self.names = list[str]()

    async def wait(self, turns: Any, name: str) -> str:
        await turns.wait.remote(name)
        self.names.append(name)
        return name

    async def fail(self, word: str) -> None:
        raise LookupError(word)

    async def seen(self) -> list[str]:
        return self.names


@sync.remote
def sum_by_a_ray_pool(n: int) -> int:
    from aiogpu.util import ActorPool

    pool: Any = ActorPool([Counter.remote(), Counter.remote()])
    return sum(pool.map(lambda actor, k: actor.add.remote(k), [0] * n)) + n
