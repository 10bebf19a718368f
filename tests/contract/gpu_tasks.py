"""Tasks on GPUs: their limits, out-of-memory errors, and work on real cards."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import aiogpu
from tests.support.gate import pass_gate

PROBE = "import os; print(sorted(os.sched_getaffinity(0)))"


@aiogpu.remote(num_gpus=1)
def cpus() -> tuple[list[int], str]:
    """Return the CPUs of this process, and of a process that it starts."""
    probe = subprocess.run(
        [sys.executable, "-Sc", PROBE], check=True, capture_output=True, text=True
    )
    return sorted(os.sched_getaffinity(0)), probe.stdout.strip()


@aiogpu.remote
def cpus_without_a_gpu() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@aiogpu.remote(num_gpus=0.25)
def variables(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


@aiogpu.remote(num_gpus=0.5)
class Holder:
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@aiogpu.remote(num_gpus=0.25)
def fractions() -> dict[int, float]:
    """Return the memory fractions that the fake PyTorch gets when CUDA starts."""
    cuda = importlib.import_module("torch.cuda")
    assert cuda.fractions == {}
    cuda.init()
    fractions: dict[int, float] = cuda.fractions
    return fractions


TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79.15 GiB."


class OutOfMemoryError(RuntimeError):
    """The error of PyTorch, by its name."""


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
    """Raise at the first call."""
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
    """Return the error of a child as its parent sees it."""
    try:
        await run_out.remote()
    except aiogpu.GpuOutOfMemoryError as error:
        return str(error), error.devices
    raise AssertionError("it did not fail")


@aiogpu.remote(num_gpus=0.25)
async def start_and_fail() -> None:
    """Fail with the error of a child."""
    await run_out.remote()


@aiogpu.remote(num_gpus=0.5)
class Model:
    """Runs out of memory in its constructor or in `predict`."""

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
    """Raise `times` times; then return the count, the limit and the share."""
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
    """Hold half a GPU until the test releases the task."""
    return pass_gate(path, "hold")


GIB = 1 << 30
kept: list[Any] = []
"""Memory that a task leaks until its process ends."""


def allocate(framework: str, count: int) -> Any:
    """Allocate and write that many bytes on the first visible device."""
    if framework == "torch":
        import torch

        return torch.ones(count, dtype=torch.uint8, device="cuda:0")
    import cupy

    return cupy.ones(count, dtype=cupy.uint8)


def first(framework: str, piece: Any) -> int:
    """Read one element; so all earlier work on the device has ended."""
    return int(piece[0].item() if framework == "torch" else piece[0].get())


def see(framework: str) -> dict[str, Any]:
    """Return the devices that a framework sees."""
    import aiogpu

    if framework == "torch":
        import torch

        count = torch.cuda.device_count()
        uuids = [torch.cuda.get_device_properties(i).uuid for i in range(count)]
        shown = [f"GPU-{uuid}" for uuid in uuids]
    else:
        from cupy.cuda import runtime

        shown = [
            f"GPU-{UUID(bytes=bytes(runtime.getDeviceProperties(i)['uuid']))}"
            for i in range(runtime.getDeviceCount())
        ]
    return {"ids": aiogpu.get_gpu_ids(), "uuids": shown}


def compute(framework: str, size: int = 1 << 20) -> int:
    """Use the device a little."""
    return first(framework, allocate(framework, size))


def compute_at_gate(framework: str, path: str, name: str) -> int:
    """Hold some of the device's memory until the test releases the task."""
    piece = allocate(framework, 1 << 24)
    assert first(framework, piece) == 1
    pass_gate(path, name)
    return first(framework, piece)


def leak(framework: str, count: int) -> int:
    """Take memory and never give it back."""
    kept.append(allocate(framework, count))
    return first(framework, kept[-1])


def free_bytes(framework: str) -> int:
    """Return the free memory of the device."""
    if framework == "torch":
        import torch

        return int(torch.cuda.mem_get_info(0)[0])
    from cupy.cuda import runtime

    return int(runtime.memGetInfo()[0])


def spin(path: str) -> None:
    """Run a kernel for about an hour, and wait for its end in C."""
    import torch

    compute("torch")
    pass_gate(path, "spins")
    torch.cuda._sleep(1 << 42)
    torch.cuda.synchronize()


def was_loaded_before(framework: str) -> bool:
    """Return if the framework was imported before the task, and can use the device."""
    import sys

    was_there = framework in sys.modules
    return was_there and compute(framework) == 1
