"""Tasks that start tasks: light to import, since workers import them."""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import aiogpu
from tests.contract import tasks
from tests.support.gate import pass_gate, say


@aiogpu.remote
def several(numbers: list[int]) -> list[int]:
    return aiogpu.get([tasks.add.remote(number) for number in numbers])


class LostError(Exception):
    """An error class of this module alone."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@aiogpu.remote
def raise_below(levels: int) -> None:
    if levels:
        aiogpu.get(raise_below.remote(levels - 1))
    raise LostError(7)


@aiogpu.remote
def run_here(function: Callable[[], Any]) -> Any:
    """Run a function that a test has defined."""
    return function()


@aiogpu.remote
async def await_here(function: Callable[[], Any]) -> Any:
    """Run a coroutine function that a test has defined."""
    return await function()


def refusal(function: Callable[[], object]) -> str:
    """Return the class and the text of the error that a call raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@aiogpu.remote
def tree(path: str, name: str, levels: int) -> str:
    """Say that this task runs, then wait for the next task of the chain."""
    say(path, f"{name}{levels}")
    if levels:
        return aiogpu.get(tree.remote(path, name, levels - 1))
    return pass_gate(path, name)


@aiogpu.remote
def try_gpu_child(needs: float, path: str | None = None) -> tuple[str, int]:
    """Wait for a child that needs the GPU of this task; then go on."""
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


kept: list[Any] = []
"""Handles that a task leaves for the next task of its process."""


@aiogpu.remote
def plain_sum(n: int) -> int:
    return sum(aiogpu.get([tasks.add.remote(i) for i in range(n)]))


@aiogpu.remote
def mixed_depth(depth: int) -> int:
    """Start a coroutine that starts a plain task, and so on."""
    return 0 if depth == 0 else 1 + aiogpu.get(mixed_depth_softly.remote(depth - 1))


@aiogpu.remote
async def mixed_depth_softly(depth: int) -> int:
    import asyncio

    await asyncio.sleep(0)
    return 0 if depth == 0 else 1 + await mixed_depth.remote(depth - 1)


@aiogpu.remote
async def soft_sum(n: int) -> int:
    import asyncio

    return sum(await asyncio.gather(*(tasks.double.remote(i) for i in range(n))))


@aiogpu.remote
def sum_on_own_loop(n: int) -> int:
    """Run a loop in a plain task."""
    import asyncio

    async def main() -> int:
        return sum(await asyncio.gather(*(tasks.double.remote(i) for i in range(n))))

    return asyncio.run(main()) + aiogpu.get(tasks.add.remote(0))


