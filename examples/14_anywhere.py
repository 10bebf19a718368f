"""One file, wherever it runs: in this program, on a node of the box, on a Ray cluster.

    python examples/14_anywhere.py                      # in this program
    AIOGPU_ADDRESS=auto python examples/14_anywhere.py  # on the node of this box
    AIOGPU_ADDRESS=ray python examples/14_anywhere.py   # pip install 'aiogpu[ray]'

The address alone says where. It needs one GPU, logical at least, and two CPUs.
"""

import asyncio
import os
from collections.abc import Iterator

import aiogpu


@aiogpu.remote(num_gpus=0.25)
def embed(text: str) -> list[int]:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(aiogpu.get_gpu_ids()[0])
    return [ord(letter) for letter in text]


@aiogpu.remote
async def total(parts: list[int], more: int) -> int:
    return sum(parts) + more


@aiogpu.remote
def count(to: int) -> Iterator[int]:
    yield from range(to)


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def add(self, number: int) -> int:
        self.seen += number
        return self.seen


async def main() -> None:
    starts = os.environ.get("AIOGPU_ADDRESS", "local") in ("local", "inline", "ray")
    # What is joined has what it has.
    async with aiogpu.init(num_cpus=2, num_gpus=1) if starts else aiogpu.init():
        print(await asyncio.gather(*(embed.remote(text) for text in ("a", "bc"))))
        print(await total.remote(embed.remote("abc"), 1))
        print([number async for number in count.remote(4)])
        counter = aiogpu.remote(Counter).remote()
        print([await counter.add.remote(number) for number in (1, 2, 3)])
        async with aiogpu.placement([{"GPU": 0.5, "CPU": 1}]) as group:
            print(await embed.options(placement=group).remote("in"))
        try:
            await embed.options(num_gpus=1000).remote("never")
        except aiogpu.InfeasibleError:
            print("nobody has so many GPUs")


if __name__ == "__main__":
    aiogpu.run(main())
