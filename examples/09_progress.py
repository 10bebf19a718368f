"""Progress bars, and results as they come: `map` in chunks, `as_completed`, `wait`.

A map knows how many results will come where its items have a length, so that
`tqdm(f.map(items))` draws a whole bar by itself; rich is advanced by hand.
"""

import asyncio

from rich.progress import MofNCompleteColumn, Progress, TextColumn

import aiogpu


@aiogpu.remote
def square(number: int) -> int:
    return number * number


@aiogpu.remote
async def download(name: str, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"{name} is here"


async def main() -> None:
    async with aiogpu.init(num_cpus=4):
        results = square.map(range(10_000), chunk="auto")
        total = 0
        with Progress(TextColumn("squares"), MofNCompleteColumn()) as progress:
            bar = progress.add_task("squares", total=len(results))
            async for result in results:
                total += result
                progress.advance(bar)
        print("their sum:", total)

        handles = [download.remote("slow", 0.5), download.remote("fast", 0.01)]
        async for handle in aiogpu.as_completed(handles):
            print(await handle)

        race = [download.remote("tortoise", 60), download.remote("hare", 0.01)]
        (first,), others = await aiogpu.wait(race, timeout=30)
        print(first.result())
        for handle in others:
            handle.cancel()


if __name__ == "__main__":
    aiogpu.run(main())