def caught(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the text of the error as two texts."""
    name, _, text = refusal(call).partition(": ")
    return name, text


@aiogpu.remote
def plain_catches(name: str, *args: Any, **options: Any) -> tuple[str, str]:
    """Wait for a task of `tasks` that fails; return its error."""
    function = getattr(tasks, name).options(**options)
    return caught(lambda: aiogpu.get(function.remote(*args)))


@aiogpu.remote
async def soft_catches(name: str, *args: Any, **options: Any) -> tuple[str, str]:
    try:
        await getattr(tasks, name).options(**options).remote(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@aiogpu.remote
def plain_fails_by_child() -> None:
    aiogpu.get(tasks.fail.remote(LookupError, "of the child"))


@aiogpu.remote
def same_failure_twice() -> list[tuple[str, str]]:
    handle = tasks.fail.remote(LookupError, "again")
    good = tasks.add.remote(1)
    failures = [caught(lambda: aiogpu.get([good, handle])) for _ in range(2)]
    assert aiogpu.get(good) == 2
    return failures


@aiogpu.remote
async def say_and_wait(path: str, name: str) -> None:
    import asyncio

    say(path, name)
    open(f"{path}-{name}", "w").close()
    try:
        await asyncio.Event().wait()
    finally:
        say(path, f"{name}-ended")


def running_child(path: str) -> aiogpu.Handle[None]:
    """Start a child, and return when it runs, however long its start takes."""
    handle = say_and_wait.remote(path, "child")
    while not os.path.exists(f"{path}-child"):
        caught(lambda: aiogpu.get(handle, timeout=0.02))
    return handle


@aiogpu.remote
def plain_times_out(path: str) -> tuple[list[tuple[str, str]], bool]:
    handle = running_child(path)
    first = caught(lambda: aiogpu.get(handle, timeout=0.05))
    second = caught(lambda: aiogpu.get([handle], timeout=0.01))
    return [first, second], handle.done()


@aiogpu.remote
def plain_resumes(path: str) -> tuple[bool, str]:
    """Wait for a child until a timeout, and wait again.

    The task is the gate of its child, as on an inline node the task blocks the loop of
    the program.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        handle = tasks.gated_coroutine.remote(path, "child")
        while not select.select([listener], [], [], 0)[0]:
            name, _ = caught(lambda: aiogpu.get(handle, timeout=0.02))
            assert name == "TaskTimeoutError"
        was_done = handle.done()
        visitor, _ = listener.accept()
        visitor.recv(100)
        visitor.close()
        return was_done, aiogpu.get(handle)


@aiogpu.remote
def plain_cancels(path: str) -> list[Any]:
    waiting, running = tasks.add.remote(1), say_and_wait.remote(path, "child")
    for handle in (waiting, running):
        while handle is running and not os.path.exists(f"{path}-child"):
            caught(lambda: aiogpu.get(running, timeout=0.02))
        assert handle.cancel()
        assert handle.cancel()
        assert handle.cancelled()
    return [*(caught(lambda h=h: aiogpu.get(h)) for h in (waiting, running))]


@aiogpu.remote(num_gpus=1)
def plain_greedy() -> list[tuple[str, str]]:
    """Wait for a child that needs the GPU of this task; then for two of these."""
    greedy = [tasks.add.options(num_gpus=1).remote(i) for i in range(3)]
    return [
        caught(lambda: aiogpu.get(greedy[0])),
        caught(lambda: aiogpu.get(greedy[2:0:-1])),
        caught(lambda: aiogpu.get(greedy[1])),
    ]


@aiogpu.remote(num_gpus=1)
async def soft_greedy() -> list[str]:
    import asyncio

    greedy = [tasks.add.options(num_gpus=1).remote(i) for i in range(2)]
    ended = await asyncio.gather(*greedy, return_exceptions=True)
    return [type(error).__name__ for error in ended]


@aiogpu.remote(num_gpus=1)
def plain_starts_greedy() -> int:
    """Start a child that does not fit, and wait for a child that does."""
    tasks.add.options(num_gpus=1).remote(1)
    return aiogpu.get(tasks.add.remote(1))


@aiogpu.remote(num_gpus=1)
async def soft_starts_greedy() -> int:
    unawaited = tasks.add.options(num_gpus=1).remote(1)
    result = await tasks.add.remote(1)
    assert not unawaited.done()
    return result


@aiogpu.remote(num_gpus=1)
def grandparent_greedy() -> tuple[str, str]:
    return aiogpu.get(plain_catches.options(name="middle").remote("add", 1, num_gpus=1))


@aiogpu.remote
def plain_leaves(path: str) -> str:
    """End while one child runs and another waits."""
    running_child(path)
    tasks.add.options(num_gpus=1).remote(1)
    return "left"


@aiogpu.remote
async def soft_leaves(path: str) -> str:
    running = say_and_wait.remote(path, "child")
    running.add_done_callback(lambda _: None)
    await tasks.gated_coroutine.__wrapped__(path, "parent")  # type: ignore[attr-defined]
    tasks.add.options(num_gpus=1).remote(1)
    return "left"


@aiogpu.remote
def plain_waits(path: str) -> None:
    aiogpu.get(say_and_wait.remote(path, "child"))


@aiogpu.remote
async def soft_waits(path: str) -> None:
    await say_and_wait.remote(path, "child")


@aiogpu.remote
def misuses() -> list[tuple[str, str]]:
    import asyncio

    handle = tasks.add.remote(1)

    async def get_on_a_loop() -> None:
        aiogpu.get(handle)

    async def await_handle() -> None:
        await handle

    return [
        caught(lambda: bool(handle)),
        caught(lambda: asyncio.run(get_on_a_loop())),
        caught(lambda: asyncio.run(await_handle())),
        caught(lambda: aiogpu.get(1)),  # type: ignore[call-overload]
        caught(lambda: aiogpu.get(handle, timeout=-1)),
        caught(lambda: pickle.dumps(handle)),
    ]


@aiogpu.remote
def keeps() -> None:
    kept[:] = [tasks.add.remote(1)]


@aiogpu.remote
def gets_kept() -> tuple[str, str]:
    return caught(lambda: aiogpu.get(kept.pop()))


@aiogpu.remote
def unreadable_twice() -> list[tuple[str, str]]:
    handle = tasks.unreadable.remote("1 / 0")
    return [caught(lambda: aiogpu.get(handle)) for _ in range(2)]


@aiogpu.remote
def facts() -> tuple[Any, ...]:
    """Return what the task sees of itself before, while and after its child runs."""
    context = aiogpu.get_runtime_context
    before = context().task_name, aiogpu.get_gpu_ids()
    child = aiogpu.get(tasks.where.options(num_gpus=1, name="child").remote())
    after = context().task_name, aiogpu.get_gpu_ids()
    return before, (child["name"], child["ids"], child["visible"]), after


async def keep_in_flight(path: str, count: int) -> None:
    """Keep calls in flight for ever; report once as many have ended."""

    def start() -> asyncio.Task[int]:
        return asyncio.create_task(tasks.add.remote(1).coro())

    flying, ended = {start() for _ in range(count)}, 0
    while True:
        done, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
        flying |= {start() for _ in done}
        if ended < count <= ended + len(done):
            say(path, "pump")
        ended += len(done)


@aiogpu.remote(num_cpus=0)
async def pump(path: str, count: int) -> None:
    await keep_in_flight(path, count)


@aiogpu.remote(num_cpus=0)
class Pump:
    async def run(self, path: str, count: int) -> None:
        await keep_in_flight(path, count)
