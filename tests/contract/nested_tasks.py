"""The tasks of the tests of tasks that start tasks: light, since workers import it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import aiogpu
from tests.contract import tasks
from tests.support.gate import pass_gate, say


@aiogpu.remote
def increased(number: int) -> int:
    return aiogpu.get(tasks.add.remote(number))


@aiogpu.remote
def several(numbers: list[int]) -> list[int]:
    return aiogpu.get([tasks.add.remote(number) for number in numbers])


@aiogpu.remote
def depth(left: int) -> int:
    return 1 + aiogpu.get(depth.remote(left - 1)) if left else 0


@aiogpu.remote
async def depth_of_coroutines(left: int) -> int:
    return 1 + await depth_of_coroutines.remote(left - 1) if left else 0


class LostError(Exception):
    """A class that has no other home than this module."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@aiogpu.remote
def raise_below(levels: int) -> None:
    if levels:
        aiogpu.get(raise_below.remote(levels - 1))
    raise LostError(7)


@aiogpu.remote
def fail_until(path: str, times: int) -> int:
    """Fail with this module's own error, counting in a file."""
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        count = len(file.read())
    if count <= times:
        raise LostError(count)
    return count


@aiogpu.remote
def run_here(function: Callable[[], Any]) -> Any:
    """Run what the test has written next to its assertions."""
    return function()


@aiogpu.remote
async def await_here(function: Callable[[], Any]) -> Any:
    """The same for an `async def`."""
    return await function()


def refusal(function: Callable[[], object]) -> str:
    """The class and the text of what a call raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@aiogpu.remote
def wait_for_ever() -> None:
    threading.Event().wait()


@aiogpu.remote
def leave_child(path: str, name: str, child: str) -> None:
    """Start a child, wait until it runs, and end without it."""
    tasks.gated.remote(path, child)
    pass_gate(path, name)


@aiogpu.remote
def leave_many(path: str, count: int) -> None:
    """Start children that cannot begin, and end without them."""
    for number in range(count):
        tasks.gated.remote(path, f"child{number}")


@aiogpu.remote
async def leave_child_softly(path: str, name: str, child: str) -> None:
    import asyncio

    tasks.gated.remote(path, child)
    await asyncio.to_thread(pass_gate, path, name)


@aiogpu.remote
def tree(path: str, name: str, levels: int) -> str:
    """A chain of tasks, each of which says that it runs and waits for the next."""
    say(path, f"{name}{levels}")
    if levels:
        return aiogpu.get(tree.remote(path, name, levels - 1))
    return pass_gate(path, name)


@aiogpu.remote
def try_gpu_child(needs: float, path: str | None = None) -> tuple[str, int]:
    """Wait for a child that needs what this task may hold; then go on."""
    child = tasks.add.options(num_gpus=needs, name="child").remote(1)
    if path is not None:
        pass_gate(path, f"tree-{os.environ['CUDA_VISIBLE_DEVICES']}")
    told = refusal(lambda: aiogpu.get(child))
    return told, aiogpu.get(tasks.add.remote(40))


@aiogpu.remote
def outlive(path: str) -> int:
    """Leave a thread behind that waits for a child of this task."""
    heard = threading.Event()

    def wait() -> None:
        child = tasks.gated.remote(path, "child")
        heard.set()
        said = refusal(lambda: aiogpu.get(child))
        say(path, said.split(":")[0])
        while aiogpu.get_runtime_context().task_id:
            os.sched_yield()
        said = refusal(lambda: tasks.add.remote(1))
        say(path, said.split(":")[0])

    threading.Thread(target=wait, daemon=True).start()
    heard.wait()
    return os.getpid()


@aiogpu.remote
def count_lines(path: str, mark: str) -> None:
    with open(path, "a") as file:
        file.write(f"{mark}\n")


@aiogpu.remote
def start_anew(place: str, path: str) -> int:
    """Start a child that waits for ever; then die, the first time."""
    with open(place, "a+") as file:
        file.write("x")
        file.flush()
        file.seek(0)
        attempt = len(file.read())
    child = tasks.gated.remote(path, f"child{attempt}")
    pass_gate(path, f"parent{attempt}")
    if attempt == 1:
        os._exit(3)
    return attempt + len(aiogpu.get(child))


@aiogpu.remote
def said_below(text: str) -> None:
    print(f"{text} begins")
    aiogpu.get(tasks.output.remote([f"{text} {number}" for number in range(3)]))
    print(f"{text} ends")
