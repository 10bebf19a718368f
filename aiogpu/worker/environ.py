"""Sets a worker's environment, before anything of the user's is unpickled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Final

from aiogpu.wire.messages import Bind
from aiogpu.worker.context import current

_given: Final[set[str]] = set()
_found: Final[dict[bytes, bytes]] = {}
"""The variables that each task finds; see `restore`."""


def bind(message: Bind) -> None:
    """Take on the environment and the devices that this worker has for life."""
    for name, value in message.environ.items():
        keep(name, value)
    _given.update(message.environ)
    current.accelerators = message.accelerators
    if message.cpus:
        _pin(message.cpus)
    if message.gpu_memory:
        # Of no use to most workers.
        from aiogpu.worker.gpu_memory import limit_torch

        limit_torch(message.gpu_memory)


def _pin(cpus: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        # They may have been taken away meanwhile, by a cpuset say.
        sys.stderr.write(
            f"aiogpu: this worker could not be pinned to CPUs {cpus}, which are near "
            f"its GPUs: {error}\n"
        )


def is_given(names: Iterable[str]) -> bool:
    """Whether the assignment has set one of these variables."""
    return not _given.isdisjoint(names)


def keep(name: str, value: str) -> None:
    """Set a variable that tasks find unchanged, whatever one of them does to it."""
    os.environ[name] = value
    _found[os.fsencode(name)] = os.fsencode(value)


def drop(name: str) -> None:
    """Forget a variable that was kept, and unset it."""
    _found.pop(os.fsencode(name), None)
    os.environ.pop(name, None)


def find() -> None:
    """Note the variables that tasks find, before the worker's first task begins."""
    _found.update(os.environb)


def restore() -> None:
    """Give the next task the variables that this one found.

    What a task has changed or removed is put back. What it has added stays: libraries
    set variables as they are imported, once in a process, and read them later.
    """
    # One comparison of dicts of bytes, as the process has them; through the mapping
    # itself each entry would cost a call.
    now: dict[bytes, bytes] | None = getattr(os.environ, "_data", None)
    if now == _found:
        return
    environ = os.environb
    for name, value in _found.items():
        if environ.get(name) != value:
            environ[name] = value


def seeds() -> list[Callable[[], object]]:
    """What seeds the generators anew that libraries have imported by now.

    A fork repeats its parent's numbers. The standard library's `random` sees to
    itself after a fork; numpy's and torch's global generators do not. What torch has
    for devices is seeded when CUDA begins, which is after the fork.
    """
    found: list[Callable[[], object]] = []
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Without an argument it would take four times as long.
        found.append(lambda: numpy_random.seed(memoryview(os.urandom(16)).cast("I")))
    torch = sys.modules.get("torch")
    if torch is not None:
        found.append(torch.default_generator.seed)
    return found
