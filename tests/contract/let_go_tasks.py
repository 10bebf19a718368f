"""Actors that receive handles of other actors, and return some."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from threading import Lock
from typing import Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly, say


@aiogpu.remote(num_gpus=1)
class Model:
    def answer(self) -> int:
        return 42


@aiogpu.remote
def nothing(*_args: Any) -> None: ...


wait = aiogpu.remote(pass_gate)


class Plain:
    """Receives handles of models, or returns one."""

    def take(self, models: list[Any]) -> int:
        return aiogpu.get(models[0].answer.remote())  # type: ignore[no-any-return]

    def make(self) -> list[Any]:
        return [Model.remote()]

    def ask(self, maker: Any) -> int:
        (model,) = aiogpu.get(maker.make.remote())
        return aiogpu.get(model.answer.remote())  # type: ignore[no-any-return]

    def find_twice(self, name: str) -> int:
        first = aiogpu.get_actor(name)
        second = aiogpu.get_actor(name)
        return sum(aiogpu.get([first.answer.remote(), second.answer.remote()]))

    def make_and_drop(self, _models: list[Any]) -> None:
        Model.remote()

    def make_and_call(self, _models: list[Any]) -> None:
        Model.remote().answer.remote()

    def call(self, models: list[Any]) -> None:
        models[0].answer.remote()

    def pass_on(self, models: list[Any]) -> None:
        nothing.remote(models[0])

    def make_another_leave_one(self, models: list[Any]) -> None:
        """Call for a result that contains a handle, and do not wait for it."""
        models[0].make.remote()

    def fail_after_put(self, models: list[Any]) -> None:
        aiogpu.put([models[0]])
        raise ValueError


UNAWAITED = ("make_and_drop", "make_and_call", "call", "pass_on", "fail_after_put")
"""Methods that do not wait for their calls, or fail."""
Serial = aiogpu.remote(Plain)


@aiogpu.remote
class Soft:
    """Does the same on an event loop."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = 0

    async def take(self, models: list[Any]) -> int:
        return await models[0].answer.remote()  # type: ignore[no-any-return]

    async def make(self) -> list[Any]:
        return [Model.remote()]

    async def ask(self, maker: Any) -> int:
        (model,) = await maker.make.remote()
        return await model.answer.remote()  # type: ignore[no-any-return]

    async def make_at_the_gate(self) -> list[Any]:
        model = await Model.remote()
        await self._wait()
        return [model]

    async def call_at_the_gate(self) -> None:
        await self._wait()
        await nothing.remote()

    async def _wait(self) -> None:
        self.waiting += 1
        await self.gate.wait()

    async def count(self) -> int:
        return self.waiting

    async def open(self) -> None:
        self.gate.set()


@aiogpu.remote
def leave(maker: Any) -> None:
    """Do the same in a task."""
    maker.make.remote()


@aiogpu.remote
def do(method: str, models: list[Any]) -> None:
    getattr(Plain(), method)(models)


@aiogpu.remote
def ask(maker: Any) -> int:
    (model,) = aiogpu.get(maker.make.remote())
    return aiogpu.get(model.answer.remote())  # type: ignore[no-any-return]


class HoldingError(Exception):
    """Has a handle among its arguments."""


@aiogpu.remote
def fail_with_a_new_one() -> None:
    raise HoldingError(Model.remote())


@aiogpu.remote(max_restarts=1)
class Asking:
    """Calls another actor in its constructor, and keeps no handle to it."""

    def __init__(self, model: Any) -> None:
        aiogpu.get(model.answer.remote())

    def pid(self) -> int:
        return os.getpid()


def send_with_a_lock(model: Any) -> None:
    nothing.remote(model, Lock())


def pickle_by_hand(model: Any) -> None:
    pickle.dumps(model)


@aiogpu.remote(num_gpus=1, max_restarts=1)
class Fragile:
    def pid(self) -> int:
        return os.getpid()

    def break_context(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def crash(self) -> None:
        os._exit(3)


class Mourned:
    """Says at a gate that it is freed."""

    error: BaseException | None = None

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name

    def __del__(self) -> None:
        say(self.path, self.name)


@aiogpu.remote
def fail_with(path: str, name: str) -> None:
    """Fail with a local object that refers to the error, which so refers to itself."""
    thing = Mourned(path, name)
    try:
        raise ValueError(name)
    except ValueError as error:
        thing.error = error
        raise


@aiogpu.remote
async def fail_softly_with(path: str, name: str) -> None:
    """Fail in a coroutine, where the frame may not be cleared."""
    thing = Mourned(path, name)
    raise ValueError(thing.name)


@aiogpu.remote
def fail_amid_items(path: str, name: str) -> Iterator[int]:
    """Fail in a generator."""
    thing = Mourned(path, name)
    yield 1
    raise ValueError(thing.name)


@aiogpu.remote(num_cpus=0.1)
def yield_many(count: int, size: int) -> Iterator[memoryview]:
    """Yield so many values of a size."""
    for _ in range(count):
        yield memoryview(bytes(size))


@aiogpu.remote(num_cpus=0.1)
def make(size: int) -> memoryview:
    """Return a value of a size."""
    return memoryview(bytes(size))


@aiogpu.remote(num_cpus=0.1)
class Idle:
    """An actor that does nothing."""

    def ping(self) -> None:
        """Answer."""


def _take_one(size: int) -> int:
    return len(aiogpu.get(make.remote(size)))


@aiogpu.remote(num_cpus=0.1)
def take(path: str, way: str, count: int, size: int) -> None:
    """Take values and drop each."""
    if way == "items":
        for item in yield_many.options(max_buffered=1).remote(count, size):
            del item
    for _ in range(count):
        if way == "results":
            _take_one(size)
        elif way == "values":
            len(aiogpu.get(aiogpu.put(memoryview(bytes(size)))))
    aiogpu.get(make.remote(1))
    pass_gate(path, "taken")


@aiogpu.remote(num_cpus=0.1)
async def take_softly(path: str, way: str, count: int, size: int) -> None:
    """Do the same in a coroutine."""
    if way == "items":
        async for item in yield_many.options(max_buffered=1).remote(count, size):
            del item
    for _ in range(count):
        if way == "results":
            await make.remote(size)
        elif way == "values":
            await aiogpu.put(memoryview(bytes(size)))
    await make.remote(1)
    await pass_gate_softly(path, "taken")


@aiogpu.remote(num_cpus=0.1)
def drop_an_actor(path: str) -> None:
    """Make an actor, call it, and drop it."""
    idle = Idle.remote()
    aiogpu.get(idle.ping.remote())
    del idle
    aiogpu.get(make.remote(1))
    pass_gate(path, "taken")
