"""GPU memory in a worker: PyTorch's limit, running out of it, spoilt devices."""

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
from aiogpu.errors import GpuOutOfMemoryError, RemoteTraceback
from aiogpu.worker.gpu import (
    MOST_CAUSES,
    Watching,
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
    """The file of a small `torch.cuda`, ready to be imported."""
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
    watching = [finder for finder in sys.meta_path if isinstance(finder, Watching)]
    return any(finder.is_waiting for finder in watching)


@pytest.mark.usefixtures("torch")
def test_what_imports_are_noted_and_what_threads_import() -> None:
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
def test_one_loader_may_serve_many_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of a zip file does."""
    (tmp_path / "beside_torch.py").write_text("value = 7\n")
    monkeypatch.delitem(sys.modules, "beside_torch", raising=False)

    class One:
        """Finds both, and loads them."""

        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            if name not in ("torch.cuda", "beside_torch"):
                return None
            return ModuleSpec(name, self)  # type: ignore[arg-type]

        def create_module(self, _spec: ModuleSpec) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            name = {"torch.cuda": "torch/cuda.py"}.get(module.__name__)
            exec((tmp_path / (name or "beside_torch.py")).read_text(), vars(module))

    sys.meta_path.insert(0, One())
    limit_torch((40 * GIB, 0))
    watching = sys.meta_path[0]
    for _ in range(2):  # as those do who only ask whether it is there
        assert watching.find_spec("torch.cuda", None) is not None
    assert importlib.import_module("beside_torch").value == 7
    assert is_watched()
    cuda = load()
    cuda.init()
    assert cuda.fractions == {0: 0.5}
    assert capsys.readouterr().err == ""


def test_an_import_that_fails_is_the_users_and_the_next_one_counts(torch: Path) -> None:
    torch.write_text("raise OSError('no driver')\n")
    limit_torch((40 * GIB,))
    with pytest.raises(OSError, match="no driver"):
        load()
    torch.write_text(TORCH_SOURCE)
    importlib.invalidate_caches()
    assert len(load().calls) == 1
    assert not is_watched()


def test_a_torch_that_takes_no_such_call_is_not_limited(
    capsys: pytest.CaptureFixture[str], torch: Path
) -> None:
    torch.write_text("def is_initialized():\n    return False\n")
    limit_torch((40 * GIB,))
    load()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aiogpu: PyTorch's GPU memory could not be limited: ")
    assert "_lazy_call" in line


def test_a_loader_that_cannot_be_listened_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Watching(print)._listen(object())
    assert "could not be limited: AttributeError" in capsys.readouterr().err
    before = dict(vars(BuiltinImporter))
    Watching(print)._listen(BuiltinImporter)
    assert "which loads others too" in capsys.readouterr().err
    assert dict(vars(BuiltinImporter)) == before


@pytest.mark.usefixtures("torch")
def test_where_all_gpus_are_seen_its_own_are_limited(context: Context) -> None:
    context.accelerators = {"GPU": (1,)}
    cuda = load()
    limit_torch((40 * GIB,))
    cuda.init()
    assert cuda.fractions == {1: 0.5}
    context.accelerators = {"GPU": ("GPU-abc",)}
    cuda.fractions.clear()
    limit_torch((20 * GIB,))
    assert cuda.fractions == {}, "nobody knows which it is"


def named(module: str, name: str, base: type[Exception] = RuntimeError) -> type:
    return type(name, (base,), {"__module__": module})


NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 10.11 GiB is free."
)
XLA = named("jaxlib.xla_extension", "XlaRuntimeError")
TF = named("tensorflow.python.framework.errors_impl", "ResourceExhaustedError")
CUPY = named("cupy_backends.cuda.api.runtime", "CUDARuntimeError")


class Mute(Exception):
    """Says nothing."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(NO_MEMORY),
        named("torch", "OutOfMemoryError")("whatever it says"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        named("torch", "AcceleratorError")("CUDA error: out of memory\nCUDA kernel"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"),
        named("cupy.cuda.memory", "OutOfMemoryError", MemoryError)(
            "Out of memory allocating 8,000,000,000 bytes (allocated so far: 512 b)."
        ),
        CUPY("cudaErrorMemoryAllocation: out of memory"),
        MemoryError(
            "std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp:60:"
            " cudaErrorMemoryAllocation out of memory"
        ),
        XLA("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8000 bytes."),
        TF(
            "OOM when allocating tensor with shape[9,9] and type float on /job:local"
            "host/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:AddV2]"
        ),
        TF("{{function_node x}} failed to allocate memory [Op:Mul]"),
        named("numba.cuda.cudadrv.driver", "CudaAPIError")(
            "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"
        ),
        named("pycuda._driver", "MemoryError")("cuMemAlloc failed: out of memory"),
        RuntimeError("[ONNXRuntimeError] : CUDA failure 2: out of memory ; GPU=0"),
        ExceptionGroup("both", [RuntimeError(NO_MEMORY), RuntimeError(NO_MEMORY)]),
    ],
)
def test_errors_that_mean_that_memory_ran_out(error: Exception) -> None:
    assert has_run_out(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 8. GiB for an array with shape (9,)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: Cannot allocate"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        named("grpc", "RpcError")("RESOURCE_EXHAUSTED: message larger than max"),
        TF("OOM when allocating tensor on /device:CPU:0 by allocator cpu"),
        GpuOutOfMemoryError(f"child ran out of GPU memory: {NO_MEMORY}"),
        ExceptionGroup("one of two", [RuntimeError(NO_MEMORY), ValueError()]),
        ValueError(),
        Mute(),
    ],
)
def test_errors_that_do_not_mean_that_memory_ran_out(error: Exception) -> None:
    assert not has_run_out(error)


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_what_was_raised_in_another_process_is_not_this_ones() -> None:
    remote = raised_from(RuntimeError(NO_MEMORY), RemoteTraceback(NO_MEMORY))
    assert not has_run_out(remote)
    assert not has_run_out(raised_from(ValueError("no"), remote))


