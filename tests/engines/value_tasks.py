"""Tasks that take, give and keep values: light to import, since workers import them."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

import aiogpu
from tests.gate import pass_gate, pass_gate_softly, say

kept: list[Any] = []
"""What a task leaves for the next one of its process."""


class Sighted:
    """Tells where it was unpickled: it is the pid of the process that did so last."""

    def __init__(self, path: str, name: str = "sighted") -> None:
        self.path = path
        self.name = name

    def __reduce__(self) -> Any:
        return see, (self.path, self.name)


def see(path: str, name: str) -> Sighted:
    """Unpickles a `Sighted`, and notes the process in a file."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return Sighted(path, name)


class LoudError(Exception):
    """Travels well."""


class StubbornError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.socket = lambda: None

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class Unwilling:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("I will not travel")


class Explosive:
    """Pickles well, and raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ("unpickled",)


def explode(text: str) -> None:
    raise LoudError(text)


class Ending:
    """Pickles well, and ends the process where it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


class Gated:
    """Waits at a gate where it is unpickled."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name

    def __reduce__(self) -> Any:
        return pass_gate, (self.path, self.name)


@aiogpu.remote
def give(value: Any) -> Any:
    return value


@aiogpu.remote
def add(a: Any, b: Any = 1) -> Any:
    return a + b


@aiogpu.remote
async def add_softly(a: Any, b: Any = 1) -> Any:
    await asyncio.sleep(0)
    return a + b


@aiogpu.remote
def total(*numbers: int, **named: int) -> int:
    return sum(numbers) + sum(named.values())


@aiogpu.remote
def are_same(a: Any, b: Any) -> bool:
    return a is b


@aiogpu.remote
async def gated(path: str, name: str, value: Any = None) -> Any:
    """Give the value when the gate lets it pass."""
    await pass_gate_softly(path, name)
    return value


@aiogpu.remote
def tell(path: str, name: str, *_needs: Any) -> str:
    """Say at the gate that it runs."""
    say(path, name)
    return name


@aiogpu.remote
def fail(text: str, kind: type[Exception] = LoudError) -> Any:
    raise kind(text)


@aiogpu.remote
async def gated_fail(path: str, name: str, kind: type[Exception] = LoudError) -> Any:
    await pass_gate_softly(path, name)
    raise kind(name)


@aiogpu.remote(max_retries=0)
def die(_what: Any = None) -> Any:
    os._exit(3)


@aiogpu.remote
def kinds(*values: Any) -> list[str]:
    return [type(value).__name__ for value in values]


@aiogpu.remote
def get_nested(box: dict[str, Any]) -> Any:
    """Plain code reads what is in a container."""
    return aiogpu.get(box["handle"])


@aiogpu.remote
async def await_nested(box: dict[str, Any]) -> Any:
    """And so does a coroutine."""
    return await box["handle"]


@aiogpu.remote
async def gather_nested(handles: list[Any]) -> list[Any]:
    return await asyncio.gather(*handles)


@aiogpu.remote
async def wait_for_nested(handles: list[Any]) -> list[Any]:
    done, _ = await asyncio.wait(handles)
    assert done == set(handles)
    return [handle.result() for handle in handles]


@aiogpu.remote
def hand_on(box: dict[str, Any]) -> Any:
    """Give a handle from a container to a child as an argument."""
    return aiogpu.get(add.remote(box["handle"], 10))


@aiogpu.remote
async def hand_on_softly(box: dict[str, Any]) -> Any:
    return await add_softly.remote(box["handle"], 10)


@aiogpu.remote
def hand_on_boxed(box: dict[str, Any]) -> Any:
    """Give the container itself to a child."""
    return aiogpu.get(get_nested.remote(box))


@aiogpu.remote
async def hand_on_boxed_softly(box: dict[str, Any]) -> Any:
    return await await_nested.remote(box)


@aiogpu.remote
def give_boxed(box: dict[str, Any]) -> dict[str, Any]:
    return box


@aiogpu.remote
def chain(depth: int) -> int:
    """Each child is the argument of the next, none is waited for before the last."""
    handle: Any = add.remote(0)
    for _ in range(depth - 1):
        handle = add.remote(handle)
    found: int = aiogpu.get(handle)
    return found


@aiogpu.remote
async def chain_softly(depth: int) -> int:
    handle: Any = add.remote(0)
    for _ in range(depth - 1):
        handle = add_softly.remote(a=handle)
    found: int = await handle
    return found


@aiogpu.remote
def chain_of_ended(depth: int) -> int:
    """Each child has ended and was read when it becomes the argument of the next."""
    handle: Any = add.remote(0)
    for _ in range(depth - 1):
        aiogpu.get(handle)
        handle = add.remote(handle)
    found: int = aiogpu.get(handle)
    return found


@aiogpu.remote
def put_and_pass(value: Any) -> Any:
    handle = aiogpu.get(aiogpu.put(value))
    return aiogpu.get(give.remote(handle))


@aiogpu.remote
async def put_and_pass_softly(value: Any) -> Any:
    handle = await aiogpu.put(value)
    return await give.remote(handle)


@aiogpu.remote
def put_and_get(value: Any) -> Any:
    """What was put is read where it was put."""
    return aiogpu.get(aiogpu.get(aiogpu.put(value)))


@aiogpu.remote
def put_and_give(value: Any) -> Any:
    """The handle goes to whoever has called."""
    return {"handle": aiogpu.get(aiogpu.put(value))}


@aiogpu.remote
async def put_and_give_softly(value: Any) -> Any:
    return {"handle": await aiogpu.put(value)}


@aiogpu.remote
def pass_failing(how: str) -> str:
    """A child's failure as an argument of another child, seen in plain code."""
    first = fail.remote("of a child")
    if how == "ended":
        with suppress(LoudError):
            aiogpu.get(first)
    try:
        aiogpu.get(give.remote(first))
    except LoudError as error:
        return str(error)
    return "no error"


