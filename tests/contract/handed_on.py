"""Tasks and actors that are given handles, or make actors: light to import."""

from __future__ import annotations

from typing import Any

import aiogpu
from tests.contract.actor_classes import Counter


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
    """The same in a coroutine."""
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
    """Give away what another task has made."""
    return aiogpu.get(make_one.remote(start))


@aiogpu.remote
def add_to_named(name: str, k: int) -> int:
    """Find an actor by its name."""
    return int(aiogpu.get(aiogpu.get_actor(name).add.remote(k)))


@aiogpu.remote
def make_too_large() -> None:
    """Ask for more than there is."""
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
    """The same, with a loop."""

    def __init__(self, counter: Any = None) -> None:
        self.counter = counter

    async def add(self, k: int) -> int:
        return int(await self.counter.add.remote(k))
