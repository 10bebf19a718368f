"""GPUs in a worker: the limit of memory, running out of it, broken contexts.

- No environment variable limits memory in all releases of PyTorch, and its function for
  the limit initialises CUDA, which costs memory and half a second, even in tasks that
  never use CUDA. So a callback sets the limit when CUDA is initialised. It is
  registered at once if the zygote has loaded PyTorch, else after PyTorch's import.
  Other frameworks read variables, which the driver sets.
- Frameworks report that GPU memory ran out by many exception classes and texts.
  `MemoryError` alone is not among them: it means main memory. No framework is imported
  here: a framework that is not loaded has used no memory.
- After some CUDA errors every later call in the process fails until it ends. NVIDIA
  says which in the descriptions of `cudaError_t` ("the process must be terminated and
  relaunched", CUDA Runtime API). Running out of memory is not among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.errors import AiogpuError
from aiogpu.worker.private_hooks import on_cuda

MODULE: Final = "torch.cuda"
"""The module of PyTorch that keeps the callbacks for the initialisation of CUDA."""


def limit_torch(limits: Sequence[int]) -> None:
    """Limit PyTorch's memory on each visible GPU, in bytes; 0 for no limit.

    Never raises: a failure becomes one line of the task's output.
    """
    cuda = sys.modules.get(MODULE)
    if cuda is not None:
        set_limits(cuda, limits)
        return
    sys.meta_path.insert(0, ImportWatcher(partial(set_limits, limits=tuple(limits))))


class ImportWatcher:
    """A finder that waits for the import of PyTorch's module, then calls back.

    It finds no module itself. It stays in `sys.meta_path`: a thread that iterates over
    the list would skip a finder if an earlier one was removed.

    Attributes:
        is_waiting: it has not called back yet.
    """

    def __init__(self, call: Callable[[ModuleType], object]) -> None:
        self.is_waiting = True
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module by the other finders, and wrap its loader."""
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
            # A loader may serve many modules, and may already be wrapped.
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
        execute(module)  # if it fails, it may be imported again
        self.is_waiting = False
        self._call(module)


def set_limits(cuda: Any, limits: Sequence[int]) -> None:
    """Set the limits when PyTorch initialises CUDA, or now if it already has."""
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
    """Pair PyTorch's indices of GPUs with their limits."""
    if count == len(limits):
        return list(enumerate(limits))
    # The user controls the visibility variable, so PyTorch sees all GPUs of the node.
    ids = current.accelerators.get("GPU", ())
    pairs = zip(ids, limits, strict=False)
    return [(index, limit) for index, limit in pairs if isinstance(index, int)]


def _complain(error: Exception) -> None:
    sys.stderr.write(
        f"aiogpu: PyTorch's GPU memory could not be limited: "
        f"{type(error).__name__}: {error}\n"
    )


MOST_CAUSES: Final = 16
"""Exceptions of one chain, or of one group, that are examined at most."""


SIGNS: Final = (
    # PyTorch: "CUDA out of memory. Tried to allocate ...", "HIP ...", "XPU ...".
    ("torch.outofmemoryerror",),
    ("torch.cuda.outofmemoryerror",),
    ("cuda out of memory",),
    ("hip out of memory",),
    ("xpu out of memory",),
    # Texts of the CUDA runtime and driver, as shown by PyTorch, CuPy, RMM, Numba,
    # PyCUDA and ONNX Runtime.
    ("cuda error: out of memory",),
    ("cudaerrormemoryallocation",),
    ("cuda_error_out_of_memory",),
    ("cuda failure 2",),
    ("cumemalloc failed: out of memory",),
    ("hiperroroutofmemory",),
    # Usually caused by lack of memory, according to NVIDIA's cuBLAS manual.
    ("cublas_status_alloc_failed",),
    ("cudnn_status_alloc_failed",),
    ("cupy.cuda.memory.outofmemoryerror",),
    # XLA; two texts, since gRPC has an error of the same name.
    ("resource_exhausted", "out of memory"),
    ("resource_exhausted", "ran out of memory"),
    ("resource_exhausted", "failed to allocate"),
    # TensorFlow, which names the device: "/device:GPU:0 by allocator GPU_0_bfc".
    ("oom when allocating", "gpu"),
    ("resourceexhaustederror", "failed to allocate memory"),
)
"""Lower-case texts. An exception matches an entry if its class name and message contain
every text of the entry."""


