"""Whether a worker uses more of a device's memory than was reserved for it: pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiogpu.core.model.units import size
from aiogpu.runtime.owners import Use

OVERHEAD: Final = 1 << 30
"""Bytes that a process may use beyond what was reserved. What frameworks are limited
to is what their allocators hand out; a CUDA context, the kernels that it has loaded
and the workspaces of cuBLAS and NCCL come on top (1015 MiB in pytorch#58466, by a
process limited to half of 10989 MiB). Each process has a context of its own."""


def is_outgrown(use: Use, reserved: int) -> bool:
    """Whether a worker uses more than it was given.

    Args:
        use: what it uses of a device, with all below it.
        reserved: bytes that were reserved for it there, 0 for all that there is.
    """
    return bool(reserved) and use.memory > reserved + OVERHEAD * use.processes


def outgrowth_told(
    name: str, device: str, use: Use, reserved: int, neighbours: Iterable[str]
) -> str:
    """What is said of it, for people, without a word of what follows.

    Args:
        name: of the task.
        device: as people know it, "GPU 0".
        use: what its worker uses there.
        reserved: bytes that were reserved for it.
        neighbours: names of the tasks that have a share there as well.
    """
    count = use.processes
    by = f", by {count} processes" if count > 1 else ""
    beside = ", ".join(neighbours)
    return (
        f"{name} uses {size(use.memory)} of {device}{by}, and had asked for "
        f"{size(reserved)} (gpu_memory=); "
        f"{f'beside it there: {beside}' if beside else 'nobody else is there'}."
    )
