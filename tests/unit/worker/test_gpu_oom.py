"""Which errors mean that device memory has run out, and how much was used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from aiogpu.errors import GpuOutOfMemoryError, RemoteTraceback
from aiogpu.worker.gpu import MOST_CAUSES, has_run_out, peak_memory


def named(module: str, name: str, base: type[Exception] = RuntimeError) -> type:
    return type(name, (base,), {"__module__": module})


TORCH = (
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
        RuntimeError(TORCH),
        named("torch", "OutOfMemoryError")("whatever it says"),
        named("torch.cuda", "OutOfMemoryError")(""),
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
        XLA("RESOURCE_EXHAUSTED: Failed to allocate request for 4.00GiB (4294967296B)"),
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
        ExceptionGroup("both", [RuntimeError(TORCH), RuntimeError(TORCH)]),
    ],
)
def test_it_is_recognised(error: Exception) -> None:
    assert has_run_out(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 8. GiB for an array with shape (9,)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: Cannot allocate"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        named("grpc", "RpcError")("RESOURCE_EXHAUSTED: message larger than max"),
        TF("OOM when allocating tensor on /device:CPU:0 by allocator cpu"),
        GpuOutOfMemoryError(f"child ran out of GPU memory: {TORCH}"),
        ExceptionGroup("one of two", [RuntimeError(TORCH), ValueError()]),
        ValueError(),
        Mute(),
    ],
)
def test_other_errors_are_not_it(error: Exception) -> None:
    assert not has_run_out(error)


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_a_cause_counts_and_what_was_dealt_with_does_not() -> None:
    assert has_run_out(raised_from(ValueError("no"), RuntimeError(TORCH)))
    during = ValueError("another")
    during.__context__ = RuntimeError(TORCH)
    assert not has_run_out(during)


def test_what_was_raised_in_another_process_is_not_this_ones() -> None:
    far = raised_from(RuntimeError(TORCH), RemoteTraceback(TORCH))
    assert not has_run_out(far)
    assert not has_run_out(raised_from(ValueError("no"), far))


def test_a_ring_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not has_run_out(first)
    error: Exception = RuntimeError(TORCH)
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
        (fake_cuda(), fake_cupy(9), 9),
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
