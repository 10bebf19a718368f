"""Shares of GPUs that NVIDIA's Multi-Process Service enforces, where its server runs.

Sources: NVIDIA, "Multi-Process Service", sections "Environment Variables" and
"Device Memory Limit"; there too, that devices are to be named by UUID, since the server
counts those that it was given.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aiogpu.core.model.units import UNIT

PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
DEFAULT: Final = "/tmp/nvidia-mps"
MIB: Final = 1 << 20


def runs(environ: Mapping[str, str], default: str = DEFAULT) -> bool:
    """Whether a control daemon runs whose clients workers would be.

    Its process may not be visible from a container that has its pipes.
    """
    directory = Path(environ.get(PIPES) or default)
    try:
        pid = int((directory / "nvidia-cuda-mps-control.pid").read_text("ascii"))
        if pid > 0:  # else it would be a group's
            os.kill(pid, 0)
            return True
    except PermissionError:
        return True  # another user's, but alive; or its file is not for us
    except (OSError, ValueError, OverflowError):
        pass
    return _is_pipe(directory / "control")


def _is_pipe(file: Path) -> bool:
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def variables(
    parts: int, limits: Sequence[int], environ: Mapping[str, str]
) -> dict[str, str]:
    """What tells the server how much of its GPUs a worker may use.

    Args:
        parts: its share of a GPU in parts; `UNIT` or more, or 0, for no such limit.
        limits: bytes of each of its GPUs, 0 for no limit.
        environ: the worker's environment otherwise; what is set there stays.
    """
    wanted = {}
    if 0 < parts < UNIT:
        wanted[THREADS] = str(max(parts * 100 // UNIT, 1))
    if any(limits):
        wanted[MEMORY] = ",".join(
            f"{ordinal}={max(limit // MIB, 1)}M"
            for ordinal, limit in enumerate(limits)
            if limit
        )
    return {name: value for name, value in wanted.items() if name not in environ}
