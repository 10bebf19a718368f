"""Tasks that leave named shared memory and semaphores. Light to import."""

from __future__ import annotations

import os
import signal
from typing import Any

import aiogpu
from tests.support.gate import pass_gate


def leave_memory(name: str, way: str, path: str) -> None:
    """Create shared memory of this name, and end in some way."""
    from multiprocessing.shared_memory import SharedMemory

    SharedMemory(name=name, create=True, size=1000)
    if way == "error":
        raise ValueError(name)
    if way == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "exit":
        os._exit(3)
    if way == "interrupt":
        pass_gate(path, "made")
    if way == "kill":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pass_gate(path, "made")
        signal.pause()
    if way == "child" and os.fork() == 0:
        # The tracker ends only after this child, which has its pipe open.
        os.setsid()
        signal.pause()


@aiogpu.remote
class Holder:
    """An actor with shared memory."""

    def __init__(self, name: str) -> None:
        from multiprocessing.shared_memory import SharedMemory

        self.memory = SharedMemory(name=name, create=True, size=1000)

    def ready(self) -> bool:
        return True


def run_joblib(way: str) -> int:
    """Start loky's workers, and leave them running."""
    import joblib

    absolute: Any = joblib.delayed(abs)
    assert joblib.Parallel(n_jobs=2)(absolute(n) for n in (-1, 2)) == [1, 2]
    if way == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def share_tensor(way: str) -> int:
    """Share a tensor by name, from this process and from a child of it."""
    import torch
    import torch.multiprocessing as processes

    processes.set_sharing_strategy("file_system")
    queue: Any = processes.get_context("fork").SimpleQueue()
    queue.put(torch.ones(1000))
    if way == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()
