"""Tasks that fail as frameworks do which have run out of device memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import aiogpu
from tests.support.gate import pass_gate

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79.15 GiB."


class OutOfMemoryError(RuntimeError):
    """As PyTorch's is called."""


@aiogpu.remote(num_gpus=0.5)
def run_out(text: str = TEXT) -> None:
    raise OutOfMemoryError(text)


@aiogpu.remote(num_gpus=0.5)
async def run_out_softly() -> None:
    raise ValueError("the model does not fit") from OutOfMemoryError(TEXT)


@aiogpu.remote(num_gpus=0.5)
def yield_and_run_out() -> Iterator[int]:
    yield 1
    raise OutOfMemoryError(TEXT)


@aiogpu.remote(num_gpus=0.5, retry_exceptions=[OutOfMemoryError], max_retries=1)
def run_out_once(path: str) -> str:
    """Raise if it is the first to come."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second"
    raise OutOfMemoryError(TEXT)


@aiogpu.remote(num_gpus=0.5)
def run_out_of_main_memory() -> None:
    raise MemoryError("Unable to allocate 8. GiB")


@aiogpu.remote(num_gpus=0)
def fail_without_a_gpu() -> None:
    raise OutOfMemoryError(TEXT)


@aiogpu.remote(num_gpus=0.25)
async def start_and_catch() -> tuple[str, tuple[object, ...]]:
    """What a parent sees of its child."""
    try:
        await run_out.remote()
    except aiogpu.GpuOutOfMemoryError as error:
        return str(error), error.devices
    raise AssertionError("it did not fail")


@aiogpu.remote(num_gpus=0.25)
async def start_and_fail() -> None:
    """Fail as its child does."""
    await run_out.remote()


@aiogpu.remote(num_gpus=0.5)
class Model:
    """Runs out when it is told to."""

    def __init__(self, text: str = "") -> None:
        if text:
            raise OutOfMemoryError(text)

    def predict(self) -> None:
        raise OutOfMemoryError(TEXT)

    def fine(self) -> str:
        return "fine"


@aiogpu.remote(num_gpus=0.5)
class AsyncModel:
    async def predict(self) -> None:
        raise OutOfMemoryError(TEXT)

    async def items(self) -> AsyncIterator[int]:
        yield 1
        raise OutOfMemoryError(TEXT)


@aiogpu.remote(num_gpus=0.5)
def double(number: int) -> int:
    if number == 5:
        raise OutOfMemoryError(TEXT)
    return 2 * number


@aiogpu.remote(num_gpus=0.5, max_retries=0, retry_oom="exclusive")
def run_out_beside_others(path: str, times: int) -> tuple[int, str | None, float]:
    """Raise so often; then tell how often, what limits it, and which share it has."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR)
    count = os.fstat(descriptor).st_size
    os.write(descriptor, b".")
    os.close(descriptor)
    if count < times:
        raise OutOfMemoryError(TEXT)
    share = aiogpu.get_runtime_context().assigned_resources["GPU"]
    return count, os.environ.get("CUPY_GPU_MEMORY_LIMIT"), share


@aiogpu.remote(num_gpus=0.5)
def hold(path: str) -> str:
    """Have half a GPU until let on."""
    return pass_gate(path, "hold")
