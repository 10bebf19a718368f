"""An endless source, few calls at a time: `f.map(...)`.

It is read as results are taken, never further than `limit` beyond them. What still
runs when the block ends is stopped.
"""

import asyncio
from collections.abc import Iterator
from itertools import count

import aiogpu


@aiogpu.remote(num_gpus=0.5, max_calls=0)
async def score(number: int) -> float:
    await asyncio.sleep(0.01)  # here a model would run
    return round(1 / number, 3)


def numbers(read: list[int]) -> Iterator[int]:
    for number in count(1):
        read.append(number)
        yield number


async def main() -> None:
    read: list[int] = []
    async with aiogpu.init(num_cpus=4, num_gpus=2):
        async with score.map(numbers(read), limit=4) as results:
            async for result in results:
                print("score:", result)
                if result < 0.2:
                    break
        print("read:", len(read))
        words = ["in", "any", "order"]
        lengths = aiogpu.remote(len).map(words, ordered=False)
        print("lengths:", sorted([length async for length in lengths]))


if __name__ == "__main__":
    aiogpu.run(main())
