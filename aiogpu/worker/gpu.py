"""GPUs in a worker: the limit of memory, running out of it, broken contexts.

- PyTorch reads no variable for the limit that all its releases know, and asking it to
  set the limit would begin CUDA, which costs memory and half a second, also where the
  task never needs it. So the limit is set when CUDA begins: at once where the zygote
  has loaded PyTorch, else when it has been imported. Other frameworks read variables,
  of which the driver knows.
- That memory has run out reaches Python as texts of many exception classes;
  `MemoryError` by itself is none of them, for it is the main memory's. No framework is
  imported here: what is not loaded has used nothing.
- Some CUDA errors stick: every later call in the process fails likewise, until it ends.
  NVIDIA says which in the descriptions of `cudaError_t` ("the process must be
  terminated and relaunched", CUDA Runtime API). Running out of memory is not among
  them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.errors import AiogpuError, RemoteTraceback
from aiogpu.worker.private_hooks import on_cuda

MODULE: Final = "torch.cuda"
"""Where PyTorch keeps what is to be done when CUDA begins."""


def limit_torch(limits: Sequence[int]) -> None:
    """Have PyTorch keep to so many bytes of each visible GPU, 0 for no limit.

    Never raises: what goes wrong is one line of the task's output.
    """
    cuda = sys.modules.get(MODULE)
    if cuda is not None:
        leave_with(cuda, limits)
        return
    sys.meta_path.insert(0, Watching(partial(leave_with, limits=tuple(limits))))


class Watching:
    """Finds nothing itself; calls back with PyTorch's module once it was imported.

    It stays where it is: whoever goes through `sys.meta_path` in another thread would
    miss a finder if one before it was removed.

    Attributes:
        is_waiting: whether it has not called back yet.
    """

    def __init__(self, call: Callable[[ModuleType], object]) -> None:
        self.is_waiting = True
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Leave the module to the other finders, and have it call back."""
        if name != MODULE or not self.is_waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: Any) -> None:
        try:
            execute = loader.exec_module
            if isinstance(loader, type):
                raise AttributeError(f"{loader} is a class, which loads others too")
            # A loader may serve many modules, and be found again for this one.
            if getattr(execute, "func", None) != self._execute:
                loader.exec_module = partial(self._execute, loader, execute)
        except AttributeError as error:
            _complain(error)

    def _execute(
        self, loader: Any, execute: Callable[[ModuleType], None], module: ModuleType
    ) -> None:
        if module.__name__ != MODULE:
            execute(module)
            return
        del loader.exec_module
        execute(module)  # one that fails is perhaps imported again
        self.is_waiting = False
        self._call(module)


def leave_with(cuda: Any, limits: Sequence[int]) -> None:
    """Have PyTorch's module set the limits when CUDA begins, or now if it has."""
    try:
        set_all = partial(_set_all, cuda, tuple(limits))
        if cuda.is_initialized():
            set_all()
        else:
            on_cuda(cuda, set_all)
    except Exception as error:  # noqa: BLE001 - the user's import must go on
        _complain(error)


def _set_all(cuda: Any, limits: tuple[int, ...]) -> None:
    try:
        for index, limit in _by_index(limits, cuda.device_count()):
            total = cuda.get_device_properties(index).total_memory
            if 0 < limit < total:
                cuda.set_per_process_memory_fraction(limit / total, index)
    except Exception as error:  # noqa: BLE001 - CUDA itself must begin nevertheless
        _complain(error)


def _by_index(limits: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """The limits by the index of the GPU as PyTorch counts."""
    if count == len(limits):
        return list(enumerate(limits))
    # The user keeps the assigning variable to himself, so all of the node's are seen.
    ids = current.accelerators.get("GPU", ())
    found = zip(ids, limits, strict=False)
    return [(index, limit) for index, limit in found if isinstance(index, int)]


def _complain(error: Exception) -> None:
    sys.stderr.write(
        f"aiogpu: PyTorch could not be told how much GPU memory it may use, and is not "
        f"limited: {type(error).__name__}: {error}\n"
    )


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
    """Return whether an exception or its causes say that device memory ran out here.

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


STICKY: Final = {
    "cudaErrorIllegalAddress": (
        *("illegal memory access", "illegaladdress", "illegal_address"),
    ),
    "cudaErrorAssert": ("device-side assert", "cudaerrorassert", "cuda_error_assert"),
    "cudaErrorLaunchFailure": (
        *("unspecified launch failure", "launchfailure", "cuda_error_launch_failed"),
    ),
    "cudaErrorLaunchTimeout": ("launch timed out", "launchtimeout", "launch_timeout"),
    "cudaErrorMisalignedAddress": (
        *("misaligned address", "misalignedaddress", "misaligned_address"),
    ),
    "cudaErrorIllegalInstruction": (
        *("illegal instruction", "illegalinstruction", "illegal_instruction"),
    ),
    "cudaErrorInvalidPc": ("invalid program counter", "invalidpc", "invalid_pc"),
    "cudaErrorInvalidAddressSpace": (
        "operation not supported on global/shared address space",
        *("invalidaddressspace", "invalid_address_space"),
    ),
    "cudaErrorHardwareStackError": (
        *("hardware stack error", "hardwarestackerror", "hardware_stack_error"),
    ),
    "cudaErrorECCUncorrectable": (
        *("uncorrectable ecc error", "eccuncorrectable", "ecc_uncorrectable"),
    ),
    "cudaErrorNvlinkUncorrectable": (
        *("uncorrectable nvlink error", "nvlinkuncorrectable", "nvlink_uncorrectable"),
    ),
}
"""What texts say, in small letters, by the name of the error that is meant. The first
words are those of `cudaGetErrorString`, as PyTorch shows them; the others are those of
CuPy, Numba and XLA."""


def poisoned_by(error: BaseException) -> str | None:
    """Return the name of the sticky CUDA error in an exception; None for none.

    Its causes are looked at too, and what it was raised during.
    """
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen and len(seen) < MOST_CAUSES:
        seen.append(following)
        following = following.__cause__ or following.__context__
    for one in seen:
        found = _name_in(_text_of(one))
        if found is not None:
            return found
    return None


def _name_in(text: str) -> str | None:
    if "cuda" not in text:
        return None
    for name, texts in STICKY.items():
        if any(words in text for words in texts):
            return name
    return None


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__} {error}".lower()
    except Exception:  # noqa: BLE001 - its own __str__ may raise anything
        return ""


def explain_poisoned(error: BaseException, name: str, pid: int) -> None:
    """Add to an exception what was done about it."""
    try:
        error.add_note(
            f"aiogpu ended the worker process (pid {pid}): after {name} it could not "
            f"have used its GPU any more. Other tasks are not affected."
        )
    except Exception:  # noqa: BLE001 - a class of the user's may refuse attributes
        return
