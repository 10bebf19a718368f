"""What can go wrong, and how it arrives.

An exception keeps its own type. What aiogpu itself raises is an `AiogpuError` and
also the builtin that it specialises. The next task always runs.
"""

import os
import sys
import threading
from collections.abc import Awaitable, Callable

import aiogpu


@aiogpu.remote(max_retries=0)
def fail(how: str) -> None:
    match how:
        case "raise":
            raise LookupError("no such model")
        case "exit":
            sys.exit("done with it")
        case "die":
            os._exit(3)


@aiogpu.remote
def touch(thing: object) -> object:
    return thing


async def show(title: str, call: Callable[[], Awaitable[object]]) -> None:
    try:
        print(f"{title}: {await call()}")
    except (LookupError, aiogpu.AiogpuError) as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        print(f"{title}: {' < '.join(kinds[: kinds.index('Exception')])}")
        print(f"  {str(error).splitlines()[0]}")


async def main() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        await show("its own type", lambda: fail.remote("raise"))
        await show("SystemExit", lambda: fail.remote("exit"))
        await show("its worker died", lambda: fail.remote("die"))
        await show("unpicklable", lambda: touch.remote({"key": threading.Lock()}))
        await show("too much", lambda: touch.options(num_gpus=8).remote(1))
        await show("ill-valued", lambda: touch.options(num_gpus=1.5).remote(1))
        await show("called directly", lambda: touch(1))  # type: ignore[operator]
        await show("the next task", lambda: touch.remote("runs"))


if __name__ == "__main__":
    aiogpu.run(main())
