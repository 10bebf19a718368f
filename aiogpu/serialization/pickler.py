"""Any object to a pickle, with its large buffers beside it.

The only module that imports cloudpickle; it is imported late, since plain values do not
need it. An exception gets back its `args` and attributes, and no constructor of its
class is called: `BaseException.__reduce__` would call it with what the class has handed
to `super().__init__()`, which fails or makes another text where that is not what the
constructor takes.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Iterable
from functools import _lru_cache_wrapper, lru_cache
from io import BytesIO
from sys import modules
from typing import Any, ClassVar, Final

import cloudpickle

from aiogpu.serialization.references import keeping

_PROGRAM: Final = "__main__"


def reduced_cache(
    cached: _lru_cache_wrapper[Any], sent_by_value: Callable[[str], bool]
) -> str | tuple[object, ...]:
    """How such a function is pickled; `functools` knows only the way by its name.

    Args:
        cached: what `lru_cache` has made of a function.
        sent_by_value: whether what a module defines goes by value, by its name.
    """
    module = cached.__module__ or _PROGRAM
    name = getattr(cached, "__qualname__", "")  # a partial object has none
    if module != _PROGRAM and not sent_by_value(module):
        found: object = sys.modules.get(module)
        for step in name.split("."):
            found = getattr(found, step, None)
        if found is cached:
            return name
    terms = cached.cache_parameters()
    return _cached, (cached.__wrapped__, terms["maxsize"], terms["typed"])


def _cached(
    function: Callable[..., Any], most: int | None, is_typed: bool
) -> _lru_cache_wrapper[Any]:
    """The same function with a cache of its own, which is empty."""
    return lru_cache(most, is_typed)(function)


Reduced = tuple[Any, ...]

_HEAP_TYPE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement."""


def reduced_exception(error: BaseException) -> Reduced | None:
    """How an exception is to be pickled, as `__reduce__` says it.

    Returns:
        None where pickle's own way is right: the class is built in, has no constructor
        of its own, or says itself how it is pickled.

    Raises:
        Exception: whatever a slot or an attribute of it raises.
    """
    kind = type(error)
    base = _builtin_base(kind)
    if kind is base or (
        kind.__init__ is base.__init__ and kind.__new__ is base.__new__
    ):
        return None
    is_own = kind.__reduce__ is not base.__reduce__
    if is_own or kind.__reduce_ex__ is not base.__reduce_ex__:
        return None
    if kind.__setstate__ is not base.__setstate__ or kind in copyreg.dispatch_table:
        return None
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple), error
    _, args, state = (*reduced, None)[:3]
    attributes = dict(state or {})
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]
        if hasattr(error, name):
            attributes[name] = getattr(error, name)
    return _made, (kind, *args), attributes, None, None, _set_attributes


def _builtin_base(kind: type[BaseException]) -> Any:
    """The innermost of its bases that is built in; its state is kept there, in C."""
    while kind.__flags__ & _HEAP_TYPE:
        assert kind.__base__ is not None, kind
        kind = kind.__base__
    return kind


