"""Classes for tests of actors. Light to import, since workers import them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly, say

if TYPE_CHECKING:
    import asyncio


class Plain:
    """The methods that most remote classes below share."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.seen: list[object] = []

    def add(self, k: int = 1) -> int:
        self.count += k
        return self.count

    def note(self, value: object) -> int:
        self.seen.append(value)
        return len(self.seen)

    def notes(self) -> list[object]:
        return self.seen

    def pid(self) -> int:
        return os.getpid()

    def gated(self, path: str, name: str) -> str:
        self.seen.append(name)
        return pass_gate(path, name)

    def where(self) -> dict[str, Any]:
        context = aiogpu.get_runtime_context()
        return {
            "ids": aiogpu.get_gpu_ids(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "resources": dict(context.assigned_resources),
            "name": context.task_name,
        }

    def fail(self, kind: type[BaseException], *args: Any) -> None:
        raise kind(*args)

    def unpicklable(self) -> object:
        return {"lock": threading.Lock()}

    def leave(self) -> None:
        aiogpu.exit_actor()

    def exit(self, code: int) -> None:
        os.write(2, b"last words\n")
        os._exit(code)

    def kill_self(self, number: int) -> None:
        os.kill(os.getpid(), number)
        threading.Event().wait()

    def die_until(self, path: str, times: int) -> int:
        """End the process `times` times, counting in a file; then return the count."""
        with open(path, "a+") as file:
            file.write("x")
            file.flush()
            file.seek(0)
            count = len(file.read())
        if count <= times:
            os._exit(9)
        return count

    def spin(self, path: str, name: str) -> None:
        try:
            say(path, name)
            while True:
                pass
        except KeyboardInterrupt:
            say(path, f"{name}-interrupted")
            raise

    def swallow(self, path: str, name: str) -> str:
        """Go on after an interrupt, until the test releases the call."""
        try:
            pass_gate(path, name)
        except KeyboardInterrupt:
            pass_gate(path, f"{name}-swallowed")
        return name

    def block_in_c(self, path: str, name: str) -> None:
        try:
            say(path, name)
        except KeyboardInterrupt:
            pass
        finally:
            deque(repeat(None), maxlen=0)

    def fork(self, way: str) -> int:
        """Fork; the child leaves the method in the given way."""
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        print("from the child", flush=True)
        if way == "raise":
            raise ValueError("in the child")
        if way == "exit":
            sys.exit(7)
        return -1

    def say_all(self, lines: list[str]) -> None:
        for line in lines:
            print(line)

    def numbers(self) -> Iterator[int]:
        yield 1

    def _hidden(self) -> int:
        return 1


@aiogpu.remote
class Counter(Plain):
    pass


@aiogpu.remote(max_concurrency=2)
class Threads(Plain):
    pass


@aiogpu.remote
class Async(Plain):
    async def later(self, k: int = 1) -> int:
        import asyncio

        await asyncio.sleep(0)
        self.count += k
        return self.count

    async def wait(self, path: str, name: str) -> str:
        """Wait at the gate in a coroutine."""
        await pass_gate_softly(path, name)
        self.seen.append(name)
        return name

    async def wait_for_ever(self) -> None:
        import asyncio

        await asyncio.Event().wait()

    async def leave_later(self) -> None:
        import asyncio

        await asyncio.sleep(0)
        aiogpu.exit_actor()

    async def fail_later(self, kind: type[BaseException], *args: Any) -> None:
        import asyncio

        await asyncio.sleep(0)
        raise kind(*args)

    async def cancel_itself(self, swallows: bool) -> str:
        import asyncio

        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not swallows:
                raise
        return "swallowed"

    async def give_up(self) -> str:
        import asyncio

        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "given up"
        return "not given up"

    def hidden_coroutine(self) -> Any:
        """A plain function that gives a coroutine, as decorators make them."""
        return self.later(10)


@aiogpu.remote(concurrency_groups={"io": 2, "slow": 1})
class Groups(Plain):
    @aiogpu.method(concurrency_group="io")
    def io(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    @aiogpu.method(concurrency_group="slow")
    def slow(self, path: str, name: str) -> str:
        return pass_gate(path, name)


@aiogpu.remote
class Methods:
    """Has methods of each kind."""

    def one(self, value: int = 1) -> int:
        return value

    def pair(self) -> tuple[int, int]:
        return 1, 2

    @aiogpu.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return 1, 2

    def many(self) -> Iterator[int]:
        yield from range(3)


def shout(function: Callable[..., str]) -> Callable[..., str]:
    """A decorator that adds an argument to the function."""

    @functools.wraps(function)
    def louder(*args: Any, times: int = 1) -> str:
        return function(*args) + "!" * times

    return louder


class Odd:
    """Methods that are not plain functions with a `self`."""

    greeting = "hello"

    def __new__(cls, *words: str) -> Odd:
        return super().__new__(cls)

    def __init__(self, *words: str) -> None:
        self.words = words

    @staticmethod
    def static(a: int, b: int = 1) -> int:
        return a + b

    @classmethod
    def of_class(cls, name: str) -> str:
        return f"{cls.greeting} {name}"

    def all_by_position(*args: Any) -> int:
        return len(args)

    @functools.lru_cache  # noqa: B019
    def cached(self, n: int) -> tuple[int, int]:
        return n, os.getpid()

    @shout
    def greet(self, name: str) -> str:
        return f"{self.greeting} {name}"

    @property
    def not_a_method(self) -> str:
        return self.greeting


@aiogpu.remote
class Table(dict[str, int]):
    """An actor with the methods of a builtin class."""


@aiogpu.remote
class Broken:
    """An actor whose constructor fails."""

    def __init__(self, kind: type[BaseException], path: str = "") -> None:
        if path:
            with open(path, "a") as file:
                file.write("x")
        raise kind("no model")

    def add(self) -> int:
        return 1


@aiogpu.remote
class Slow(Plain):
    """An actor whose constructor waits at a gate."""

    def __init__(self, path: str, name: str = "constructor") -> None:
        super().__init__()
        pass_gate(path, name)


class Mourned(Plain):
    """Reports at a gate when the actor is deleted."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__()
        self.path, self.name = path, name

    def spin_at_gate(self, name: str) -> None:
        self.spin(self.path, name)

    def __del__(self) -> None:
        print("going")
        say(self.path, f"{self.name}-gone")


@aiogpu.remote
class Mortal(Mourned):
    pass


@aiogpu.remote
class Lingering:
    """Blocks at a gate when the actor is deleted."""

    def __init__(self, path: str) -> None:
        self.path = path

    def ping(self) -> None:
        pass

    def __del__(self) -> None:
        pass_gate(self.path, "finalizer")


@aiogpu.remote(max_concurrency=2)
class MortalThreads(Mourned):
    pass


@aiogpu.remote
class Closing(Mourned):
    """Has a `close()` that may fail, or never end."""

    def __init__(self, path: str, name: str, way: str = "") -> None:
        super().__init__(path, name)
        self.way = way
        self.background: asyncio.Task[None] | None = None

    async def start(self) -> None:
        import asyncio

        self.background = asyncio.create_task(self.rest())

    async def rest(self) -> None:
        import asyncio

        try:
            await asyncio.Event().wait()
        finally:
            say(self.path, f"{self.name}-rest-ended")

    async def wait(self, name: str) -> None:
        import asyncio

        try:
            say(self.path, name)
            await asyncio.Event().wait()
        finally:
            say(self.path, f"{name}-cancelled")

    async def leave_later(self) -> None:
        aiogpu.exit_actor()

    async def turns(self, count: int) -> None:
        import asyncio

        for _ in range(count):
            await asyncio.sleep(0)

    async def close(self) -> None:
        import asyncio

        say(self.path, f"{self.name}-closing")
        if self.way == "raise":
            raise ValueError("cannot close")
        if self.way == "endless":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        await asyncio.sleep(0)
        say(self.path, f"{self.name}-closed")


def facts() -> tuple[int | None, dict[str, float]]:
    context = aiogpu.get_runtime_context()
    assert context.get_assigned_resources() == dict(context.assigned_resources)
    return context.actor_id, context.get_assigned_resources()


@aiogpu.remote
class Knowing:
    """Returns its id and its resources."""

    def __init__(self) -> None:
        self.at_first = facts()

    def facts(self) -> list[Any]:
        return [self.at_first, facts()]


@aiogpu.remote
class KnowingSoftly:
    async def facts(self) -> list[Any]:
        return [facts(), facts()]


@aiogpu.remote
def facts_of_a_task() -> tuple[int | None, dict[str, float]]:
    return facts()


@aiogpu.remote
def named(one: int, **others: int) -> dict[str, int]:
    return {"one": one, **others}


@aiogpu.remote
def each_named(**others: int) -> Iterator[int]:
    yield from others.values()


@aiogpu.remote
class Named:
    """Takes arguments of any name."""

    def __init__(this, **others: int) -> None:
        this.others = others

    def named(this, **others: int) -> dict[str, int]:
        return {**this.others, **others}


@aiogpu.remote(concurrency_groups={"one": 1})
class SoftGroups:
    """A group of coroutines with a limit of one."""

    def __init__(self) -> None:
        import asyncio

        self.event = asyncio.Event()

    @aiogpu.method(concurrency_group="one")
    async def wait(self, path: str, name: str) -> None:
        say(path, name)
        await self.event.wait()

    def let_pass(self) -> None:
        self.event.set()


class Leaving:
    """Calls `exit_actor()` and swallows what it raises."""

    limit = 7

    @staticmethod
    def doubled(number: int) -> int:
        return 2 * number

    @classmethod
    def label(cls) -> str:
        return cls.__name__

    def returned(self) -> str:
        try:
            aiogpu.exit_actor()
        except BaseException:
            return "swallowed"

    def replaced(self) -> None:
        try:
            aiogpu.exit_actor()
        except BaseException:
            raise ValueError("another") from None

    def items(self) -> Any:
        yield 1
        try:
            aiogpu.exit_actor()
        except BaseException:
            yield 2

    def add(self, number: int) -> int:
        return number + 1


class LeavingSoftly(Leaving):
    async def returned(self) -> str:  # type: ignore[override]
        return super().returned()

    async def replaced(self) -> None:  # type: ignore[override]
        super().replaced()


@aiogpu.remote(concurrency_groups={"io": 1, "compute": 2})
class Grouped:
    def pair(self) -> tuple[int, int]:
        return 1, 2

    def stay(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    @aiogpu.method(concurrency_group="io")
    def read(self) -> str:
        return "read"

    @aiogpu.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return 3, 4

    def each(self, count: int) -> Iterator[int]:
        yield from range(count)


@aiogpu.remote
class Line:
    """An actor with methods that a pool has too."""

    def push(self, item: int) -> int:
        return item

    def map(self) -> str:
        return "mapped"


def name() -> str:
    return aiogpu.get_runtime_context().task_name


class NamedHere:
    def __init__(self) -> None:
        self.made_as = name()

    def made(self) -> str:
        return self.made_as

    def called(self, _: int = 0) -> str:
        return name()


class NamedBeside(NamedHere):
    @aiogpu.method(concurrency_group="side")
    def beside(self) -> str:
        return name()


class NamedSoftly(NamedHere):
    async def softly(self) -> list[str]:
        import asyncio

        before = name()
        return [before, await asyncio.create_task(self.again()), name()]

    async def second(self) -> str:
        return await self.again()

    async def again(self) -> str:
        import asyncio

        await asyncio.sleep(0)
        return name()


NamedSerial = aiogpu.remote(NamedHere)
NamedThreaded = aiogpu.remote(concurrency_groups={"side": 1})(NamedBeside)
NamedAsync = aiogpu.remote(NamedSoftly)
