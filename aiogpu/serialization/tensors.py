"""Pickling of torch tensors, whose memory becomes an out-of-band buffer.

torch's own reducer copies each tensor into an archive inside the stream, and a device
tensor can be loaded only where this device exists. torch is not imported here before
the process has or receives a tensor.

Tensors that share memory arrive with separate memory; the same tensor object, twice in
a value, arrives as one object. A loaded tensor uses the loaded buffer as its memory.
torch has no read-only tensors, so code that changes a tensor in place must own the
buffer, or `clone()` the tensor first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pickle import PickleBuffer
from typing import Any, Final

from aiogpu.serialization.diagnostics import advise
from aiogpu.serialization.references import PROTOCOL

_NOT_WRITABLE: Final = "The given buffer is not writable"

_done: Final[set[str]] = set()
"""One-time actions that this process has done."""


def reducers(torch: object) -> dict[type, Callable[[Any], Any]]:
    """Return the reducers of torch's types; empty while torch is half imported."""
    storage = getattr(torch, "storage", None)
    kinds = {
        getattr(torch, "Tensor", None): _reduce_tensor,
        getattr(storage, "TypedStorage", None): _reduce_typed_storage,
        getattr(storage, "UntypedStorage", None): _reduce_storage,
    }
    return {} if None in kinds else kinds  # type: ignore[return-value]


def tensor_over(
    buffer: memoryview | bytearray,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Any:
    """Make a tensor over a buffer, without a copy.

    Args:
        buffer: memory from the first element on.
        dtype: torch's type of the elements.
        shape: elements along each dimension.
        strides: distance between neighbours along each dimension, in elements.
    """
    torch: Any = import_module("torch")
    if "silenced" in _done and not torch.is_warn_always_enabled():
        flat = torch.frombuffer(buffer, dtype=dtype)
    else:
        # torch warns once per process, so the filters are changed only once.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NOT_WRITABLE)
            flat = torch.frombuffer(buffer, dtype=dtype)
        if memoryview(buffer).readonly:
            _done.add("silenced")
    return flat.as_strided(shape, strides)


def on_device(host: Any, index: int) -> Any:
    """Copy a tensor to the CUDA device of an index, if the device exists."""
    cuda: Any = import_module("torch").cuda
    if cuda.is_available() and index < cuda.device_count():
        return host.cuda(index)
    return host


def typed(storage: Any, dtype: Any) -> Any:
    """Make a typed storage, for torch's older rebuild functions."""
    kind: Any = import_module("torch.storage").TypedStorage
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


def _reduce_tensor(tensor: Any) -> Any:
    if not _is_plain(tensor):
        return tensor.__reduce_ex__(PROTOCOL)
    if tensor.is_cuda:
        _warn_of_copies()
        return on_device, (tensor.cpu(), tensor.device.index)
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return tensor.__reduce_ex__(PROTOCOL)
    from ctypes import c_char

    if _extent(tensor) > tensor.numel():
        tensor = tensor.contiguous()  # skip elements in gaps, which need not be sent
    # A buffer that keeps the tensor alive, without numpy.
    size = _extent(tensor) * tensor.element_size()
    memory: Any = (c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    layout = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    return tensor_over, (PickleBuffer(memory), *layout)


def _is_plain(tensor: Any) -> bool:
    """Return True if elements, type, shape and strides fully describe a tensor."""
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
    """Return the number of elements in memory from a tensor's first to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent: int = 1 + sum((size - 1) * stride for size, stride in pairs)
    return extent


def _reduce_typed_storage(storage: Any) -> Any:
    # Its public attributes warn that the class is deprecated.
    untyped = storage._untyped_storage
    if untyped.device.type != "cuda":
        return storage.__reduce_ex__(PROTOCOL)
    return typed, (untyped, storage.dtype)


def _reduce_storage(storage: Any) -> Any:
    if storage.device.type != "cuda":
        return storage.__reduce_ex__(PROTOCOL)
    _warn_of_copies()
    return on_device, (storage.cpu(), storage.device.index)


def _warn_of_copies() -> None:
    if "told" not in _done:
        _done.add("told")
        advise(
            "a CUDA tensor was pickled. It is copied through host memory, and arrives "
            "on the CUDA device of the same index in the other process, or on the CPU "
            "if there is no such device. Keep tensors in an actor that owns the "
            "device, or send `tensor.cpu()`."
        )