@aiogpu.remote
async def pass_failing_softly(how: str) -> str:
    first = fail.remote("of a child")
    if how == "ended":
        with suppress(LoudError):
            await first
    try:
        await give.remote(first)
    except LoudError as error:
        return str(error)
    return "no error"


@aiogpu.remote
def cancel_what_is_needed(path: str, name: str) -> str:
    """A child that is the argument of another one is cancelled."""
    first = gated.remote(path, name)
    then = give.remote(first)
    first.cancel()
    try:
        aiogpu.get(then)
    except aiogpu.TaskCancelledError as error:
        return str(error)
    return "no error"


@aiogpu.remote
async def cancel_what_is_needed_softly(path: str, name: str) -> str:
    first = gated.remote(path, name)
    then = give.remote(first)
    first.cancel()
    try:
        await then
    except aiogpu.TaskCancelledError as error:
        return str(error)
    return "no error"


@aiogpu.remote
def keep(value: Any) -> int:
    """Keep something in this process."""
    kept.append(value)
    return os.getpid()


@aiogpu.remote
def look() -> Any:
    return kept[-1]


@aiogpu.remote
def forget() -> int:
    kept.clear()
    return os.getpid()


@aiogpu.remote
def split(value: list[Any]) -> list[Any]:
    """With `num_returns`, each item is a value of its own."""
    return value


@aiogpu.remote
async def split_softly(value: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return value


@aiogpu.remote
async def gated_split(path: str, name: str, value: list[Any]) -> list[Any]:
    await pass_gate_softly(path, name)
    return value


@aiogpu.remote
def add_parts(value: list[Any]) -> Any:
    """The parts of a child, pending, are arguments of the next."""
    parts = split.options(num_returns=len(value)).remote(value)
    return aiogpu.get(total.remote(*parts))


@aiogpu.remote
async def add_parts_softly(value: list[Any]) -> Any:
    parts = split_softly.options(num_returns=len(value)).remote(value)
    return await total.remote(*parts)


@aiogpu.remote
def add_gotten_parts(value: list[Any]) -> Any:
    parts = split.options(num_returns=len(value)).remote(value)
    return sum(aiogpu.get(list(parts))) + aiogpu.get(total.remote(*parts))


@aiogpu.remote
def shared_memory() -> tuple[int, int]:
    """How many segments this process has open, and how many it has mapped."""
    return open_segments()


def open_segments() -> tuple[int, int]:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        found += "aiogpu-segment" in target
    with open("/proc/self/maps") as maps:
        return found, sum("aiogpu-segment" in line for line in maps)


class Keeper:
    """Keeps what it is given, and tells of it."""

    def __init__(self, first: Any = None) -> None:
        self.kept: list[Any] = [first]

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def all(self) -> list[Any]:
        return self.kept

    def last(self) -> Any:
        return self.kept[-1]

    def drop(self) -> None:
        self.kept.clear()

    def add(self, a: Any, b: Any = 1) -> Any:
        return a + b

    def read_last(self) -> Any:
        """The value of the handle that it keeps."""
        return aiogpu.get(self.kept[-1]["handle"])

    @aiogpu.method(num_returns=2)
    def both(self, value: list[Any]) -> Any:
        return value

    def pass_gate(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    def fail(self, text: str) -> Any:
        raise LoudError(text)


@aiogpu.remote
class Serial(Keeper):
    pass


@aiogpu.remote(max_concurrency=2)
class Threaded(Keeper):
    pass


@aiogpu.remote
class Soft(Keeper):
    async def add(self, a: Any, b: Any = 1) -> Any:
        await asyncio.sleep(0)
        return a + b

    async def read_last(self) -> Any:
        return await self.kept[-1]["handle"]


@aiogpu.remote
def train(actor: Any, by: int) -> int:
    """Calls an actor whose method waits for this task's result."""
    found: int = aiogpu.get(actor.add.remote(by))
    return found


@aiogpu.remote
async def train_softly(actor: Any, by: int) -> int:
    found: int = await actor.add.remote(by)
    return found


@aiogpu.remote
def call_in_order(actor: Any, path: str, name: str) -> list[Any]:
    """Calls of one caller, the first of which waits for its argument."""
    pending = gated.remote(path, name, "first")
    handles = [actor.keep.remote(pending)]
    handles += [actor.keep.remote(i) for i in range(3)]
    aiogpu.get(handles)
    found: list[Any] = aiogpu.get(actor.all.remote())
    return found


@aiogpu.remote
def split_by_dict() -> Any:
    """Its keys are iterated."""
    return {"x": 1, "y": 2, "z": 3}


@aiogpu.remote
def split_unwilling() -> Any:
    return 1, Unwilling()
