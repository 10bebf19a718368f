"""Tasks that many tests share: light to import, since workers import them.

A task imports asyncio or subprocess when it runs: both are slow to import.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from itertools import repeat
from typing import Any

import aiogpu
from tests.support.gate import pass_gate, pass_gate_softly, say


@aiogpu.remote
def add(a: int, b: int = 1) -> int:
    return a + b


@aiogpu.remote
async def double(x: int) -> int:
    import asyncio

    await asyncio.sleep(0)
    return 2 * x


@aiogpu.remote
def echo(value: Any) -> Any:
    return value


@aiogpu.remote
def pid() -> int:
    return os.getpid()


@aiogpu.remote
def gated(path: str, name: str) -> str:
    return pass_gate(path, name)


@aiogpu.remote
async def gated_coroutine(path: str, name: str) -> str:
    return await pass_gate_softly(path, name)


@aiogpu.remote
def spin(path: str, name: str) -> None:
    try:
        say(path, name)
        while True:
            pass
    except KeyboardInterrupt:
        say(path, f"{name}-interrupted")
        raise


@aiogpu.remote
def swallow(path: str, name: str) -> None:
    is_said = False
    while True:
        try:
            if not is_said:
                say(path, name)
                is_said = True
            while True:
                pass
        except BaseException:
            continue


@aiogpu.remote
async def deaf_coroutine(path: str, name: str) -> None:
    say(path, name)
    while True:
        pass


@aiogpu.remote
def block_in_c(path: str, name: str) -> None:
    try:
        say(path, name)
    except KeyboardInterrupt:
        pass
    finally:
        # This loop runs no bytecode, so no signal handler runs.
        deque(repeat(None), maxlen=0)


@aiogpu.remote
def where() -> dict[str, Any]:
    context = aiogpu.get_runtime_context()
    return {
        "ids": aiogpu.get_gpu_ids(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "resources": dict(context.assigned_resources),
        "accelerators": context.get_accelerator_ids(),
        "task": context.task_id,
        "worker": context.worker_id,
        "node": context.node_id,
        "name": context.task_name,
        "pid": os.getpid(),
    }


@aiogpu.remote
def where_gated(path: str, name: str) -> list[int | str]:
    pass_gate(path, name)
    return aiogpu.get_gpu_ids()


@aiogpu.remote
def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


@aiogpu.remote
def meddle(name: str, value: str | None) -> str | None:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    return before


@aiogpu.remote
def fork_and_return() -> int:
    """Fork; parent and child both return from the task."""
    child = os.fork()
    if child == 0:
        print("from the child", flush=True)
        return -1
    os.waitpid(child, 0)
    return os.getpid()


@aiogpu.remote
def fork_and_exit(code: int) -> tuple[int, int]:
    """Fork; the child raises SystemExit."""
    child = os.fork()
    if child == 0:
        sys.exit(code)
    _, status = os.waitpid(child, 0)
    return os.getpid(), os.waitstatus_to_exitcode(status)


@aiogpu.remote
def spoil_stdout(way: str) -> None:
    if way == "close":
        sys.stdout.close()
    else:
        sys.stdout = sys.stderr


@aiogpu.remote
def start_sleeper(path: str, name: str) -> None:
    """Start a process in the worker's own group, then wait."""
    import subprocess

    with subprocess.Popen(["sleep", "1000"]):
        pass_gate(path, name)


@aiogpu.remote
def surroundings() -> tuple[str, list[str]]:
    return os.getcwd(), sys.path


@aiogpu.remote
def modules(*names: str) -> dict[str, bool]:
    return {name: name in sys.modules for name in names}


