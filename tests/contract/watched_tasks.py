"""A task that stays on its GPU, as NVML on a stub lists it, until it is let go."""

from __future__ import annotations

import os
from dataclasses import replace

import aiogpu
from tests.contract.settling import stub
from tests.unit.accelerators.stub_nvml import GIB, StubGpu, StubNvml, gpus

COUNT = 2


@aiogpu.remote
def stay(path: str) -> str:
    """Wait until somebody opens this pipe to write."""
    with open(path):
        return os.environ["CUDA_VISIBLE_DEVICES"]


def let_go(path: str) -> None:
    """Let the task go that waits at this pipe."""
    with open(path, "w"):
        pass


def list_on_first(*processes: tuple[int, int]) -> StubNvml:
    """Have NVML list these on the first GPU, each with so many GiB."""
    listed = tuple((pid, size * GIB) for pid, size in processes)
    first: StubGpu = replace(
        gpus(COUNT)[0],
        used=sum(size for _, size in listed),
        utilisation=87,
        processes=listed,
    )
    nvml = stub()
    nvml.write([first, *gpus(COUNT)[1:]])
    return nvml