def _made(kind: type[BaseException], *args: object) -> BaseException:
    base = _builtin_base(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


def _set_attributes(error: BaseException, attributes: dict[str, object]) -> None:
    for name, value in attributes.items():
        object.__setattr__(error, name, value)  # the class's own may refuse


_PROTOCOL: Final = 5

_SPAWNED: Final = "__mp_main__"
"""What multiprocessing calls the program where it has spawned it anew."""

_CASTABLE: Final = frozenset("cbB?hHiIlLqQnNfd")


def dump(value: object) -> tuple[bytes, list[memoryview]]:
    """Pickle an object, and leave its large buffers where they are; see `keeping`.

    What was one object is one again when it is loaded; two arrays that share memory
    become two.

    Returns:
        The stream; and flat views of bytes of the buffers left out of it, in the
        order in which `load` wants them. They keep what they show alive.

    Raises:
        Exception: whatever the reducers of the object's parts raise.
    """
    apart: list[memoryview] = []
    return _pickled(value, keeping(apart)), apart


def dump_whole(value: object) -> bytes:
    """Pickle an object with all its buffers within the stream.

    Raises:
        Exception: whatever the reducers of the object's parts raise.
    """
    return _pickled(value, None)


def dump_exception(error: BaseException) -> bytes:
    """Pickle an exception; see `wire.exceptions` for those with a constructor.

    Raises:
        Exception: whatever the reducers of the object's parts raise.
    """
    stream = BytesIO()
    _pickler(stream, None, _ExceptionPickler).dump(error)
    return stream.getvalue()


def load(stream: bytes | memoryview, buffers: Iterable[memoryview] = ()) -> Any:
    """Undo `dump` or `dump_whole`.

    Args:
        stream: what was pickled.
        buffers: those left out of it, in their order. Arrays and tensors become
            views of them, and arrays read-only ones, whether or not these are.

    Raises:
        Exception: whatever unpickling raises.
    """
    return pickle.loads(stream, buffers=[buffer.toreadonly() for buffer in buffers])


def measure(value: object) -> int:
    """Bytes that an object takes when pickled, its buffers included.

    Keeps nothing of what it counts, so that it needs no memory of that size.

    Raises:
        Exception: whatever the reducers of the object's parts raise.
    """
    scale = _Scale()
    _pickler(scale, scale.weigh).dump(value)
    return scale.total


def names_sent_by_value() -> Iterable[str]:
    """Modules of which the user asked cloudpickle to send what they define."""
    names: Iterable[str] = cloudpickle.list_registry_pickle_by_value()
    return names


def is_sent_by_value(module: str) -> bool:
    """Whether the user asked cloudpickle to send what that module defines."""
    return any(
        module == name or module.startswith(name + ".")
        for name in names_sent_by_value()
    )


def view(buffer: memoryview | bytes, kind: str, shape: tuple[int, ...]) -> memoryview:
    """A memoryview as it was pickled: read-only, of the same format and shape.

    Args:
        buffer: its bytes.
        kind: the format of its items, as in `struct`.
        shape: items along each dimension.
    """
    flat = memoryview(buffer).toreadonly()
    if kind == "B" and len(shape) == 1:
        return flat
    return flat.cast(kind, shape)  # type: ignore[call-overload, no-any-return]


def _reduced_view(seen: memoryview) -> tuple[object, ...]:
    """What cloudpickle copies into `bytes`; here it arrives as what it was."""
    kind = seen.format.removeprefix("@")
    shape = seen.shape or ()
    if kind not in _CASTABLE or 0 in shape:
        kind, shape = "B", (seen.nbytes,)
    # pickle takes no buffer with gaps, and a Fortran-ordered one would arrive turned.
    source = seen if seen.c_contiguous else seen.tobytes()
    return view, (pickle.PickleBuffer(source), kind, shape)


def _reduced_cache(cached: _lru_cache_wrapper[Any]) -> str | tuple[object, ...]:
    # Late: few programs send any.

    return reduced_cache(cached, is_sent_by_value)


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How aiogpu reduces some types; for the rest asks cloudpickle and the user.

    One table would do, were the others' not changed at run time. A chain of all of
    them is what cloudpickle has; it costs two exceptions for every object.
    """

    def __init__(self) -> None:
        super().__init__(
            {memoryview: _reduced_view, _lru_cache_wrapper: _reduced_cache}
        )
        self.torch: object = None

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        for table in cloudpickle.Pickler.dispatch_table.maps:
            if kind in table:
                reducer: Callable[[Any], Any] = table[kind]
                return reducer
        raise KeyError(kind)

    def learn(self, torch: object) -> None:
        """Reduce tensors too, from the time on when torch is there."""
        from aiogpu.serialization.tensors import reducers

        if known := reducers(torch):
            self.update(known)
            self.torch = torch


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = _Reducers()


class _ExceptionPickler(_Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            reduced = reduced_exception(value)
            if reduced is not None:
                return reduced
        return super().reducer_override(value)


class _Scale:
    """A file that only counts what is written to it."""

    def __init__(self) -> None:
        self.total = 0

    def write(self, data: bytes | memoryview) -> None:
        self.total += len(data)

    def weigh(self, buffer: pickle.PickleBuffer) -> bool:
        self.total += buffer.raw().nbytes
        return False


def _pickled(
    value: object, is_kept: Callable[[pickle.PickleBuffer], bool] | None
) -> bytes:
    stream = BytesIO()
    _pickler(stream, is_kept).dump(value)
    return stream.getvalue()


def _pickler(
    file: BytesIO | _Scale,
    is_kept: Callable[[pickle.PickleBuffer], bool] | None,
    kind: type[_Pickler] = _Pickler,
) -> _Pickler:
    torch = modules.get("torch")
    if torch is not _Pickler.dispatch_table.torch and "torch.storage" in modules:
        # Before that it may be one that is loaded by the first look at it.
        _Pickler.dispatch_table.learn(torch)
    program = modules.get(_SPAWNED)
    # Elsewhere multiprocessing has given that name to `__main__`, too.
    if program is not None and program.__name__ == _SPAWNED:
        # cloudpickle takes it for a module that others could import.
        cloudpickle.register_pickle_by_value(program)
    return kind(file, _PROTOCOL, is_kept)
