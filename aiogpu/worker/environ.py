"""Sets a worker's environment, before anything of the user's is unpickled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Final

from aiogpu.wire.messages import Bind
from aiogpu.worker.context import current

_bound: Final[dict[bytes, bytes]] = {}
_given: Final[set[str]] = set()


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
    _bound[os.fsencode(name)] = os.fsencode(value)


def drop(name: str) -> None:
    """Forget a bound variable, and unset it."""
    _bound.pop(os.fsencode(name), None)
    os.environ.pop(name, None)


def restore() -> None:
    """Undo what a task did to the bound variables; the next one relies on them."""
    # As bytes, since `os.environ` would encode and decode at each look.
    environ = os.environb
    for name, value in _bound.items():
        try:
            if environ[name] == value:
                continue
        except KeyError:
            pass
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
