"""Tasks that tell what limits they find."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import aiogpu

PROBE = "import os; print(sorted(os.sched_getaffinity(0)))"


@aiogpu.remote(num_gpus=1)
def cpus() -> tuple[list[int], str]:
    """Those of this process, and of one that it starts."""
    found = subprocess.run(
        [sys.executable, "-Sc", PROBE], check=True, capture_output=True, text=True
    )
    return sorted(os.sched_getaffinity(0)), found.stdout.strip()


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
    """What the paper PyTorch was told, as soon as CUDA begins."""
    cuda = importlib.import_module("torch.cuda")
    assert cuda.fractions == {}
    cuda.init()
    found: dict[int, float] = cuda.fractions
    return found
