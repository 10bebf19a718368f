"""Tasks and actors that get handles, or make actors. Light to import."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiogpu
from tests.contract.actor_classes import Counter
from tests.support.gate import pass_gate


@aiogpu.remote
def add_to(counter: Any, k: int) -> int:
    """Call an actor in a plain task."""
    return int(aiogpu.get(counter.add.remote(k)))


@aiogpu.remote
def add_twice(counter: Any, k: int) -> list[int]:
    """Call an actor twice in a plain task."""
    return [aiogpu.get(counter.add.remote(k)) for _ in range(2)]


@aiogpu.remote
async def add_soon(counter: Any, k: int) -> int:
    """Call an actor in a coroutine."""
    return int(await counter.add.remote(k))


@aiogpu.remote
def make_and_use(start: int) -> list[int]:
    """Make an actor that ends with this task."""
    counter = Counter.remote(start)
    return list(aiogpu.get([counter.add.remote(), counter.add.remote()]))


@aiogpu.remote
def make_one(start: int) -> Any:
    """Make an actor and give it away."""
    return Counter.remote(start)


@aiogpu.remote
def pass_on(start: int) -> Any:
    """Give away an actor that another task has made."""
    return aiogpu.get(make_one.remote(start))


@aiogpu.remote
def add_to_named(name: str, k: int) -> int:
    """Find an actor by its name."""
    return int(aiogpu.get(aiogpu.get_actor(name).add.remote(k)))


@aiogpu.remote
def make_too_large() -> None:
    """Make an actor that needs more GPUs than the node has."""
    aiogpu.get(Counter.options(num_gpus=64).remote().add.remote())


@aiogpu.remote
def end(counter: Any, is_killed: bool) -> None:
    """End an actor from a task."""
    if is_killed:
        aiogpu.kill(counter)
    else:
        counter.leave.remote()


@aiogpu.remote
class Holder:
    """Keeps a handle."""

    def __init__(self, counter: Any = None) -> None:
        self.counter = counter

    def take(self, counter: Any) -> None:
        self.counter = counter

    def drop(self) -> None:
        self.counter = None

    def make(self, start: int) -> None:
        self.counter = Counter.remote(start)

    def add(self, k: int) -> int:
        return int(aiogpu.get(self.counter.add.remote(k)))

    def add_by_myself(self, me: Any) -> int:
        return int(aiogpu.get(me.give.remote()))

    def give(self) -> Any:
        return self.counter


@aiogpu.remote
class AsyncHolder:
    """Keeps a handle, and has a loop."""

    def __init__(self, counter: Any = None) -> None:
        self.counter = counter

    async def add(self, k: int) -> int:
        return int(await self.counter.add.remote(k))


@aiogpu.remote
def add_up() -> int:
    return 1


@aiogpu.remote
def large() -> bytes:
    return bytes(1 << 20)


@aiogpu.remote
def failing() -> None:
    raise KeyError("it")


@aiogpu.remote(max_calls=1)
def gives(kind: Any) -> list[Any]:
    return [kind.remote()]


@aiogpu.remote(max_calls=1)
async def gives_softly(kind: Any) -> list[Any]:
    return [kind.remote()]


@aiogpu.remote(max_calls=1)
def gives_call(actor: Any) -> list[Any]:
    return [actor.add.remote()]


@aiogpu.remote(max_retries=0)
def gives_and_is_killed(box: Any) -> None:
    aiogpu.get(box.take.remote([add_up.remote()]))
    os.kill(os.getpid(), signal.SIGKILL)


@aiogpu.remote(num_gpus=1)
class Failing:
    def fail(self) -> None:
        raise ValueError("told")

    def fail_amid(self) -> Iterator[int]:
        yield 1
        raise ValueError("told")


@aiogpu.remote
def catches(actor: Any) -> None:
    gc.disable()
    try:
        aiogpu.get([actor.fail.remote()])
    except ValueError:
        return


@aiogpu.remote
def catches_amid(actor: Any) -> None:
    gc.disable()
    try:
        for _ in actor.fail_amid.remote():
            pass
    except ValueError:
        return


@aiogpu.remote
async def softly_catches(actor: Any) -> None:
    gc.disable()
    try:
        await actor.fail.remote()
    except ValueError:
        return


@aiogpu.remote
async def softly_catches_amid(actor: Any) -> None:
    gc.disable()
    try:
        async for _ in actor.fail_amid.remote():
            pass
    except ValueError:
        return


@aiogpu.remote
def raises(actor: Any) -> None:
    gc.disable()
    handle = actor.fail.remote()
    aiogpu.get(handle)


@aiogpu.remote
async def softly_raises(actor: Any) -> None:
    gc.disable()
    await actor.fail.remote()


HOLDERS = [
    raises,
    catches,
    catches_amid,
    softly_raises,
    softly_catches,
    softly_catches_amid,
]


@aiogpu.remote
async def find_soon(name: str) -> int:
    """Find an actor twice in a coroutine."""
    actor = await aiogpu.get_actor(name)
    again = await aiogpu.get_actor(name)
    return int(await actor.add.remote(1)) + int(await again.add.remote(1))


@aiogpu.remote
def raise_with(counter: Any) -> None:
    raise CarryingError(counter)


class CarryingError(Exception):
    """An error with a handle."""


@aiogpu.remote
async def make_pool(size: int) -> list[int]:
    async with aiogpu.ActorPool(Counter.options(num_gpus=0.5), size) as pool:
        return [count async for count in pool.add.map([1] * 4, ordered=True)]


class Relay:
    """Passes a call on along a list of actors, and waits for it."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def answer(self) -> str:
        return self.name

    def relay(self, others: list[Any]) -> str:
        if not others:
            return self.name
        return self.name + str(aiogpu.get(others[0].relay.remote(others[1:])))

    def ask_for_a_while(self, others: list[Any]) -> str:
        try:
            aiogpu.get(others[0].relay.remote(others[1:]), timeout=0.1)
        except aiogpu.TaskTimeoutError:
            return "too late"
        return "in time"

    def meet_and_ask(self, others: list[Any], path: str) -> str:
        pass_gate(path, self.name)
        return str(aiogpu.get(others[0].answer.remote()))

    def ask_by_task(self, me: list[Any]) -> str:
        return str(aiogpu.get(ask.remote(me)))

    def ask_by_maker(self, me: list[Any]) -> str:
        return str(aiogpu.get(Asking.remote(me).answer.remote()))


@aiogpu.remote
class Player(Relay):
    """One call at a time."""


@aiogpu.remote(max_concurrency=2)
class Pair(Relay):
    """Two at a time."""


@aiogpu.remote
class Soft:
    """Any number at a time."""

    async def relay(self, others: list[Any]) -> str:
        if not others:
            return "s"
        return "s" + str(await others[0].relay.remote(others[1:]))


@aiogpu.remote
class Asking:
    """Waits in its constructor."""

    def __init__(self, others: list[Any]) -> None:
        self.heard = aiogpu.get(others[0].answer.remote())

    def answer(self) -> str:
        return str(self.heard)


@aiogpu.remote
def ask(others: list[Any]) -> str:
    return str(aiogpu.get(others[0].answer.remote()))


@aiogpu.remote
def are_equal(handles: list[Any]) -> tuple[bool, bool, int]:
    first, second, third = handles
    return first == second, first == third, len(set(handles))
