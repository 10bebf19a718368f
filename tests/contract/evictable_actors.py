"""Actors that may leave the node while nobody calls them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiogpu
from tests.support.gate import pass_gate


@aiogpu.remote(num_gpus=0.5, evict_after=0, max_task_retries=-1, max_restarts=-1)
class Model:
    """Counts its calls in this process."""

    def __init__(self, name: str = "", log: str = "") -> None:
        self.name = name
        self.calls = 0
        self.log = log
        self.note("made")

    def note(self, word: str) -> None:
        """Write a word into the log."""
        if self.log:
            with Path(self.log).open("a", encoding="utf-8") as file:
                file.write(f"{self.name} {word}\n")

    def call(self, value: Any = None) -> tuple[str, Any, int]:
        """Return the name, the value, and the number of the call."""
        self.calls += 1
        return self.name, value, self.calls

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def wait_for(self, gate: str) -> str:
        """Return once the test releases it."""
        return pass_gate(gate, self.name)

    def count(self, limit: int) -> Iterator[int]:
        """Yield numbers."""
        yield from range(limit)

    def __del__(self) -> None:
        self.note("freed")


@aiogpu.remote(num_gpus=0.5, evict_after=0)
class Keeper(Model.__wrapped__):  # type: ignore[misc]
    """Keeps its state, which is large, when it is evicted."""

    def __init__(self, *args: Any, how: str = "") -> None:
        super().__init__(*args)
        self.weights = bytes(1_000_000)
        self.how = how

    def learn(self, weights: bytes) -> None:
        """Change the state."""
        self.weights = weights

    def known(self) -> tuple[bytes, int]:
        """Return the state."""
        return self.weights, self.calls

    def on_evict(self) -> dict[str, Any]:
        """Return the state, or fail."""
        if self.how == "raises":
            raise LookupError("no state")
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hangs":
            signal.pause()
        return {"weights": self.weights, "calls": self.calls}

    def on_return(self, state: dict[str, Any]) -> None:
        """Take the state back."""
        self.weights, self.calls = state["weights"], state["calls"]


@aiogpu.remote(num_gpus=0.5, evict_after=0)
class Async:
    """Runs its calls together, and is told when it ends."""

    def __init__(self, log: str = "") -> None:
        self.log = log

    async def call(self, value: Any) -> Any:
        """Return the value a little later."""
        await asyncio.sleep(0)
        return value

    async def count(self, limit: int) -> AsyncIterator[int]:
        """Yield numbers."""
        for number in range(limit):
            yield number

    async def close(self) -> None:
        """Note the end."""
        if self.log:
            with Path(self.log).open("a", encoding="utf-8") as file:
                file.write("closed\n")


@aiogpu.remote(num_gpus=0.5, evict_after=0, max_concurrency=4)
class Threads(Model.__wrapped__):  # type: ignore[misc]
    """Runs its calls in threads."""


@aiogpu.remote(num_gpus=1)
def whole_gpu() -> str:
    """Return the device."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


@aiogpu.remote(num_gpus=1)
def hold(gate: str) -> None:
    """Hold a GPU until the test releases it."""
    pass_gate(gate, "held")
