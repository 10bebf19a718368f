"""Who has which share of a GPU, held against the kernel's locks. Light to import.

Each quarter of a GPU is a file. Code that was given a share locks as many quarters of
its GPU as the share has. One that finds none left has met another on the same share:
two were given the same, or one was given what another's process still had. A lock goes
with its process, so a kill cannot leave one behind.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

QUARTERS: Final = 4
_PLACE: Final = "AIOGPU_SOAK_LOCKS"


class OverlapError(AssertionError):
    """A share was given to two at once."""


def environment(directory: str) -> dict[str, str]:
    """The variable by which processes find the locks."""
    return {_PLACE: directory}


def take(gpus: list[int], amount: float) -> list[IO[bytes]]:
    """Lock so much of each of these GPUs; to be closed.

    Raises:
        OverlapError: somebody else has it.
    """
    wanted = min(QUARTERS, round(amount * QUARTERS))
    found: list[IO[bytes]] = []
    try:
        for gpu in gpus:
            _take_quarters(found, gpu, wanted)
    except OverlapError:
        for file in found:
            file.close()
        raise
    return found


@contextmanager
def held(gpus: list[int], amount: float) -> Iterator[None]:
    """The same, for the time of the block."""
    files = take(gpus, amount)
    try:
        yield
    finally:
        for file in files:
            file.close()


def _take_quarters(found: list[IO[bytes]], gpu: int, wanted: int) -> None:
    before = len(found)
    for quarter in range(QUARTERS):
        path = f"{os.environ[_PLACE]}/gpu-{gpu}-{quarter}"
        file = open(path, "wb")  # noqa: SIM115 - it is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            found.append(file)
        if len(found) - before == wanted:
            return
    raise OverlapError(
        f"process {os.getpid()} was given {wanted} quarters of GPU {gpu}, of which "
        f"others hold all but {len(found) - before}."
    )
