"""GPU memory in a worker: PyTorch's limit, out-of-memory errors, spoilt devices."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.current import Context
from aiogpu.errors import GpuOutOfMemoryError
from aiogpu.serialization.exceptions import RemoteTraceback
from aiogpu.worker.gpu import (
    MOST_CAUSES,
    ImportWatcher,
    explain_poisoned,
    has_run_out,
    limit_torch,
    peak_memory,
    poisoned_by,
)
from aiogpu.worker.zygote.preload import Imports

GIB = 1 << 30
TORCH_SOURCE = """
calls, fractions, begun = [], {}, []
def is_initialized():
    return bool(begun)
def _lazy_call(call):
    calls.append(call)
def init():
    begun.append(True)
    for call in calls:
        call()
def device_count():
    return 2
class Properties:
    total_memory = 80 << 30
def get_device_properties(index):
    return Properties()
def set_per_process_memory_fraction(fraction, index):
    fractions[index] = fraction
"""


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a small `torch.cuda` that can be imported."""
    finders = list(sys.meta_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import cuda as cuda\n")
    file = package / "cuda.py"
    file.write_text(TORCH_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield file
    for name in ("torch", "torch.cuda"):
        sys.modules.pop(name, None)
    sys.meta_path[:] = finders


def load() -> Any:
    return importlib.import_module("torch").cuda


def is_watched() -> bool:
    watching = [finder for finder in sys.meta_path if isinstance(finder, ImportWatcher)]
    return any(finder.is_waiting for finder in watching)


@pytest.mark.usefixtures("torch")
def test_limit_is_set_once_when_threads_import_torch_together() -> None:
    imports = Imports()
    bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
    before = bootstrap._find_and_load
    assert imports.watch()
    try:
        limit_torch((40 * GIB, 40 * GIB))
        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        bootstrap._find_and_load = before
    assert len(load().calls) == 1


@pytest.mark.usefixtures("torch")
def test_limit_works_with_a_loader_of_many_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loader of a zip file does."""
    (tmp_path / "beside_torch.py").write_text("value = 7\n")
    monkeypatch.delitem(sys.modules, "beside_torch", raising=False)

    class SharedLoader:
        """The finder and loader of both modules."""

        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            if name not in ("torch.cuda", "beside_torch"):
                return None
            return ModuleSpec(name, self)  # type: ignore[arg-type]

        def create_module(self, _spec: ModuleSpec) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            name = {"torch.cuda": "torch/cuda.py"}.get(module.__name__)
            exec((tmp_path / (name or "beside_torch.py")).read_text(), vars(module))

    sys.meta_path.insert(0, SharedLoader())
    limit_torch((40 * GIB, 0))
    watching = sys.meta_path[0]
    for _ in range(2):  # libraries check for torch without an import
        assert watching.find_spec("torch.cuda", None) is not None
    assert importlib.import_module("beside_torch").value == 7
    assert is_watched()
    cuda = load()
    cuda.init()
    assert cuda.fractions == {0: 0.5}
    assert capsys.readouterr().err == ""


def test_limit_is_set_by_the_import_after_a_failed_one(torch: Path) -> None:
    torch.write_text("raise OSError('no driver')\n")
    limit_torch((40 * GIB,))
    with pytest.raises(OSError, match="no driver"):
        load()
    torch.write_text(TORCH_SOURCE)
    importlib.invalidate_caches()
    assert len(load().calls) == 1
    assert not is_watched()


def test_torch_without_lazy_calls_is_reported_as_unlimited(
    capsys: pytest.CaptureFixture[str], torch: Path
) -> None:
    torch.write_text("def is_initialized():\n    return False\n")
    limit_torch((40 * GIB,))
    load()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aiogpu: PyTorch's GPU memory could not be limited: ")
    assert "_lazy_call" in line


def test_loader_without_a_hook_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    ImportWatcher(print)._listen(object())
    assert "could not be limited: AttributeError" in capsys.readouterr().err
    before = dict(vars(BuiltinImporter))
    ImportWatcher(print)._listen(BuiltinImporter)
    assert "which loads others too" in capsys.readouterr().err
    assert dict(vars(BuiltinImporter)) == before


@pytest.mark.usefixtures("torch")
def test_worker_that_sees_all_gpus_limits_only_its_own(context: Context) -> None:
    context.accelerators = {"GPU": (1,)}
    cuda = load()
    limit_torch((40 * GIB,))
    cuda.init()
    assert cuda.fractions == {1: 0.5}
    context.accelerators = {"GPU": ("GPU-abc",)}
    cuda.fractions.clear()
    limit_torch((20 * GIB,))
    assert cuda.fractions == {}, "the index of this GPU is unknown"


def error_class(module: str, name: str, base: type[Exception] = RuntimeError) -> type:
    return type(name, (base,), {"__module__": module})


NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 10.11 GiB is free."
)
TF = error_class("tensorflow.python.framework.errors_impl", "ResourceExhaustedError")


class Mute(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(NO_MEMORY),
        error_class("torch", "OutOfMemoryError")("whatever it says"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        error_class("torch", "AcceleratorError")(
            "CUDA error: out of memory\nCUDA kernel"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"),
        error_class("cupy.cuda.memory", "OutOfMemoryError", MemoryError)(
            "Out of memory allocating 8,000,000,000 bytes (allocated so far: 512 b)."
        ),
        error_class("cupy_backends.cuda.api.runtime", "CUDARuntimeError")(
            "cudaErrorMemoryAllocation: out of memory"
        ),
        MemoryError(
            "std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp:60:"
            " cudaErrorMemoryAllocation out of memory"
        ),
        error_class("jaxlib.xla_extension", "XlaRuntimeError")(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8000 bytes."
        ),
        TF(
            "OOM when allocating tensor with shape[9,9] and type float on /job:local"
            "host/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:AddV2]"
        ),
        TF("{{function_node x}} failed to allocate memory [Op:Mul]"),
        error_class("numba.cuda.cudadrv.driver", "CudaAPIError")(
            "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"
        ),
        error_class("pycuda._driver", "MemoryError")(
            "cuMemAlloc failed: out of memory"
        ),
        RuntimeError("[ONNXRuntimeError] : CUDA failure 2: out of memory ; GPU=0"),
        ExceptionGroup("both", [RuntimeError(NO_MEMORY), RuntimeError(NO_MEMORY)]),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception) -> None:
    assert has_run_out(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 8. GiB for an array with shape (9,)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: Cannot allocate"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        error_class("grpc", "RpcError")("RESOURCE_EXHAUSTED: message larger than max"),
        TF("OOM when allocating tensor on /device:CPU:0 by allocator cpu"),
        GpuOutOfMemoryError(f"child ran out of GPU memory: {NO_MEMORY}"),
        ExceptionGroup("one of two", [RuntimeError(NO_MEMORY), ValueError()]),
        ValueError(),
        Mute(),
    ],
)
def test_other_errors_are_not_taken_for_out_of_memory(error: Exception) -> None:
    assert not has_run_out(error)


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_out_of_memory_error_of_another_process_does_not_count() -> None:
    remote = raised_from(RuntimeError(NO_MEMORY), RemoteTraceback(NO_MEMORY))
    assert not has_run_out(remote)
    assert not has_run_out(raised_from(ValueError("no"), remote))


def test_search_through_causes_is_limited() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not has_run_out(first)
    error: Any = RuntimeError(NO_MEMORY)
    for _ in range(MOST_CAUSES):
        error = raised_from(ValueError("x"), error)
    assert not has_run_out(error)
    assert has_run_out(error.__cause__)


def fake_cuda(*peaks: int, is_begun: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        is_initialized=lambda: is_begun,
        device_count=lambda: len(peaks),
        max_memory_reserved=lambda index: peaks[index],
    )


POOL = SimpleNamespace(total_bytes=lambda: 9)
CUPY = SimpleNamespace(get_default_memory_pool=lambda: POOL)


@pytest.mark.parametrize(
    ("cuda", "cupy", "peak"),
    [
        (None, None, 0),
        (fake_cuda(3, 7), None, 7),
        (fake_cuda(3, 7), CUPY, 9),
        (fake_cuda(3, is_begun=False), None, 0),
        (SimpleNamespace(), SimpleNamespace(), 0),
    ],
)
def test_peak_memory_is_read_from_torch_and_cupy(
    monkeypatch: pytest.MonkeyPatch,
    cuda: SimpleNamespace | None,
    cupy: SimpleNamespace | None,
    peak: int,
) -> None:
    for name, module in (("torch.cuda", cuda), ("cupy", cupy)):
        if module is None:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    assert peak_memory() == peak


class CUDARuntimeError(RuntimeError):
    """An exception with the name of CuPy's."""


ILLEGAL = "an illegal memory access was encountered"
ASYNC = """
CUDA kernel errors might be asynchronously reported at some other API call, so the
stacktrace below might be incorrect."""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cudaErrorIllegalAddress", RuntimeError(f"CUDA error: {ILLEGAL}{ASYNC}")),
        ("cudaErrorAssert", RuntimeError("CUDA error: device-side assert triggered")),
        (
            "cudaErrorIllegalAddress",
            CUDARuntimeError(f"cudaErrorIllegalAddress: {ILLEGAL}"),
        ),
        (
            "cudaErrorIllegalAddress",
            RuntimeError("[700] Call to cuMemcpyDtoH: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ),
        (
            "cudaErrorLaunchFailure",
            RuntimeError("INTERNAL: CUDA error: CUDA_ERROR_LAUNCH_FAILED"),
        ),
        (
            "cudaErrorECCUncorrectable",
            RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        ),
        (None, RuntimeError("CUDA error: out of memory")),
        (None, RuntimeError("CUDA error: no kernel image is available")),
        (None, RuntimeError(ILLEGAL)),
        (None, ValueError("misaligned address")),
        (None, Mute()),
    ],
)
def test_errors_that_spoil_a_device_are_recognized(
    name: str | None, error: Exception
) -> None:
    assert poisoned_by(error) == name


def test_error_that_spoils_the_device_is_found_among_causes() -> None:
    deep = RuntimeError("CUDA error: device-side assert triggered")
    raised = raised_from(ValueError("the step failed"), deep)
    assert poisoned_by(raised) == "cudaErrorAssert"
    circle = ValueError("a")
    circle.__context__ = raised
    deep.__cause__ = circle
    assert poisoned_by(circle) == "cudaErrorAssert"


def test_exception_that_takes_no_notes_is_unchanged() -> None:
    class Stubborn(Exception):
        def add_note(self, note: str, /) -> None:
            raise TypeError(note)

    explain_poisoned(Stubborn(), "cudaErrorAssert", 1)
