"""What type checkers must refuse: the lines marked `# refused`, and no other.

A line marked `# refused by pyright` is one that mypy cannot tell.
"""

from __future__ import annotations

import aiogpu
from aiogpu import Handle, sync


@aiogpu.remote
def embed(x: int, *, scale: float = 1.0) -> str:
    return str(x * scale)


@aiogpu.remote
async def fetch(url: str) -> bytes:
    return url.encode()


async def arguments() -> None:
    embed.remote("1")  # refused
    embed.remote()  # refused
    embed.remote(1, 2)  # refused
    embed.remote(1, scael=2)  # refused
    embed.remote(1, scale="2")  # refused
    fetch.remote(b"a")  # refused
    embed.options(num_gpus=1).remote("1")  # refused


async def handles_as_arguments() -> None:
    text: bytes = await embed.remote(embed.remote(1))  # refused
    embed.remote([embed.remote(1)])  # refused
    print(text)


async def results() -> None:
    number: int = await embed.remote(1)  # refused
    text: str = embed.remote(1)  # refused
    handle: Handle[bytes] = embed.remote(1)  # refused
    data: str = await fetch.remote("a")  # refused
    late: str = fetch.options(timeout=1).remote("a").result()  # refused
    print(number, text, handle, data, late)


async def handles() -> None:
    handle = embed.remote(1)
    print(handle + "a")  # refused
    print(handle.upper())  # refused
    handle.task_name = 1  # refused
    print(len(await fetch.remote(1)))  # refused
    print(not handle)  # refused by pyright


@aiogpu.remote
def pair(x: int, y: int) -> int:
    return x + y


@aiogpu.remote
def nothing() -> None: ...


async def handles_that_end() -> None:
    aiogpu.wait(embed.remote(1))  # refused
    aiogpu.wait([embed.remote(1)], 1)  # refused
    aiogpu.wait([embed.remote(1)], num_returns="1")  # refused
    aiogpu.as_completed(embed.remote(1))  # refused
    aiogpu.as_completed([1])  # refused
    aiogpu.as_completed([embed.remote(1)], timeout=1)  # refused


async def maps() -> None:
    embed.map(["a"])  # refused
    embed.map(1)  # refused
    embed.map([1], limit="2")  # refused
    embed.map([1], 2)  # refused
    embed.map([1], orderd=False)  # refused
    embed.map([1], chunk="all")  # refused
    embed.map([1], chunk=2.0)  # refused
    pair.map([1])  # refused by pyright
    nothing.map([1])  # refused
    for text in embed.map([1]):  # refused
        print(text)
    async for text in embed.map([1]):
        print(text + 1)  # refused
    async for data in fetch.map(["a"]):
        print(data + "b")  # refused
    with embed.map([1]):  # refused
        pass
    numbers: aiogpu.Results[int] = embed.map([1])  # refused
    print(numbers)


@aiogpu.remote(num_gpu=1)  # refused
def unknown_option() -> None: ...


@aiogpu.remote(num_gpus="1")  # refused
def ill_typed_option() -> None: ...


@aiogpu.remote("embed")  # refused
def an_option_without_its_name() -> None: ...


def options_of_a_function() -> None:
    embed.options(num_gpu=1)  # refused
    embed.options(num_gpus="1")  # refused
    embed.options(retry_exceptions=[ValueError()])  # refused
    embed.options(runtime_env={"env_vars": {"A": 1}})  # refused
    embed.options(gpu_strategy="packed")  # refused
    embed.options(1)  # refused


class Encoder:
    @aiogpu.method
    def embed(self, text: str) -> list[float]:
        return [float(len(text))]


Encoders = aiogpu.remote(Encoder)


