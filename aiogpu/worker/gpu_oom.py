"""Errors that tell that device memory has run out, and how much was used of it.

They reach Python as texts of many exception classes; `MemoryError` by itself is none
of them, for it is the main memory's. This file imports no framework: what is not
loaded has used nothing.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from aiogpu.errors import AiogpuError, RemoteTraceback

MOST_CAUSES: Final = 16
"""Exceptions of one chain, or of one group, that are looked at."""
SIGNS: Final = (
    # PyTorch: "CUDA out of memory. Tried to allocate ...", "HIP ...", "XPU ...".
    ("torch.outofmemoryerror",),
    ("torch.cuda.outofmemoryerror",),
    ("cuda out of memory",),
    ("hip out of memory",),
    ("xpu out of memory",),
    # The runtime's and the driver's own words, as PyTorch, CuPy, RMM, Numba, PyCUDA
    # and ONNX Runtime show them.
    ("cuda error: out of memory",),
    ("cudaerrormemoryallocation",),
    ("cuda_error_out_of_memory",),
    ("cuda failure 2",),
    ("cumemalloc failed: out of memory",),
    ("hiperroroutofmemory",),
    # Mostly for want of memory, says NVIDIA's manual of cuBLAS.
    ("cublas_status_alloc_failed",),
    ("cudnn_status_alloc_failed",),
    ("cupy.cuda.memory.outofmemoryerror",),
    # XLA; gRPC has an error of the same name.
    ("resource_exhausted", "out of memory"),
    ("resource_exhausted", "ran out of memory"),
    ("resource_exhausted", "failed to allocate"),
    # TensorFlow, which says where: "/device:GPU:0 by allocator GPU_0_bfc".
    ("oom when allocating", "gpu"),
    ("resourceexhaustederror", "failed to allocate memory"),
)
"""What texts hold, in small letters, the class's name first: all words of one line."""


def has_run_out(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, tells of this process.

    Not what it was raised during: a task that has caught one has dealt with it. A
    group tells of it where each of its members does.
    """
    following: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if following is None or isinstance(following, AiogpuError):
            return False
        cause = following.__cause__
        if isinstance(cause, RemoteTraceback):
            return False  # it was raised elsewhere
        if isinstance(following, BaseExceptionGroup):
            members = following.exceptions[:MOST_CAUSES]
            if all(_is_sign(member) for member in members):
                return True
        elif _is_sign(following):
            return True
        following = cause
    return False


def _is_sign(error: BaseException) -> bool:
    try:
        kind = type(error)
        text = f"{kind.__module__}.{kind.__qualname__} {error}".lower()
    except Exception:  # noqa: BLE001 - its own __str__ may raise anything
        return False
    return any(all(word in text for word in words) for words in SIGNS)


def peak_memory() -> int:
    """The most bytes of one device that this process is known to have used.

    PyTorch tells its peak, CuPy what its pool has now; 0 where neither can be asked.
    """
    return max(_peak_of_torch(), _held_by_cupy())


def _peak_of_torch() -> int:
    cuda: Any = sys.modules.get("torch.cuda")
    try:
        if cuda is None or not cuda.is_initialized():
            return 0
        peaks = map(cuda.max_memory_reserved, range(cuda.device_count()))
        return int(max(peaks, default=0))
    except Exception:  # noqa: BLE001 - the error that is told of may have broken it
        return 0


def _held_by_cupy() -> int:
    cupy: Any = sys.modules.get("cupy")
    try:
        return 0 if cupy is None else int(cupy.get_default_memory_pool().total_bytes())
    except Exception:  # noqa: BLE001 - the error that is told of may have broken it
        return 0
