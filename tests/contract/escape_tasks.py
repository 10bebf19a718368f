"""Tasks that try to leave something behind, each in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import aiogpu
from tests.contract.tasks import daemonise
from tests.support.gate import pass_gate

kept: list[Any] = []
"""What must not be freed when its function returns."""


def deafen() -> None:
    """Ignore all that can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def fork(_path: str) -> list[int]:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return [pid]


def fork_tree(_path: str) -> list[int]:
    """Three generations, each in a session of its own and deaf."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for _ in range(2):
            os.setsid()
            deafen()
            os.write(writing, b"%d " % os.getpid())
            if os.fork():
                break
        else:
            os.write(writing, b"%d " % os.getpid())
        while True:
            signal.pause()
    text = b""
    while text.count(b" ") < 3:
        text += os.read(reading, 100)
    return [int(word) for word in text.split()]


def daemon(path: str) -> list[int]:
    if daemonise(path, "daemon"):
        deafen()
        while True:
            signal.pause()
    return []


def program(_path: str) -> list[int]:
    command = ["sleep", "1000"]
    kept.append(subprocess.Popen(command, start_new_session=True, close_fds=False))
    return [kept[-1].pid]


def deaf_program(_path: str) -> list[int]:
    source = (
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; "
        "print(flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    kept.append(child)
    assert child.stdout is not None
    child.stdout.read(1)
    return [child.pid]


def thread(_path: str) -> list[int]:
    threading.Thread(target=threading.Event().wait).start()
    return []


def thread_pool(_path: str) -> list[int]:
    kept.append(ThreadPoolExecutor(4))
    for _ in range(8):
        kept[-1].submit(threading.Event().wait)
    return []


def process_pool(_path: str) -> list[int]:
    kept.append(ProcessPoolExecutor(2, mp_context=get_context("fork")))
    found = {kept[-1].submit(os.getpid).result() for _ in range(4)}
    kept[-1].submit(signal.pause)
    return sorted(found)


def spawned_process(_path: str) -> list[int]:
    """With multiprocessing's resource tracker, which outlives all others."""
    context = get_context("spawn")
    started = context.Process(target=signal.pause)
    started.start()
    kept.append((started, context.Semaphore()))
    assert started.pid is not None
    return [started.pid]


def deaf_worker(_path: str) -> list[int]:
    deafen()
    return []


WAYS: dict[str, Callable[[str], list[int]]] = {
    way.__name__: way
    for way in (
        *(fork, fork_tree, daemon, program, deaf_program, thread, thread_pool),
        *(process_pool, spawned_process, deaf_worker),
    )
}


@aiogpu.remote(num_gpus=1, max_retries=0)
def leave(way: str, path: str) -> list[int]:
    """Leave something, wait at the gate, and give the ids of the processes."""
    pids = WAYS[way](path)
    pass_gate(path, "left")
    return pids


@aiogpu.remote(num_gpus=1, max_retries=0)
def become_another_program() -> None:
    os.execvp("sleep", ["sleep", "1000"])


@aiogpu.remote(num_gpus=1, max_retries=0)
def never_return_deaf(path: str) -> None:
    deafen()
    daemonise(path, "daemon") and threading.Event().wait()
    pass_gate(path, "deaf")
    threading.Event().wait()
