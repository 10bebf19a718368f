"""Tensors of torch: their memory goes beside the stream, as that of arrays does.

torch's own way copies each tensor into an archive within the stream, and what lay on
a device can be read only where that device is. Nothing here imports torch before the
process has a tensor, or gets one.

Tensors that share memory arrive apart; an object pickled twice in one value is one
again. A tensor over a loaded buffer *is* that buffer: torch knows no read-only memory,
so whoever changes it in place must own what it lies in, or take a `clone()` first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pickle import PickleBuffer
from typing import Any, Final

from aiogpu.serialization.diagnostics import advise

_PROTOCOL: Final = 5
_NOT_WRITABLE: Final = "The given buffer is not writable"

_done: Final[set[str]] = set()
"""What is done once in a process."""


def reducers(torch: object) -> dict[type, Callable[[Any], Any]]:
    """How to reduce each of torch's own types; none while torch is half imported."""
    storage = getattr(torch, "storage", None)
    kinds = {
        getattr(torch, "Tensor", None): _reduced_tensor,
        getattr(storage, "TypedStorage", None): _reduced_typed,
        getattr(storage, "UntypedStorage", None): _reduced_storage,
    }
    return {} if None in kinds else kinds  # type: ignore[return-value]


def tensor_over(
    buffer: memoryview | bytearray,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Any:
    """The tensor whose memory a buffer is, without a copy.

    Args:
        buffer: the elements, from the first on.
        dtype: their type, one of torch's.
        shape: elements along each dimension.
        strides: elements from one to the next along each dimension.
    """
    torch: Any = import_module("torch")
    if "silenced" in _done and not torch.is_warn_always_enabled():
        flat = torch.frombuffer(buffer, dtype=dtype)
    else:
        # torch says it once in a process, so the filters are disturbed only once.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NOT_WRITABLE)
            flat = torch.frombuffer(buffer, dtype=dtype)
        if memoryview(buffer).readonly:
            _done.add("silenced")
    return flat.as_strided(shape, strides)


def on_device(host: Any, index: int) -> Any:
    """A tensor or storage on the CUDA device of an index, else as it is, on the CPU."""
    cuda: Any = import_module("torch").cuda
    if cuda.is_available() and index < cuda.device_count():
        return host.cuda(index)
    return host


def typed(storage: Any, dtype: Any) -> Any:
    """What older rebuilding functions of torch take: a storage that knows its type."""
    kind: Any = import_module("torch.storage").TypedStorage
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


def _reduced_tensor(tensor: Any) -> Any:
    if not _is_plain(tensor):
        return tensor.__reduce_ex__(_PROTOCOL)
    if tensor.is_cuda:
        _tell_of_copies()
        return on_device, (tensor.cpu(), tensor.device.index)
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return tensor.__reduce_ex__(_PROTOCOL)
    if _extent(tensor) > tensor.numel():
        tensor = tensor.contiguous()  # it skips elements that need not travel
    memory = _memory(tensor, _extent(tensor) * tensor.element_size())
    layout = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    return tensor_over, (PickleBuffer(memory), *layout)


def _is_plain(tensor: Any) -> bool:
    """Whether elements, type, shape and strides are all there is to it."""
    torch: Any = import_module("torch")
    return not (
        tensor.layout is not torch.strided
        or tensor.requires_grad
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.__dict__
        or any(getattr(tensor, "names", ()))
    )


def _extent(tensor: Any) -> int:
    """Elements of memory from a tensor's first element to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent: int = 1 + sum((size - 1) * stride for size, stride in pairs)
    return extent


def _memory(tensor: Any, size: int) -> Any:
    """A tensor's memory as a buffer that keeps it alive, also without numpy."""
    from ctypes import c_char

    memory: Any = (c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memory


def _reduced_typed(storage: Any) -> Any:
    # Its public attributes warn that the class is to go.
    untyped = storage._untyped_storage
    if untyped.device.type != "cuda":
        return storage.__reduce_ex__(_PROTOCOL)
    return typed, (untyped, storage.dtype)


def _reduced_storage(storage: Any) -> Any:
    if storage.device.type != "cuda":
        return storage.__reduce_ex__(_PROTOCOL)
    _tell_of_copies()
    return on_device, (storage.cpu(), storage.device.index)


def _tell_of_copies() -> None:
    if "told" not in _done:
        _done.add("told")
        advise(
            "a CUDA tensor was pickled. It is copied through the host's memory, and "
            "arrives on the CUDA device of the same index in the other process, or on "
            "the CPU if that has none. Keep tensors in an actor that owns the device, "
            "or send `tensor.cpu()`."
        )
