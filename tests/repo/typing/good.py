# pyright: strict
"""What type checkers must infer of the public names; nothing here may be an error."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, assert_type

import aiogpu
from aiogpu import ActorHandle, Handle, Results, Stream, sync
from aiogpu.accelerators import Device, Unwatched
from aiogpu.types import Node, NodeStatus, RemoteFunction, Why


@aiogpu.remote
def embed(x: int, *, scale: float = 1.0) -> str:
    return str(x * scale)


@aiogpu.remote
async def fetch(url: str) -> bytes:
    return url.encode()


@aiogpu.remote(num_gpus=0.25, priority=1, runtime_env={"env_vars": {"A": "1"}})
def train(steps: int) -> list[float]:
    return [0.0] * steps


@aiogpu.remote(num_cpus=2, retry_exceptions=[OSError], timeout=2.5)
async def score(steps: int) -> dict[str, float]:
    return {"loss": 1 / steps}


@aiogpu.remote()
def bare() -> None:
    return None


@aiogpu.remote
def anything(x: Any) -> Any:
    return x


def identity(x: int) -> int:
    return x


def describe(x: int, /) -> str:
    return str(x)


def runs_later(x: int) -> Coroutine[Any, Any, int]:
    raise NotImplementedError


async def handles_have_the_type_of_the_result() -> None:
    assert_type(embed.remote(1), Handle[str])
    assert_type(embed.remote(x=1, scale=2), Handle[str])
    assert_type(await embed.remote(1), str)
    assert_type(fetch.remote("a"), Handle[bytes])
    assert_type(await fetch.remote("a"), bytes)
    assert_type(train.remote(1), Handle[list[float]])
    assert_type(await train.remote(1), list[float])
    assert_type(score.remote(1), Handle[dict[str, float]])
    assert_type(await score.remote(1), dict[str, float])
    assert_type(bare.remote(), Handle[None])
    assert_type(await anything.remote(1), Any)
    assert_type(aiogpu.remote(identity).remote(1), Handle[int])
    assert_type(aiogpu.remote(num_gpus=1)(identity).remote(1), Handle[int])
    assert_type(aiogpu.remote(runs_later).remote(1), Handle[int])


@aiogpu.remote
def compare(label: str, before: list[float], after: list[float]) -> float:
    return after[-1] - before[-1]


async def a_handle_may_take_the_place_of_a_value() -> None:
    losses, start = train.remote(1), aiogpu.put([1.0])
    assert_type(start, Handle[list[float]])
    assert_type(embed.remote(compare.remote("a", [0.0], losses)), Handle[str])
    assert_type(compare.remote("a", start, losses), Handle[float])
    assert_type(compare.remote("a", start, [1.0]), Handle[float])
    assert_type(
        aiogpu.typed(Encoders.remote("a")).embed.remote(start), Handle[list[float]]
    )


async def a_handle_tells_its_result_and_its_error() -> None:
    handle = embed.remote(1)
    assert_type(handle.result(), str)
    assert_type(handle.exception(), BaseException | None)
    assert_type(handle.cancel(), bool)
    assert_type(handle.done(), bool)
    assert_type(handle.task_name, str)
    future: asyncio.Future[str] = handle
    del future


async def other_options_keep_the_types() -> None:
    options = embed.options(num_gpus=0.5, name="a", max_retries=-1)
    assert_type(options.remote(1), Handle[str])
    assert_type(options.options(max_calls=1).remote(1, scale=2), Handle[str])
    assert_type(fetch.options(timeout=1, cancel_grace=0).remote("a"), Handle[bytes])
    assert_type(await train.options(accelerator_type="A100").remote(1), list[float])
    assert_type(await train.options(gpu_strategy="spread").remote(1), list[float])
    detached = train.options(lifetime="detached")
    assert_type(detached.remote(1), Handle[list[float]])
    suited: RemoteFunction[[int], str] = aiogpu.remote(describe).options(num_cpus=2)
    assert_type(suited.remote(1), Handle[str])


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @aiogpu.method
    def add(self, k: int, *, times: int = 1) -> int:
        self.count += k * times
        return self.count

    @aiogpu.method(concurrency_group="io")
    async def load(self, path: str) -> bytes:
        return path.encode()

    def plain(self) -> int:
        return 1


class Encoder:
    def __init__(self, name: str) -> None:
        self.name = name

    @aiogpu.method
    def embed(self, text: str) -> list[float]:
        return [float(len(text))]

    def both(self, text: str) -> None:
        self.embed(text)


# As a decorator of a class, `remote` is not followed by mypy.
Encoders = aiogpu.remote(Encoder)
Counters = aiogpu.remote(num_gpus=0.5, max_restarts=1)(Counter)


async def actors_have_their_class() -> None:
    model = Encoders.remote("small")
    assert_type(model, ActorHandle[Encoder])
    assert_type(await model, ActorHandle[Encoder])
    assert_type(aiogpu.typed(model), Encoder)
    assert_type(aiogpu.typed(model).embed.remote("a"), Handle[list[float]])
    assert_type(await aiogpu.typed(model).embed.remote("a"), list[float])
    other = Encoders.options(num_gpus=1, name="b", get_if_exists=True)
    async with other.remote("large") as entered:
        assert_type(entered, ActorHandle[Encoder])
        print(await entered.embed.remote("a"))
    counter = aiogpu.typed(Counters.remote(3))
    assert_type(await counter.add.remote(1, times=2), int)
    assert_type(await counter.load.remote("a"), bytes)
    print(await Counters.remote().plain.remote())
    aiogpu.kill(model, no_restart=False)
    print(await aiogpu.get_actor("b", namespace="c").embed.remote("a"))


def plain_tasks_wait_by_get() -> None:
    assert_type(aiogpu.get(embed.remote(1)), str)
    assert_type(aiogpu.get(fetch.remote("a"), timeout=2), bytes)
    assert_type(aiogpu.get([train.remote(n) for n in range(3)]), list[list[float]])
    assert_type(aiogpu.get((embed.remote(1), embed.remote(2))), list[str])
    assert_type(aiogpu.get(bare.remote()), None)


async def asyncio_takes_handles() -> None:
    both = await asyncio.gather(embed.remote(1), fetch.remote("a"))
    assert_type(both, tuple[str, bytes])
    many = await asyncio.gather(*[train.remote(n) for n in range(3)])
    assert_type(many, list[list[float]])
    either = await asyncio.gather(embed.remote(1), return_exceptions=True)
    assert_type(either, tuple[str | BaseException])
    assert_type(await asyncio.wait_for(embed.remote(1), 1), str)
    assert_type(await asyncio.shield(embed.remote(1)), str)
    for first in asyncio.as_completed([embed.remote(1), embed.remote(2)]):
        assert_type(await first, str)
    done, pending = await asyncio.wait([embed.remote(1)])
    assert_type(done.pop().result(), str)
    del pending
    async with asyncio.TaskGroup() as group:
        task = group.create_task(embed.remote(1).coro())
        assert_type(task, asyncio.Task[str])


@aiogpu.remote
def words(text: str) -> Iterator[str]:
    yield from text.split()


@aiogpu.remote(max_buffered=2, num_cpus=0.5)
async def lengths(text: str) -> AsyncGenerator[int, None]:
    yield len(text)


def letters(text: str) -> Generator[str, None, None]:
    yield from text


class Reader:
    @aiogpu.method
    def lines(self, number: int) -> Iterator[bytes]:
        yield b"line"

    @aiogpu.method(max_buffered=1)
    async def later(self) -> AsyncIterator[float]:
        yield 1.5


async def streams_have_the_type_of_their_items() -> None:
    assert_type(words.remote("a b"), Stream[str])
    assert_type(lengths.remote("a"), Stream[int])
    assert_type(lengths.options(max_buffered=None).remote("a"), Stream[int])
    assert_type(aiogpu.remote(letters).remote("a"), Stream[str])
    async for word in words.remote("a b"):
        assert_type(word, str)
    async with lengths.remote("a") as stream:
        assert_type(await anext(stream), int)
        assert_type(stream.cancel(), bool)
    assert_type(await stream.why(), Why)
    reader = aiogpu.typed(aiogpu.remote(Reader).remote())
    assert_type(reader.lines.remote(1), Stream[bytes])
    assert_type(reader.later.remote(), Stream[float])


async def urls() -> AsyncGenerator[str, None]:
    yield "a"


async def a_map_has_the_type_of_its_results() -> None:
    assert_type(embed.map(range(3)), Results[str])
    assert_type(embed.map([True]), Results[str])
    assert_type(fetch.map(urls(), limit=2, ordered=False), Results[bytes])
    # What is given as Any may be a generator as well.
    assert_type(aiogpu.remote(describe).map({1, 2}), Results[str])
    assert_type(aiogpu.remote(len).map(["a", b"b", [1]]), Results[int])
    assert_type(embed.options(num_gpus=0.5).map(n for n in range(3)), Results[str])
    assert_type(embed.map(range(3), chunk=2), Results[str])
    assert_type(fetch.map(urls(), chunk="auto"), Results[bytes])
    assert_type(embed.map([1], chunk=None), Results[str])
    assert_type(len(embed.map([1])), int)
    later: AsyncIterator[list[float]] = train.map([1])
    async for losses in later:
        assert_type(losses, list[float])
    async with score.map([1], limit=None) as results:
        assert_type(results, Results[dict[str, float]])
        assert_type(await anext(results), dict[str, float])
        await results.aclose()


async def handles_that_end() -> None:
    handles = [embed.remote(1), embed.remote(2)]
    async for handle in aiogpu.as_completed(handles):
        assert_type(handle, Handle[str])
        assert_type(await handle, str)
    ready, pending = await aiogpu.wait(handles, num_returns=2, timeout=1)
    assert_type(ready, list[Handle[str]])
    assert_type(pending, list[Handle[str]])
    await asyncio.wait_for(aiogpu.wait(set(handles)), 1)


def handles_that_end_in_a_plain_task() -> None:
    handles = [fetch.remote("a")]
    for handle in aiogpu.as_completed(handles):
        assert_type(aiogpu.get(handle), bytes)
    ready, pending = aiogpu.wait(handles)
    assert_type(ready, list[Handle[bytes]])
    assert_type(pending, list[Handle[bytes]])


@aiogpu.batch(max_size=8)
async def measure(texts: list[str]) -> list[float]:
    return [len(text) for text in texts]


@aiogpu.batch(max_size=8)
async def measure_some(texts: Sequence[str]) -> list[float | Exception]:
    return [len(text) or ValueError(text) for text in texts]


class Model:
    @aiogpu.batch(max_size=8, max_wait=0.1, max_concurrency=2)
    async def embed(self, texts: list[str]) -> tuple[float, ...]:
        return tuple(len(text) for text in texts)

    @aiogpu.batch(max_size=8)
    async def sort(self, rows: list[list[int]]) -> list[list[int]]:
        return [sorted(row) for row in rows]

    @aiogpu.batch(max_size=8)
    async def try_all(self, items: list[int]) -> list[str | BaseException]:
        calls = [asyncio.to_thread(str, item) for item in items]
        return await asyncio.gather(*calls, return_exceptions=True)

    @staticmethod
    @aiogpu.batch(max_size=8)
    async def name(numbers: list[int | None]) -> list[str]:
        return [str(number) for number in numbers]

    @classmethod
    @aiogpu.batch(max_size=8)
    async def make(cls, numbers: list[int]) -> list[None]:
        return [None for _ in numbers]


async def a_batched_call_has_the_type_of_one_item(model: Model) -> None:
    assert_type(await measure("a"), float)
    assert_type(await measure_some("a"), float)
    assert_type(await model.embed("a"), float)
    assert_type(await Model.embed(model, "a"), float)
    assert_type(await model.sort([1]), list[int])
    assert_type(await model.try_all(1), str)
    assert_type(await model.name(None), str)
    assert_type(await Model.make(1), None)
    assert_type(await asyncio.create_task(model.embed("a")), float)
    both = await asyncio.gather(model.embed("a"), model.name(1))
    assert_type(both, tuple[float, str])


async def a_node_opens_in_two_ways() -> None:
    session = await aiogpu.init(num_cpus=2, num_gpus=1, preload=["numpy"])
    assert_type(session, Node)
    await aiogpu.shutdown()
    async with aiogpu.init(resources={"license": 2}) as session:
        assert_type(session, Node)
        assert_type(await session.status(), NodeStatus)
    async with await aiogpu.init(log_to_driver=False) as session:
        assert_type(session, Node)


async def a_node_tells_what_it_has() -> None:
    assert_type(await aiogpu.status(), NodeStatus)
    assert_type(await embed.remote(1).why(), Why)
    assert_type(await aiogpu.cluster_resources(), dict[str, float])
    assert_type(await aiogpu.available_resources(), dict[str, float])


def a_task_asks_where_it_runs() -> None:
    assert_type(aiogpu.get_gpu_ids(), list[int | str])
    context = aiogpu.get_runtime_context()
    assert_type(context.get_accelerator_ids(), dict[str, list[str]])
    assert_type(context.task_name, str)


def a_type_has_a_name() -> None:
    one: str = aiogpu.accelerators.NVIDIA_A100
    embed.options(accelerator_type=one, resources={"neuron_cores": 1})


class Board:
    kind = "BOARD"
    option = "resources['BOARD']"
    variable = "BOARD_VISIBLE"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        return tuple(Device(number) for number in range(wanted or 0))

    def assignment(
        self, ids: Sequence[int | str], environ: Mapping[str, str]
    ) -> dict[str, str]:
        return {self.variable: ",".join(map(str, ids))}

    def quantity(self, value: object) -> int:
        return 10_000

    def type_of(self, name: str | None) -> str | None:
        return name

    def watch(self) -> Unwatched:
        return Unwatched()


def a_vendor_of_ones_own_is_registered() -> None:
    aiogpu.accelerators.register(Board())


async def placements(f: aiogpu.types.RemoteFunction[[int], str]) -> None:
    group = aiogpu.placement([{"GPU": 1, "memory": "1GiB"}], "SPREAD", name="g")
    assert_type(group, aiogpu.types.Placement)
    assert_type(await group, aiogpu.types.Placement)
    async with aiogpu.placement([{"CPU": 1}]) as same:
        assert_type(same, aiogpu.types.Placement)
        assert_type(await f.options(placement=same, bundle=0).remote(1), str)
    assert_type(await group.remove(), None)


async def hand_on(jobs: aiogpu.Queue[str]) -> None:
    assert_type(await jobs.put("a"), None)
    assert_type(await jobs.get(timeout=1), str)
    assert_type(await jobs.get_batch(3), list[str])
    async for job in jobs:
        assert_type(job, str)


async def main() -> int:
    return 0


assert_type(aiogpu.run(main()), int)
assert_type(aiogpu.run(main(), debug=True), int)


# Without an event loop.


@sync.remote(num_gpus=0.25)
def halve(x: int) -> float:
    return x / 2


@sync.remote
async def load(url: str) -> bytes:
    return url.encode()


@sync.remote
def spell(text: str) -> Iterator[str]:
    yield from text


class Predictor:
    def predict(self, x: int) -> int:
        return x


def script() -> None:
    remote_predictor = sync.remote(Predictor)
    assert_type(halve.remote(1), sync.Handle[float])
    assert_type(halve.remote(1).result(timeout=5), float)
    assert_type(sync.get(load.remote("u")), bytes)
    assert_type(sync.get([halve.remote(1)]), list[float])
    assert_type(halve.options(num_cpus=2).remote(1), sync.Handle[float])
    assert_type(spell.remote("ab"), sync.ResultIterator[str])
    assert_type(next(halve.map([1])), float)
    assert_type(next(halve.map([1], return_exceptions=True)), float | Exception)
    errors_too = embed.map([1], return_exceptions=True)
    assert_type(errors_too, Results[str | Exception])
    ended, pending = sync.wait([halve.remote(1)])
    assert_type(ended, list[sync.Handle[float]])
    assert_type(pending, list[sync.Handle[float]])
    with sync.init(num_cpus=1) as node, remote_predictor.remote() as model:
        assert_type(node.cluster_resources(), dict[str, float])
        model.predict.remote(1)
    numbers: sync.Queue[int] = sync.Queue(maxsize=2)
    assert_type(numbers.get(timeout=1), int)
    assert_type(numbers.get_batch(3), list[int])
    assert_type(sync.put(1).result(), int)
    with sync.Executor(num_cpus=1) as pool:
        assert_type(pool.submit(len, "abc"), sync.Handle[int])
    assert_type(aiogpu.from_thread(fetch.remote, "u").result(), bytes)
    assert_type(aiogpu.from_thread(aiogpu.available_resources), dict[str, float])
