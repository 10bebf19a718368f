"""Functions and actors that run as ranks of a gang."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

import aiogpu

NAMES: Final = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
AT_IMPORT: Final = {name: os.environ.get(name) for name in NAMES}
"""The variables when this module was imported."""


def rank() -> int:
    """Return this process's rank."""
    return int(os.environ["RANK"])


def variables(*args: int, **kwargs: int) -> tuple[Any, ...]:
    """Return the rank's variables, whether they were there at once, and arguments."""
    now = {name: os.environ.get(name) for name in NAMES}
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    return now, AT_IMPORT, gpu, os.environ.get("OWN"), args, kwargs


class Plain:
    """A class without options."""

    def share(self) -> tuple[str, str | None]:
        """Return the rank's GPU and a variable."""
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("OWN")


def note(place: str) -> None:
    """Note in a directory that this rank has begun."""
    Path(place, f"{rank()}-{os.getpid()}").touch()


def fails(place: str, how: str) -> int:
    """End rank 1 in some way at its first attempt; the others wait for a signal."""
    note(place)
    end_once(place, how)
    return rank()


def end_once(place: str, how: str) -> None:
    """Return at once after rank 1 has ended in another process."""
    failed = Path(place, "failed")
    if failed.exists():
        return
    if rank() == 1:
        failed.touch()
        end(how)
    signal.pause()


def end(how: str) -> None:
    """Raise, die, or hang."""
    if how == "raises":
        raise LookupError("no such rank")
    print("the last words of", rank(), flush=True)
    if how == "dies":
        os._exit(7)
    signal.pause()


class Ranked:
    """An actor of a gang that counts its calls."""

    def __init__(self, place: str, fails_at: int = -1) -> None:
        self.place = place
        self.calls = 0
        note(place)
        if rank() == fails_at:
            raise LookupError("no such rank")

    def count(self) -> tuple[int, int, int]:
        """Return the rank, the process and the number of calls."""
        self.calls += 1
        return rank(), os.getpid(), self.calls

    def once(self, how: str) -> tuple[int, int]:
        """End rank 1 in some way, unless it is a new process; others wait."""
        self.calls += 1
        end_once(self.place, how)
        return rank(), self.calls

    @aiogpu.method(run_timeout=0.5)
    def hang(self) -> None:
        """Rank 1 waits until its time limit; the others until they are ended."""
        signal.pause()


class Distributed:
    """A rank of torch.distributed, with a model that all ranks train together."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.manual_seed(rank())
        dist.init_process_group("gloo")
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))

    def fit(self, steps: int) -> tuple[int, list[float]]:
        """Train on data of this rank; return the weights, which all ranks share."""
        import torch
        import torch.distributed as dist

        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
        weights = [p.flatten() for p in self.model.parameters()]
        return dist.get_rank(), torch.cat(weights).tolist()

    def leave(self) -> None:
        """Rank 1 dies within a collective operation."""
        import torch
        import torch.distributed as dist

        if rank() == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(1))
