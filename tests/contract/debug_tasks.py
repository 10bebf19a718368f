"""Tasks and actors with breakpoints."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import aiogpu


@aiogpu.remote
def stops(count: int = 1) -> int:
    total = 0
    for number in range(count):
        breakpoint()
        total += number + 1
    return total


@aiogpu.remote
def clears_up(path: str) -> None:
    try:
        breakpoint()
        path += ".txt"
    finally:
        with open(path, "w", encoding="utf-8") as file:
            file.write("cleared up")


@aiogpu.remote
async def stops_in_coroutine(number: int) -> int:
    breakpoint()
    await asyncio.sleep(0)
    return await inner(number)


async def inner(number: int) -> int:
    return number + 1


@aiogpu.remote
def stops_in_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=append_after_stop, args=(found,))
    thread.start()
    thread.join()
    return found[0]


def append_after_stop(found: list[int]) -> None:
    number = 1
    breakpoint()
    found.append(number)


@aiogpu.remote
def stops_in_fork() -> int:
    """A fork of a worker is no worker: its debugger finds no terminal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            breakpoint()
            code = 2
        except BaseException as error:
            code = 3 if type(error).__name__ == "BdbQuit" else 4
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@aiogpu.remote
def is_traced() -> bool:
    return sys.gettrace() is not None


class Stopper:
    def __init__(self) -> None:
        self.calls = 0

    def stop(self) -> int:
        self.calls += 1
        breakpoint()
        return self.calls

    def plain(self) -> int:
        return self.calls


class AsyncStopper(Stopper):
    async def stop_in_coroutine(self) -> int:
        self.calls += 1
        breakpoint()
        await asyncio.sleep(0)
        return self.calls

    async def waits(self) -> None:
        await asyncio.Event().wait()
