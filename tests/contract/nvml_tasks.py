"""Tasks on the GPUs of the NVML stub, which change what the stub shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import aiogpu
from tests.support.gate import pass_gate
from tests.unit.accelerators.stub_nvml import GIB, StubNvml, gpus


def show(
    processes: Mapping[int, int] | None = None, *, count: int = 1, **options: object
) -> None:
    """Show so many GPUs, the first with these processes and their GiB."""
    listed = tuple((pid, size * GIB) for pid, size in (processes or {}).items())
    used = sum(size for _, size in listed)
    first, *others = gpus(count)
    first = replace(first, used=used, utilisation=87, processes=listed)
    StubNvml.here().write([first, *others], **options)  # type: ignore[arg-type]


@aiogpu.remote
def leave_behind(*, count: int = 1, lost: bool = False) -> int:
    """End, while NVML still lists this process."""
    show({os.getpid(): 1}, count=count, lost=[0] if lost else ())
    return os.getpid()


@aiogpu.remote
def grow(pid: int) -> None:
    """Show another process with twice the memory."""
    show({pid: 2})


@aiogpu.remote
def visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@aiogpu.remote
def stay(path: str, name: str) -> str:
    """Hold a share until the gate opens."""
    pass_gate(path, name)
    return os.environ["CUDA_VISIBLE_DEVICES"]
