"""Whether a process may be forked: one thread, no device open, no CUDA begun."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Final

DEVICE_FILES: Final = (
    *("/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/neuron"),
    *("/dev/accel", "/dev/hl", "/dev/davinci"),
)

GUARDS: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
}
"""Set while modules are imported: libraries that read them start no threads and
touch no GPU. The program's own values are back before the first fork."""

BAD: Final = 1


def unfit_to_fork() -> str | None:
    """Say what makes this process unfit to be forked, None if nothing does."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"it left {threads - 1} threads running"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(DEVICE_FILES):
            return f"it opened {target}"
    torch = sys.modules.get("torch")
    if torch is not None and has_begun_cuda(torch):
        return "it made torch look for CUDA devices"
    return None


def has_begun_cuda(torch: ModuleType) -> bool:
    """Whether forks of this process could not use CUDA any more, as torch sees it."""
    cuda = getattr(torch, "cuda", None)
    if cuda is None:
        return False
    if cuda.is_initialized():
        return True
    pid = os.fork()
    if pid == 0:
        status = BAD
        try:
            status = BAD if cuda._is_in_bad_fork() else 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] != 0