def has_run_out(error: BaseException) -> bool:
    """Return whether an exception or its causes say that device memory ran out here.

    `__context__` does not count: a task that caught such an error has handled it. A
    group counts if each of its members does.
    """
    # Imported late: most tasks raise nothing.
    from aiogpu.serialization.exceptions import RemoteTraceback

    examined: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if examined is None or isinstance(examined, AiogpuError):
            return False
        cause = examined.__cause__
        if isinstance(cause, RemoteTraceback):
            return False  # raised in another process
        if isinstance(examined, BaseExceptionGroup):
            members = examined.exceptions[:MOST_CAUSES]
            if all(_is_sign(member) for member in members):
                return True
        elif _is_sign(examined):
            return True
        examined = cause
    return False


def _is_sign(error: BaseException) -> bool:
    try:
        kind = type(error)
        text = f"{kind.__module__}.{kind.__qualname__} {error}".lower()
    except Exception:  # noqa: BLE001 - its own __str__ may raise anything
        return False
    return any(all(word in text for word in words) for words in SIGNS)


def peak_memory() -> int:
    """Return the most bytes of one device that this process is known to have used.

    PyTorch reports its peak, CuPy the current size of its pool; 0 if neither answers.
    """
    return max(_peak_of_torch(), _used_by_cupy())


def _peak_of_torch() -> int:
    cuda: Any = sys.modules.get("torch.cuda")
    try:
        if cuda is None or not cuda.is_initialized():
            return 0
        peaks = map(cuda.max_memory_reserved, range(cuda.device_count()))
        return int(max(peaks, default=0))
    except Exception:  # noqa: BLE001 - the reported error may have broken PyTorch
        return 0


def _used_by_cupy() -> int:
    cupy: Any = sys.modules.get("cupy")
    try:
        return 0 if cupy is None else int(cupy.get_default_memory_pool().total_bytes())
    except Exception:  # noqa: BLE001 - the reported error may have broken CuPy
        return 0


STICKY: Final = {
    "cudaErrorIllegalAddress": (
        "illegal memory access",
        "illegaladdress",
        "illegal_address",
    ),
    "cudaErrorAssert": ("device-side assert", "cudaerrorassert", "cuda_error_assert"),
    "cudaErrorLaunchFailure": (
        "unspecified launch failure",
        "launchfailure",
        "cuda_error_launch_failed",
    ),
    "cudaErrorLaunchTimeout": ("launch timed out", "launchtimeout", "launch_timeout"),
    "cudaErrorMisalignedAddress": (
        "misaligned address",
        "misalignedaddress",
        "misaligned_address",
    ),
    "cudaErrorIllegalInstruction": (
        "illegal instruction",
        "illegalinstruction",
        "illegal_instruction",
    ),
    "cudaErrorInvalidPc": ("invalid program counter", "invalidpc", "invalid_pc"),
    "cudaErrorInvalidAddressSpace": (
        "operation not supported on global/shared address space",
        "invalidaddressspace",
        "invalid_address_space",
    ),
    "cudaErrorHardwareStackError": (
        "hardware stack error",
        "hardwarestackerror",
        "hardware_stack_error",
    ),
    "cudaErrorECCUncorrectable": (
        "uncorrectable ecc error",
        "eccuncorrectable",
        "ecc_uncorrectable",
    ),
    "cudaErrorNvlinkUncorrectable": (
        "uncorrectable nvlink error",
        "nvlinkuncorrectable",
        "nvlink_uncorrectable",
    ),
}
"""Lower-case texts by the name of the CUDA error. The first text of each comes from
`cudaGetErrorString`, which PyTorch shows; the others from CuPy, Numba and XLA."""


def poisoned_by(error: BaseException) -> str | None:
    """Return the name of the sticky CUDA error in an exception; None for none.

    Its `__cause__` or else its `__context__` is examined too, and so on.
    """
    seen: list[BaseException] = []
    linked: BaseException | None = error
    while linked is not None and linked not in seen and len(seen) < MOST_CAUSES:
        seen.append(linked)
        linked = linked.__cause__ or linked.__context__
    for examined in seen:
        name = _name_in(_text_of(examined))
        if name is not None:
            return name
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
    """Add a note to an exception: the worker process was ended."""
    try:
        error.add_note(
            f"aiogpu ended the worker process (pid {pid}): after {name} it could not "
            f"have used its GPU any more. Other tasks are not affected."
        )
    except Exception:  # noqa: BLE001 - a class of the user's may refuse attributes
        return
