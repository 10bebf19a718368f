"""The first task: decorate a function, await it.

Shows a plain function and a coroutine as tasks, many of them gathered, and what a
task prints. Each task here holds a quarter of a GPU and runs in another process.
"""

import asyncio

import aiogpu


@aiogpu.remote(num_gpus=0.25)
def square(x: int) -> int:
    return x * x


@aiogpu.remote(num_gpus=0.25)
async def greet(name: str) -> str:
    print(f"greeting {name}")
    await asyncio.sleep(0)
    return f"Hello, {name}."


async def main() -> None:
    async with aiogpu.init(num_gpus=1):
        print(await square.remote(7))
        print(await asyncio.gather(*(square.remote(i) for i in range(10))))
        print(await greet.remote("world"))

        handle = square.remote(12)
        print("the call has returned, the task has ended:", handle.done())
        print("its result:", await handle, "and once more:", await handle)


if __name__ == "__main__":
    aiogpu.run(main())