@aiogpu.remote
def fail(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


@aiogpu.remote
def fail_until(path: str, times: int, kind: type[BaseException]) -> int:
    """Fail `times` times, counted in a file; then return the count."""
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        count = len(file.read())
    if count <= times:
        raise kind(f"attempt {count}")
    return count


@aiogpu.remote
def die_until(path: str, times: int) -> int:
    """End the process `times` times, counted in a file; then return the count."""
    with open(path, "a+") as file:
        file.write("x")
        file.flush()
        file.seek(0)
        count = len(file.read())
    if count <= times:
        os._exit(9)
    return count


@aiogpu.remote(max_retries=0)
def exit_at_once(code: int) -> None:
    os.write(2, b"last words\n")
    os._exit(code)


@aiogpu.remote(max_retries=0)
def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait()


@aiogpu.remote(max_retries=0)
def close_all_descriptors() -> None:
    os.closerange(0, 1000)
    threading.Event().wait()


class UnreadableResult:
    """Pickles well, and raises when it is unpickled."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __reduce__(self) -> Any:
        return eval, (self.expression,)


@aiogpu.remote
def unreadable(expression: str) -> UnreadableResult:
    return UnreadableResult(expression)


@aiogpu.remote
def unpicklable() -> dict[str, Any]:
    return {"lock": [threading.Lock()]}


class AwkwardError(Exception):
    """Pickles well, and raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("awkward",)


@aiogpu.remote
def fail_awkwardly() -> None:
    raise AwkwardError(1)


class StatusError(Exception):
    """Takes other arguments than it gives its base, as `httpx.HTTPStatusError` does."""

    def __init__(self, message: str, *, code: int, holds: object = None) -> None:
        super().__init__(f"{message}: {code}")
        self.code = code
        self.holds = holds


@aiogpu.remote
def fail_with_status(*, holds_lock: bool = False) -> None:
    lock = threading.Lock() if holds_lock else None
    raise StatusError("not found", code=404, holds=lock)


@aiogpu.remote
def leave_process(path: str, name: str) -> int:
    """Start a process that outlives the task, in a session of its own."""
    import subprocess

    command = (
        "import sys, threading; "
        "from tests.support.gate import say; say(sys.argv[1], sys.argv[2]); "
        "threading.Event().wait()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", command, path, name], start_new_session=True
    )
    return child.pid


def daemonise(path: str, name: str) -> bool:
    """Leave a daemon as Unix daemons are made: two forks, a session, no descriptors.

    Returns:
        True in the daemon, False in the process that called.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        os.waitpid(child, 0)
        os.read(reading, 1)  # until the daemon has closed all
        os.close(reading)
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    say(path, name)
    os.closerange(0, 1000)
    return True


@aiogpu.remote
def leave_daemon_and_wait(path: str) -> str:
    if daemonise(path, "daemon"):
        threading.Event().wait()
    return pass_gate(path, "task")


@aiogpu.remote
def output(lines: list[str]) -> None:
    for line in lines:
        print(line)


@aiogpu.remote(max_retries=0)
def print_and_end(how: str) -> int:
    print("a line")
    if how == "error":
        raise ValueError(how)
    if how == "death":
        os._exit(3)
    return 3


@aiogpu.remote
class PrintsAndEnds:
    def end(self) -> None:
        print("a line")
        os._exit(3)


@aiogpu.remote
def raw_output(text: str) -> None:
    os.write(1, text.encode())


@aiogpu.remote
def mixed_output(path: str) -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    pass_gate(path, "printed")
    print("unfinished", end="")


@aiogpu.remote
def flood(lines: int) -> None:
    for number in range(lines):
        print(f"line {number} " + "x" * 100)


@aiogpu.remote
def clock() -> float:
    return time.monotonic()


@aiogpu.remote
async def leave_asyncio_task(path: str) -> None:
    import asyncio

    async def rest() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            say(path, "rest-ended")

    task = asyncio.create_task(rest())
    await asyncio.sleep(0)
    assert not task.done()


@aiogpu.remote(max_retries=0)
def say_as_a_worker(data: bytes) -> None:
    """Send bytes on this worker's connection to its node, then end the process."""
    import socket
    from contextlib import suppress

    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            copy = socket.socket(fileno=os.dup(int(name)))
            with copy:
                if str(copy.getpeername()).endswith("node.sock"):
                    copy.sendall(data)
                    os._exit(0)
    raise LookupError("a worker has no connection to its node")


@aiogpu.remote
def node_id() -> str:
    return aiogpu.get_runtime_context().node_id


@aiogpu.remote
def run_a_loop(path: str, name: str) -> None:
    """Wait in frames of asyncio, which are not aiogpu's."""
    import asyncio

    async def forever() -> None:
        say(path, name)
        await asyncio.Event().wait()

    asyncio.run(forever())
