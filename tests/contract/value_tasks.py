"""Tasks and actors that take, give and keep values: light, as workers import them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly, say


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


kept: list[Any] = []
"""What a task leaves for the next one of its process."""


@aiogpu.remote
def give(value: Any) -> Any:
    return value


@aiogpu.remote
def add(a: Any, b: Any = 1) -> Any:
    return a + b


@aiogpu.remote
async def add_softly(a: Any, b: Any = 1) -> Any:
    import asyncio

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
    import asyncio

    return await asyncio.gather(*handles)


@aiogpu.remote
async def wait_for_nested(handles: list[Any]) -> list[Any]:
    import asyncio

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
def bytes_kept() -> list[int]:
    """The byte of which each of the kept arrays is full."""
    assert all((array == array[0]).all() for array in kept)
    return [int(array[0]) for array in kept]


@aiogpu.remote
def change(array: Any) -> None:
    array[0] = 3


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
    import asyncio

    await asyncio.sleep(0)
    return value


@aiogpu.remote
async def gated_split(path: str, name: str, value: list[Any]) -> list[Any]:
    await pass_gate_softly(path, name)
    return value


@aiogpu.remote
async def cancel_what_came_back(path: str) -> str:
    import asyncio

    slow = gated.remote(path, "slow", 5)
    other = (await give_boxed.remote({"handle": slow}))["handle"]
    other.cancel()
    try:
        return str(await slow)
    except asyncio.CancelledError:
        return "cancelled"


@aiogpu.remote
def cancel_what_came_back_plainly(path: str) -> str:
    slow = gated.remote(path, "slow", 5)
    aiogpu.get(give_boxed.remote({"handle": slow}))["handle"].cancel()
    try:
        return str(aiogpu.get(slow))
    except aiogpu.TaskCancelledError:
        return "cancelled"


@aiogpu.remote
async def cancel_a_part(path: str) -> int:
    """Who was given one of two results hears that it was cancelled."""
    a, b = gated_split.options(num_returns=2).remote(path, "slow", [1, 2])
    needs_a = give.remote(a)
    a.cancel()
    with suppress(aiogpu.TaskCancelledError):
        return int(await needs_a)
    say(path, "told")
    return int(await b)


@aiogpu.remote
def cancel_a_part_plainly(path: str) -> int:
    a, b = gated_split.options(num_returns=2).remote(path, "slow", [1, 2])
    needs_a = give.remote(a)
    a.cancel()
    with suppress(aiogpu.TaskCancelledError):
        return int(aiogpu.get(needs_a))
    say(path, "told")
    return int(aiogpu.get(b))


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
def put_and_keep(value: Any) -> None:
    """Keep what was put, as it is read here, and drop the handle."""
    kept.append(aiogpu.get(aiogpu.get(aiogpu.put(value))))


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


@aiogpu.remote
def sighted(path: str) -> Sighted:
    return Sighted(path)


@aiogpu.remote
def pid() -> int:
    return os.getpid()


@aiogpu.remote
def fail_with(_value: Any) -> None:
    raise LoudError("with an argument")


@aiogpu.remote
def give_sum(array: Any) -> int:
    return int(array.sum())


@aiogpu.remote
def full(number: int) -> Any:
    import numpy as np

    return np.full(200_000, number)


@aiogpu.remote
def wait_for_two(handles: list[Any]) -> list[int]:
    ready, pending = aiogpu.wait(handles, num_returns=2)
    assert (len(ready), len(pending)) == (2, 1)
    return sorted(aiogpu.get(handle) for handle in aiogpu.as_completed(handles))


@aiogpu.remote
def talk_and_pass() -> Any:
    """Print, put, print, and hand on what was put."""
    import numpy as np

    for i in range(300):
        print("before", i)
    handle = aiogpu.get(aiogpu.put(np.ones(1 << 20, np.uint8)))
    for i in range(300):
        print("after", i)
    return aiogpu.get(give_sum.remote(handle))


@aiogpu.remote(max_retries=0)
def make_and_kill(size: int) -> Any:
    """Put something large, and be killed before anything is given."""
    import numpy as np

    kept.append(aiogpu.get(aiogpu.put(np.ones(size))))
    os.kill(os.getpid(), 9)


@aiogpu.remote
def how_many(*values: object) -> int:
    """How many there are."""
    return len(values)


@aiogpu.remote
class Numbering:
    """The same as an actor."""

    def how_many(self, *values: object) -> int:
        """How many there are."""
        return len(values)


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

    def own_pid(self) -> int:
        return os.getpid()

    def sum_of(self, array: Any) -> int:
        return int(array.sum())


@aiogpu.remote
class Serial(Keeper):
    pass


@aiogpu.remote(max_concurrency=2)
class Threaded(Keeper):
    pass


@aiogpu.remote
class Soft(Keeper):
    async def add(self, a: Any, b: Any = 1) -> Any:
        import asyncio

        await asyncio.sleep(0)
        return a + b

    async def read_last(self) -> Any:
        return await self.kept[-1]["handle"]


@aiogpu.remote(num_returns=2)
def both(number: int) -> tuple[int, int]:
    return number, number + 1
