"""Tasks and actors that take, give and keep values: light, as workers import them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly, say


class Sighted:
    """Notes in a file which process unpickles it."""

    def __init__(self, path: str, name: str = "sighted") -> None:
        self.path = path
        self.name = name

    def __reduce__(self) -> Any:
        return see, (self.path, self.name)


def see(path: str, name: str) -> Sighted:
    """Unpickle a `Sighted`, and note the process in a file."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return Sighted(path, name)


class LoudError(Exception):
    """Can be pickled."""


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
"""Values that tasks leave to the next task of their process."""


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
    """Wait at the gate, then return the value."""
    await pass_gate_softly(path, name)
    return value


@aiogpu.remote
def tell(path: str, name: str, *_needs: Any) -> str:
    """Say at the gate that the task runs."""
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
    """Read a nested handle in plain code."""
    return aiogpu.get(box["handle"])


@aiogpu.remote
async def await_nested(box: dict[str, Any]) -> Any:
    """Read a nested handle in a coroutine."""
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
    """Make each child the argument of the next; wait for the last alone."""
    handle: Any = add.remote(0)
    for _ in range(depth - 1):
        handle = add.remote(handle)
    return int(aiogpu.get(handle))


@aiogpu.remote
async def chain_softly(depth: int) -> int:
    handle: Any = add.remote(0)
    for _ in range(depth - 1):
        handle = add_softly.remote(a=handle)
    return int(await handle)


@aiogpu.remote
def chain_of_ended(depth: int) -> int:
    """Read each child's result before making it the argument of the next."""
    handle: Any = add.remote(0)
    for _ in range(depth - 1):
        aiogpu.get(handle)
        handle = add.remote(handle)
    return int(aiogpu.get(handle))


@aiogpu.remote
def put_and_pass(value: Any) -> Any:
    handle = aiogpu.put(value)
    return aiogpu.get(give.remote(handle))


@aiogpu.remote
async def put_and_pass_softly(value: Any) -> Any:
    handle = aiogpu.put(value)
    return await give.remote(handle)


@aiogpu.remote
def put_and_get(value: Any) -> Any:
    """Read a value in the task that put it."""
    return aiogpu.get(aiogpu.put(value))


@aiogpu.remote
def put_and_give(value: Any) -> Any:
    """Return the handle of a put value to the caller."""
    return {"handle": aiogpu.put(value)}


@aiogpu.remote
async def put_and_give_softly(value: Any) -> Any:
    return {"handle": aiogpu.put(value)}


@aiogpu.remote
def pass_failing(how: str) -> str:
    """Give a failed child as an argument to another child, in plain code."""
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
def cancel_an_argument(path: str, name: str) -> str:
    """Cancel a child that is another child's argument."""
    first = gated.remote(path, name)
    then = give.remote(first)
    first.cancel()
    try:
        aiogpu.get(then)
    except aiogpu.TaskCancelledError as error:
        return str(error)
    return "no error"


@aiogpu.remote
async def cancel_an_argument_softly(path: str, name: str) -> str:
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
    """Keep a value in this process."""
    kept.append(value)
    return os.getpid()


@aiogpu.remote
def bytes_kept() -> list[int]:
    """Return the byte with which each kept array is filled."""
    assert all((array == array[0]).all() for array in kept)
    return [int(array[0]) for array in kept]


@aiogpu.remote
def changes(*arrays: Any) -> list[int]:
    """Change each array; return the first number of each before and after."""
    numbers: list[int] = []
    for array in arrays:
        numbers.append(int(array[0]))
        array[:] = 3
        numbers.append(int(array[0]))
    return numbers


@aiogpu.remote
def forget() -> int:
    kept.clear()
    return os.getpid()


@aiogpu.remote
def split(value: list[Any]) -> list[Any]:
    """Return a list; with `num_returns`, each item has its own handle."""
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
async def cancel_a_copy_softly(path: str) -> str:
    import asyncio

    slow = gated.remote(path, "slow", 5)
    other = (await give_boxed.remote({"handle": slow}))["handle"]
    other.cancel()
    try:
        return str(await slow)
    except asyncio.CancelledError:
        return "cancelled"