async def actors() -> None:
    handle = Encoders.remote()
    encoder = aiogpu.typed(handle)
    encoder.embed.remote(1)  # refused
    encoder.embed.remote()  # refused
    encoder.embed.remote("a", 2)  # refused
    encoder.embde.remote("a")  # refused
    text: str = await encoder.embed.remote("a")  # refused
    other: aiogpu.ActorHandle[str] = handle  # refused
    print(text, other)
    aiogpu.kill(encoder)  # refused
    aiogpu.kill(handle, True)  # refused
    aiogpu.typed(Encoders)  # refused
    Encoders.options(max_restart=1)  # refused
    Encoders.options(concurrency_groups={"io": "2"})  # refused


def waited_for() -> None:
    number: int = aiogpu.get(embed.remote(1))  # refused
    texts: list[bytes] = aiogpu.get([embed.remote(1)])  # refused
    aiogpu.get(embed)  # refused
    aiogpu.get(embed.remote(1), 2)  # refused
    aiogpu.get(embed.remote(1), timeout="2")  # refused
    aiogpu.get(embed.remote(1), embed.remote(2))  # refused
    print(number, texts)
    embed.options(lifetime="attached")  # refused


def called_directly() -> None:
    text: str = embed(1)  # refused
    print(text, embed(2).upper())  # refused


@aiogpu.batch(max_size=8)
async def measure(texts: list[str]) -> list[float]:
    return [len(text) for text in texts]


class Model:
    @aiogpu.batch(max_size=8)
    async def embed(self, texts: list[str]) -> list[float]:
        return [len(text) for text in texts]


async def batched(model: Model) -> None:
    await measure(1)  # refused
    await measure(["a"])  # refused
    await measure("a", "b")  # refused
    await model.embed(1)  # refused
    await model.embed(["a"])  # refused
    await model.embed()  # refused
    await model.embed(texts="a")  # refused
    text: str = await model.embed("a")  # refused
    numbers: list[float] = await measure("a")  # refused
    print(text, numbers)


async def takes_one(text: str) -> list[float]:
    return [len(text)]


async def gives_one(texts: list[str]) -> float:
    return len(texts)


async def takes_two(texts: list[str], factor: float) -> list[float]:
    return [len(text) * factor for text in texts]


def gives_at_once(texts: list[str]) -> list[float]:
    return [len(text) for text in texts]


def decorators() -> None:
    aiogpu.batch(max_size=8)(takes_one)  # refused
    aiogpu.batch(max_size=8)(gives_one)  # refused
    aiogpu.batch(max_size=8)(takes_two)  # refused
    aiogpu.batch(max_size=8)(gives_at_once)  # refused
    aiogpu.batch(max_size="8")  # refused
    aiogpu.batch(max_size=8, max_wiat=1)  # refused
    aiogpu.batch(8)  # refused
    aiogpu.batch()  # refused


async def nodes() -> None:
    await aiogpu.init(num_gpus=0.5)  # refused
    await aiogpu.init(1)  # refused
    await aiogpu.init(preload=[1])  # refused
    await aiogpu.init(nmu_gpus=1)  # refused
    sync.init(num_gpus=0.5)  # refused
    aiogpu.lease(max_calls=1)  # refused
    sync.lease(num_gpus="1")  # refused
    aiogpu.gang(embed, 2, placement=None)  # refused
    with aiogpu.init():  # refused
        pass
    print((await aiogpu.status()).devicse)  # refused
    print(aiogpu.status().devices)  # refused


async def placements() -> None:
    aiogpu.placement([{"GPU": 1}], "TIGHT")  # refused
    aiogpu.placement({"GPU": 1})  # refused
    aiogpu.placement([{"GPU": 1}], lifetime="attached")  # refused
    embed.options(placement="group")  # refused
    embed.options(bundle="0")  # refused


def misspelt() -> None:
    from aiogpu import Handel  # refused

    print(Handel)
    aiogpu.nope()  # refused
    aiogpu.remotee(embed)  # refused
    aiogpu.run(embed)  # refused
    print(aiogpu.accelerators.NVIDIA_A1000)  # refused
    aiogpu.accelerators.register(1)  # refused


def queues_without_a_loop(numbers: sync.Queue[int]) -> None:
    numbers.put("text")  # refused
    numbers.get(most=1)  # refused