def test_a_ring_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not has_run_out(first)
    error: Exception = RuntimeError(NO_MEMORY)
    for _ in range(MOST_CAUSES):
        error = raised_from(ValueError("x"), error)
    assert not has_run_out(error)
    assert error.__cause__ is not None
    assert has_run_out(error.__cause__)


def fake_cuda(*peaks: int, is_begun: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        is_initialized=lambda: is_begun,
        device_count=lambda: len(peaks),
        max_memory_reserved=lambda index: peaks[index],
    )


def fake_cupy(held: int) -> SimpleNamespace:
    pool = SimpleNamespace(total_bytes=lambda: held)
    return SimpleNamespace(get_default_memory_pool=lambda: pool)


@pytest.mark.parametrize(
    ("cuda", "cupy", "peak"),
    [
        (None, None, 0),
        (fake_cuda(3, 7), None, 7),
        (fake_cuda(3, 7), fake_cupy(9), 9),
        (fake_cuda(3, is_begun=False), None, 0),
        (SimpleNamespace(), SimpleNamespace(), 0),
    ],
)
def test_the_peak(
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
    """As CuPy's is called."""


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (
            RuntimeError(
                "CUDA error: an illegal memory access was encountered\n"
                "CUDA kernel errors might be asynchronously reported at some other "
                "API call, so the stacktrace below might be incorrect."
            ),
            "cudaErrorIllegalAddress",
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), "cudaErrorAssert"),
        (
            CUDARuntimeError(
                "cudaErrorIllegalAddress: an illegal memory access was encountered"
            ),
            "cudaErrorIllegalAddress",
        ),
        (
            RuntimeError("[700] Call to cuMemcpyDtoH: CUDA_ERROR_ILLEGAL_ADDRESS"),
            "cudaErrorIllegalAddress",
        ),
        (
            RuntimeError("INTERNAL: CUDA error: CUDA_ERROR_LAUNCH_FAILED"),
            "cudaErrorLaunchFailure",
        ),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered"),
            "cudaErrorECCUncorrectable",
        ),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: no kernel image is available"), None),
        (RuntimeError("an illegal memory access was encountered"), None),
        (ValueError("misaligned address"), None),
        (Mute(), None),
    ],
)
def test_errors_after_which_the_device_cannot_be_used(
    error: Exception, name: str | None
) -> None:
    assert poisoned_by(error) == name


def test_causes_are_looked_at() -> None:
    deep = RuntimeError("CUDA error: device-side assert triggered")
    try:
        try:
            raise deep
        except RuntimeError as error:
            raise ValueError("the step failed") from error
    except ValueError as error:
        raised = error
    assert poisoned_by(raised) == "cudaErrorAssert"
    circle = ValueError("a")
    circle.__context__ = raised
    deep.__cause__ = circle
    assert poisoned_by(circle) == "cudaErrorAssert"


def test_an_exception_that_takes_no_notes_is_left_as_it_is() -> None:
    class Stubborn(Exception):
        def add_note(self, note: str, /) -> None:
            raise TypeError(note)

    explain_poisoned(Stubborn(), "cudaErrorAssert", 1)