@aiogpu.remote
def cancel_a_copy(path: str) -> str:
    slow = gated.remote(path, "slow", 5)
    aiogpu.get(give_boxed.remote({"handle": slow}))["handle"].cancel()
    try:
        return str(aiogpu.get(slow))
    except aiogpu.TaskCancelledError:
        return "cancelled"


@aiogpu.remote
async def cancel_a_part(path: str) -> int:
    """Cancel one of two results; say "told" when a dependent has failed."""
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
    """Give the pending parts of a child's result to the next child."""
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
    """Put a value, keep what is read back, and drop the handle."""
    kept.append(aiogpu.get(aiogpu.put(value)))


@aiogpu.remote
def train(actor: Any, by: int) -> int:
    """Call an actor."""
    return int(aiogpu.get(actor.add.remote(by)))


@aiogpu.remote
async def train_softly(actor: Any, by: int) -> int:
    return int(await actor.add.remote(by))


@aiogpu.remote
def call_in_order(actor: Any, path: str, name: str) -> list[Any]:
    """Make calls, the first of which waits for its argument; return what was kept."""
    pending = gated.remote(path, name, "first")
    aiogpu.get([actor.keep.remote(argument) for argument in (pending, 0, 1, 2)])
    return list(aiogpu.get(actor.all.remote()))


@aiogpu.remote
def split_by_dict() -> Any:
    """Return a dictionary, whose keys become the results."""
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
    """Print, put a value, print, and give the value to a child."""
    import numpy as np

    for i in range(300):
        print("before", i)
    handle = aiogpu.put(np.ones(1 << 20, np.uint8))
    for i in range(300):
        print("after", i)
    return aiogpu.get(give_sum.remote(handle))


@aiogpu.remote(max_retries=0)
def make_and_kill(size: int) -> Any:
    """Put a large value, and kill the process before it returns."""
    import numpy as np

    kept.append(aiogpu.put(np.ones(size)))
    os.kill(os.getpid(), 9)


@aiogpu.remote
def how_many(*values: object) -> int:
    return len(values)


@aiogpu.remote
class Numbering:
    def how_many(self, *values: object) -> int:
        return len(values)


class Keeper:
    """Keeps its arguments, and returns them."""

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
        """Read the handle that was kept last."""
        return aiogpu.get(self.kept[-1]["handle"])

    @aiogpu.method(num_returns=2)
    def both(self, value: list[Any]) -> Any:
        return value

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


@aiogpu.remote
def put_and_use_in_plain_code() -> list[Any]:
    """Use what `put` returns in each way that a plain task uses a handle."""
    one, two = aiogpu.put([1]), aiogpu.put([2])
    ready, pending = aiogpu.wait([one, two], num_returns=2)  # type: ignore[list-item]
    nested = aiogpu.get(aiogpu.put({"inner": aiogpu.put([3])}))
    return [
        aiogpu.get(aiogpu.put("value")),
        aiogpu.get([one, two]),  # type: ignore[list-item]
        (len(ready), len(pending)),
        aiogpu.get(nested["inner"]),
        aiogpu.get(give.remote(one)),
        next(iter(aiogpu.as_completed([two]))) is two,  # type: ignore[list-item]
    ]


@aiogpu.remote
class Putting:
    def put_and_use(self) -> list[Any]:
        return put_and_use_in_plain_code.__wrapped__()


@aiogpu.remote
def fill(shared: Any, queues: list[Any]) -> Any:
    shared["filled"] = 1
    queues[0].put(2)
    return shared


@aiogpu.remote
def fill_inner(outer: Any) -> Any:
    """Fill the proxy that lies in a proxy, and return it."""
    inner = outer["inner"]
    inner["filled"] = 1
    return inner
