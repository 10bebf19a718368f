"""A program's own GPUs on the NVML stub, and tasks that leave something on them."""

from __future__ import annotations

import os
from pathlib import Path

import aiogpu
from tests.unit.accelerators.stub_nvml import GIB, StubGpu, StubNvml, gpus

GPUS = gpus(2)


def stub() -> StubNvml:
    """The stub of this process, as it is."""
    state = Path(os.environ["AIOGPU_STUB_NVML_STATE"])
    nvml = StubNvml.__new__(StubNvml)
    nvml.library, nvml.state = Path(), state
    return nvml


def put(*pids: int, count: int, **told: object) -> None:
    """Have NVML list these on the first GPU, with a GiB each."""
    first = StubGpu(
        GPUS[0].uuid,
        pci=GPUS[0].pci,
        used=GIB * len(pids),
        processes=tuple((pid, GIB) for pid in pids),
    )
    stub().write([first, *GPUS[1:count]], **told)


@aiogpu.remote
def leave_behind(*, count: int = 1, lost: bool = False) -> int:
    """End, but for NVML, which still lists this process."""
    put(os.getpid(), count=count, lost=[0] if lost else ())
    return os.getpid()


@aiogpu.remote
def visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]
