"""Device memory: kept for a task in bytes, handed to frameworks as their limit.

The GPUs here are logical, so their memory and their type are declared. On a real box
NVML tells both, and nothing has to be said.
"""

from __future__ import annotations

import asyncio
import os

import aiogpu
from aiogpu.accelerators import NVIDIA_A100

GIB = 1 << 30


@aiogpu.remote(gpu_memory="30GiB", accelerator_type=NVIDIA_A100)
def embed() -> tuple[list[int | str], int]:
    """Tell where it runs, and what CuPy keeps to here."""
    limit = int(os.environ["CUPY_GPU_MEMORY_LIMIT"])
    return aiogpu.get_gpu_ids(), limit // GIB


@aiogpu.remote(num_gpus=0.5, gpu_memory="share", retry_oom="exclusive")
def train(batch: int) -> str:
    """Want more than half a GPU has: the second try has all of one."""
    has = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "1"))
    if batch * GIB > has * 80 * GIB:
        raise RuntimeError(f"CUDA out of memory. Tried to allocate {batch} GiB.")
    return f"trained with {batch} GiB"


async def main() -> None:
    async with aiogpu.init(
        num_cpus=8, num_gpus=2, gpu_memory="80GiB", accelerator_type=NVIDIA_A100
    ):
        print("30 GiB each:", await asyncio.gather(*(embed.remote() for _ in range(4))))
        print("half a GPU was too little:", await train.remote(60))
        try:
            await train.remote(100)
        except aiogpu.GpuOutOfMemoryError as error:
            print("a whole one, too; beside it:", error.neighbours or "nobody")
        try:
            await embed.options(gpu_memory="81GiB").remote()
        except aiogpu.InfeasibleError as error:
            print(error)


if __name__ == "__main__":
    aiogpu.run(main())
