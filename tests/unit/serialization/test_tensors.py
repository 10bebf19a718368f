"""Tensors of a fake torch; `test_real_tensors.py` tests the real torch."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from aiogpu.errors import AiogpuWarning
from aiogpu.serialization import pickler, tensors
from aiogpu.serialization.pickler import dump
from aiogpu.serialization.references import SHARED_FROM
from tests.unit.serialization.payloads import load, round_trip

EDGE = SHARED_FROM // 8


READ_ONLY = (
    "The given buffer is not writable, and PyTorch does not support non-writable "
    "tensors."
)


class Storage:
    def __init__(self, kind="cpu", index=None):
        self.device = SimpleNamespace(type=kind, index=index)

    def cpu(self):
        return type(self)()

    def cuda(self, index):
        return type(self)("cuda", index)


class Typed:
    """A typed storage with the parts that cause no warning."""

    def __init__(self, *, wrap_storage, dtype, _internal):
        self._untyped_storage = wrap_storage
        self.dtype = dtype


class Tensor:
    """A tensor over an array, with the parts that aiogpu reads."""

    __slots__ = ("__dict__", "array", "device", "facts", "is_cuda", "requires_grad")
    layout = "strided"
    is_quantized = is_nested = False

    def __init__(self, array, kind="cpu", index=None):
        self.array = array
        self.device = SimpleNamespace(type=kind, index=index)
        self.is_cuda = kind == "cuda"
        self.requires_grad = False
        self.facts = {}

    def __reduce_ex__(self, protocol):
        return by_torch, (self.array.tolist(),)

    dtype = property(lambda self: self.array.dtype.str)
    shape = property(lambda self: self.array.shape)

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def is_conj(self):
        return self.facts.get("conj", False)

    def is_neg(self):
        return self.facts.get("neg", False)

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array))

    def cpu(self):
        return Tensor(self.array)

    def cuda(self, index):
        return Tensor(self.array, "cuda", index)

    def as_strided(self, shape, strides):
        steps = [stride * self.array.itemsize for stride in strides]
        return Tensor(np.lib.stride_tricks.as_strided(self.array, shape, steps))


class Named(Tensor):
    names = ("batch",)


class Late(Tensor):
    """A tensor of a torch that another thread still imports."""


def by_torch(values):
    return "by torch", values


class Torch(ModuleType):
    Tensor = Tensor
    strided = "strided"

    def __init__(self):
        super().__init__("torch")
        self.storage = ModuleType("torch.storage")
        self.storage.TypedStorage = Typed
        self.storage.UntypedStorage = Storage
        self.cards = 0
        self.has_warned = self.always = False
        self.cuda = SimpleNamespace(
            is_available=lambda: self.cards > 0, device_count=lambda: self.cards
        )

    def is_warn_always_enabled(self):
        return self.always

    def frombuffer(self, buffer, *, dtype):
        if memoryview(buffer).readonly and (self.always or not self.has_warned):
            self.has_warned = True
            warnings.warn(READ_ONLY, UserWarning, stacklevel=2)
        return Tensor(np.frombuffer(buffer, dtype))


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.storage", torch.storage)
    monkeypatch.setattr(tensors, "_done", set())
    monkeypatch.setattr(pickler._Pickler, "dispatch_table", pickler._Reducers())
    return torch


def test_check_of_other_values_does_not_load_torch(monkeypatch):
    """`importlib.util.LazyLoader` loads a module on any access."""

    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "torch", Lazy("torch"))
    monkeypatch.delitem(sys.modules, "torch.storage", raising=False)
    assert round_trip([1]) == [1]


def test_tensor_is_not_copied_and_its_buffer_keeps_it_alive():
    values = np.arange(EDGE)
    stream, (buffer,) = dump([Tensor(values)])
    assert np.shares_memory(np.frombuffer(buffer, "i8"), values)
    (again,) = load(stream, [buffer])
    assert np.shares_memory(again.array, values)
    assert again.array.tolist() == values.tolist()
    _, (buffer,) = dump(Tensor(np.full(EDGE, 7)))
    assert bytes(buffer[-8:-7]) == b"\7"


@pytest.mark.parametrize(
    ("values", "strides", "size"),
    [
        (np.arange(EDGE * 2).reshape(2, EDGE), (EDGE, 1), EDGE * 16),
        (np.arange(EDGE * 2).reshape(EDGE, 2).T, (1, 2), EDGE * 16),
        (np.broadcast_to(np.arange(EDGE), (5, EDGE)), (0, 1), EDGE * 8),
        (np.arange(EDGE * 2)[::2], (1,), EDGE * 8),
        (np.arange(EDGE * 4).reshape(2, 2 * EDGE)[:, EDGE:], (EDGE, 1), EDGE * 16),
    ],
    ids=["contiguous", "transposed", "expanded", "with gaps", "a part"],
)
def test_strides_without_gaps_are_kept(values, strides, size):
    stream, (buffer,) = dump(Tensor(values))
    assert buffer.nbytes == size
    again = load(stream, [buffer])
    assert again.stride() == strides
    assert again.array.tolist() == values.tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: setattr(tensor, "requires_grad", True),
        lambda tensor: tensor.facts.update(conj=True),
        lambda tensor: tensor.facts.update(neg=True),
        lambda tensor: setattr(tensor, "note", "mine"),
        lambda tensor: setattr(tensor.device, "type", "meta"),
    ],
    ids=["gradient", "conjugate", "negative", "attribute", "meta device"],
)
def test_tensors_with_more_than_memory_are_pickled_by_torch(change):
    tensor = Tensor(np.arange(3))
    change(tensor)
    assert round_trip(tensor) == ("by torch", [0, 1, 2])
    assert round_trip(Tensor(np.zeros((0, 3)))) == ("by torch", [])
    assert round_trip(Named(np.arange(2))) == ("by torch", [0, 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("layout", "sparse"), ("is_quantized", True), ("is_nested", True)],
        ("names", ("batch",)),
    ],
)
def test_other_kinds_of_tensors_are_pickled_by_torch(name, value, monkeypatch):
    monkeypatch.setattr(Tensor, name, value, raising=False)
    assert round_trip(Tensor(np.arange(3))) == ("by torch", [0, 1, 2])


# The warning of torch


def test_warning_of_torch_is_silenced_only_the_first_time(torch, monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        round_trip(Tensor(np.arange(EDGE)))
    assert torch.has_warned
    assert caught == []
    # A change of the filters would show earlier warnings again.
    monkeypatch.delattr(warnings, "catch_warnings")
    round_trip(Tensor(np.arange(EDGE)))


# CUDA


@pytest.mark.parametrize(
    ("cards", "index", "place"),
    [
        *[(0, 0, ("cpu", None)), (1, 0, ("cuda", 0)), (1, 1, ("cpu", None))],
        (2, 1, ("cuda", 1)),
    ],
)
def test_cuda_tensor_arrives_at_its_index_or_on_the_cpu(torch, cards, index, place):
    with pytest.warns(AiogpuWarning, match="through host memory"):
        stream, buffers = dump(Tensor(np.arange(EDGE), "cuda", index))
    assert len(buffers) == 1
    torch.cards = cards
    again = load(stream, buffers)
    assert (again.device.type, again.device.index) == place
    assert again.array.tolist() == list(range(EDGE))


def test_copies_from_a_device_are_warned_of_once():
    on_cuda = [Tensor(np.arange(3), "cuda", 0), Tensor(np.arange(3), "cuda", 1)]
    with pytest.warns(AiogpuWarning) as caught:
        dump([*on_cuda, Storage("cuda", 0)])
    dump(on_cuda)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore::aiogpu.errors.AiogpuWarning")
def test_storage_on_a_device_is_never_pickled_by_torch():
    """Tensors with a gradient contain it; torch reads its pickle on CUDA only."""
    again = round_trip(Storage("cuda", 0))
    assert again.device.type == "cpu"
    typed = Typed(wrap_storage=Storage("cuda", 0), dtype="<f4", _internal=True)
    again = round_trip(typed)
    assert type(again) is Typed
    assert (again._untyped_storage.device.type, again.dtype) == ("cpu", "<f4")


def test_storage_of_the_cpu_is_pickled_by_torch(monkeypatch):
    for kind in (Storage, Typed):
        monkeypatch.setattr(
            kind, "__reduce_ex__", lambda self, protocol: (by_torch, ([],))
        )
    typed = Typed(wrap_storage=Storage(), dtype="<f4", _internal=True)
    assert round_trip([Storage(), typed]) == [("by torch", [])] * 2


# Torch during its import


@pytest.mark.parametrize("missing", ["Tensor", "storage"])
def test_partly_imported_torch_is_ignored(torch, missing):
    torch.Tensor = Late
    attribute = getattr(torch, missing)
    setattr(torch, missing, None)
    assert round_trip(Late(np.arange(3))) == ("by torch", [0, 1, 2])
    setattr(torch, missing, attribute)
    assert round_trip(Late(np.arange(3))).array.tolist() == [0, 1, 2]
