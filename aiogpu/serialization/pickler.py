"""Pickles any object, with its large buffers out of band.

The only module that imports cloudpickle; it is imported late, since plain values do not
need it. `dump_exception` keeps the `args` and attributes of exceptions and calls no
constructor of their class. `BaseException.__reduce__` would call the constructor with
the arguments of `super().__init__()`, which fails or changes the text if the
constructor takes other arguments.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from functools import _lru_cache_wrapper, lru_cache
from io import BytesIO
from sys import modules
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Final

import cloudpickle

from aiogpu.serialization.references import PROTOCOL, keep_small_buffers


def _reduce_cache(cached: _lru_cache_wrapper[Any]) -> str | tuple[object, ...]:
    """Reduce a function wrapped by `lru_cache`; `functools` uses only its name."""
    name = getattr(cached, "__qualname__", "")  # a partial object has none
    if name and importable(cached.__module__ or "", name) is cached:
        return name
    terms = cached.cache_parameters()
    return _make_cached, (cached.__wrapped__, terms["maxsize"], terms["typed"])


def _make_cached(
    function: Callable[..., Any], most: int | None, is_typed: bool
) -> _lru_cache_wrapper[Any]:
    """Give the function a fresh, empty cache."""
    return lru_cache(most, is_typed)(function)


_FILENAME: Final = 10
"""Index of `filename` among the arguments of `CodeType`."""


def _reduce_code(code: CodeType) -> tuple[object, ...]:
    """Reduce a code object with the name of its file.

    cloudpickle 3.1.3 and later replace the name by `<dynamic-code>`: tracebacks would
    lack source lines, and breakpoints and coverage would not find the code.
    """
    make, args, *rest = cloudpickle.Pickler.dispatch_table[CodeType](code)
    args = (*args[:_FILENAME], code.co_filename, *args[_FILENAME + 1 :])
    return make, args, *rest


_REDUCERS: Final = ("__reduce__", "__reduce_ex__", "__setstate__")

_HEAP_TYPE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement."""


def _reduce_exception(error: BaseException) -> tuple[Any, ...] | None:
    """Reduce an exception, in the form of `__reduce__`.

    Returns:
        None if pickle's default is right: the class is built in, has no constructor of
        its own, or defines how it is pickled.

    Raises:
        Exception: an error of a slot or attribute of the exception.
    """
    kind = type(error)
    base = _builtin_base(kind)
    if kind.__init__ is base.__init__ and kind.__new__ is base.__new__:
        return None
    own = [getattr(kind, name) is not getattr(base, name) for name in _REDUCERS]
    if any(own) or kind in copyreg.dispatch_table:
        return None
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple), error
    _, args, state = (*reduced, None)[:3]
    attributes = dict(state or {})
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]
        if hasattr(error, name):
            attributes[name] = getattr(error, name)
    return _make_exception, (kind, *args), attributes, None, None, _set_attributes


def _builtin_base(kind: type[BaseException]) -> Any:
    """Return the innermost built-in base, which holds the state in C."""
    while kind.__flags__ & _HEAP_TYPE:
        assert kind.__base__ is not None, kind
        kind = kind.__base__
    return kind


def _make_exception(kind: type[BaseException], *args: object) -> BaseException:
    base = _builtin_base(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


def _set_attributes(error: BaseException, attributes: dict[str, object]) -> None:
    for name, value in attributes.items():
        object.__setattr__(
            error, name, value
        )  # the class's own `__setattr__` may refuse


_SPAWNED: Final = "__mp_main__"
"""The name of the program's module in a process spawned by multiprocessing."""

_PROGRAMS: Final = ("__main__", _SPAWNED)

_CASTABLE: Final = frozenset("cbB?hHiIlLqQnNfd")


def dump(value: object) -> tuple[bytes, list[memoryview]]:
    """Pickle an object without its large buffers; see `keep_small_buffers`.

    Shared objects stay shared when loaded; two arrays over the same memory become
    separate.

    Returns:
        The stream, and flat views of the out-of-band buffers, in the order of
        `pickle.loads`. The views keep their objects alive.

    Raises:
        Exception: an error of a reducer.
    """
    large: list[memoryview] = []
    return _pickle(value, keep_small_buffers(large)), large


def dump_whole(value: object) -> bytes:
    """Pickle an object with all its buffers inside the stream.

    Raises:
        Exception: an error of a reducer.
    """
    return _pickle(value)


def dump_exception(error: BaseException) -> bytes:
    """Pickle an exception, even if its class redefines the constructor.

    Raises:
        Exception: an error of a reducer.
    """
    return _pickle(error, kind=_ExceptionPickler)


def measure(value: object) -> int:
    """Return the pickled size of an object in bytes, its buffers included.

    The pickle is not kept, so no memory of this size is needed.

    Raises:
        Exception: an error of a reducer.
    """
    counter = _ByteCounter()
    _pickler(counter, counter.add_buffer).dump(value)
    return counter.total


_checked: Final[dict[str, ModuleType]] = {}
"""The modules of which it is known whether other interpreters find them."""


def _check_module(name: str) -> None:
    """Have a module pickled by value if other interpreters do not find it by its name.

    cloudpickle takes each module in `sys.modules` for one that they find.
    """
    module = modules.get(name)
    # A subclass of `ModuleType` stands for a module in ways that only it knows.
    if type(module) is not ModuleType or _checked.get(name) is module:
        return
    _checked[name] = module
    if name in _PROGRAMS or module.__name__ != name:
        return
    package = name.rpartition(".")[0]
    # A package that is pickled by value includes its modules.
    if not (package and is_sent_by_value(package)) and not _is_findable(name, module):
        cloudpickle.register_pickle_by_value(module)


def _is_findable(name: str, module: ModuleType) -> bool:
    """Return whether an import by a name elsewhere gives the same module.

    Packages make modules without files, and extensions written in C make some that no
    import finds. All of these count as found.

    Args:
        name: the module's name; its package is findable.
        module: the module of this name in this process.
    """
    package, _, last = name.rpartition(".")
    places: Iterable[str] | None = None
    if package:
        if package not in modules:
            return False
        places = getattr(modules[package], "__path__", None)
    origin = _origin(module)
    if origin in ("built-in", "frozen"):
        return True
    # Without a search, in a microsecond: nearly all modules are where their names say.
    place, file = os.path.split(origin or "")
    if file.startswith("__init__."):
        place, file = os.path.split(place)
    if file.partition(".")[0] == last and place in (places or sys.path):
        return True
    spec = _find(name, places)
    if spec is None:
        if package and origin is None:
            return True
        # Only Python code that was run in the module leaves the first name.
        return vars(module).keys().isdisjoint({"__builtins__", "__path__"})
    if origin is None and spec.origin is None:  # namespace packages
        found = set(spec.submodule_search_locations or ())
        return not found.isdisjoint(getattr(module, "__path__", ()))
    if origin is None or spec.origin is None:
        return False
    same: bool = os.path.realpath(origin) == os.path.realpath(spec.origin)
    return same


def _origin(module: ModuleType) -> str | None:
    """Return the file of a module, or a word for where it comes from."""
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    return origin if isinstance(origin, str) else None


def _find(name: str, places: Any) -> Any:
    """Search for a module as an import does, though it is imported already."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, places)
        if spec is not None:
            return spec
    return None


def is_sent_by_value(module: str) -> bool:
    """Return True if the user wants it so, or other interpreters do not find it."""
    _check_module(module)
    names = cloudpickle.list_registry_pickle_by_value()
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def importable(module: str, qualname: str) -> object:
    """Return the object that workers import by a name; None if it is sent by value.

    Workers have another `__main__`, and cannot import functions inside functions, or
    modules that this program has loaded without their names.
    """
    if module in _PROGRAMS or is_sent_by_value(module):
        return None
    target: object = modules.get(module)
    for step in qualname.split("."):
        target = getattr(target, step, None)
    return target


def view(buffer: memoryview | bytes, kind: str, shape: tuple[int, ...]) -> memoryview:
    """Rebuild a pickled memoryview: read-only, with the same format and shape.

    Args:
        buffer: its bytes.
        kind: the format of its items, as in `struct`.
        shape: items along each dimension.
    """
    flat = memoryview(buffer).toreadonly()
    if kind == "B" and len(shape) == 1:
        return flat
    return flat.cast(kind, shape)  # type: ignore[call-overload, no-any-return]


def _reduce_view(seen: memoryview) -> tuple[object, ...]:
    """Reduce a memoryview without a copy; cloudpickle would convert it to `bytes`."""
    kind = seen.format.removeprefix("@")
    shape = seen.shape or ()
    if kind not in _CASTABLE or 0 in shape:
        kind, shape = "B", (seen.nbytes,)
    # pickle refuses buffers with gaps, and would transpose a Fortran-ordered buffer.
    source = seen if seen.c_contiguous else seen.tobytes()
    return view, (pickle.PickleBuffer(source), kind, shape)


def _reduce_module(module: ModuleType) -> tuple[object, ...]:
    _check_module(module.__name__)
    reduced: tuple[object, ...] = cloudpickle.Pickler.dispatch_table[ModuleType](module)
    return reduced


class _Reducers(dict[type, Callable[[Any], Any]]):
    """aiogpu's reducers of some types; cloudpickle's and the user's for the rest.

    The other tables are not copied into this one, since they change at run time.
    cloudpickle's chain of tables costs two exceptions per object.
    """

    torch: object = None

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        for table in cloudpickle.Pickler.dispatch_table.maps:
            if kind in table:
                reducer: Callable[[Any], Any] = table[kind]
                return reducer
        managers: Any = modules.get("multiprocessing.managers")
        if managers is not None and issubclass(kind, managers.BaseProxy):
            from aiogpu.serialization.managers import reduce_proxy

            return reduce_proxy
        raise KeyError(kind)

    def add_torch(self, torch: object) -> None:
        """Reduce tensors too, as soon as torch is loaded."""
        from aiogpu.serialization.tensors import reducers

        if known := reducers(torch):
            self.update(known)
            self.torch = torch


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = _Reducers(
        {
            CodeType: _reduce_code,
            ModuleType: _reduce_module,
            memoryview: _reduce_view,
            _lru_cache_wrapper: _reduce_cache,
        }
    )

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            name = getattr(value, "__module__", None)
            if type(name) is str:
                _check_module(name)
        return super().reducer_override(value)


class _ExceptionPickler(_Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            reduced = _reduce_exception(value)
            if reduced is not None:
                return reduced
        return super().reducer_override(value)


class _ByteCounter:
    """A file that only counts what is written to it."""

    total = 0

    def write(self, data: bytes | memoryview) -> None:
        self.total += len(data)

    def add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        self.total += buffer.raw().nbytes
        return False


def _pickle(
    value: object,
    is_kept: Callable[[pickle.PickleBuffer], bool] | None = None,
    kind: type[_Pickler] = _Pickler,
) -> bytes:
    stream = BytesIO()
    _pickler(stream, is_kept, kind).dump(value)
    return stream.getvalue()


def _pickler(
    file: BytesIO | _ByteCounter,
    is_kept: Callable[[pickle.PickleBuffer], bool] | None,
    kind: type[_Pickler] = _Pickler,
) -> _Pickler:
    torch = modules.get("torch")
    if torch is not _Pickler.dispatch_table.torch and "torch.storage" in modules:
        # Before that, torch may be a lazy module, which an attribute access would load.
        _Pickler.dispatch_table.add_torch(torch)
    program = modules.get(_SPAWNED)
    # In other processes multiprocessing gives this name to `__main__` too.
    if program is not None and program.__name__ == _SPAWNED:
        # cloudpickle would treat it as a module that other processes can import.
        cloudpickle.register_pickle_by_value(program)
    return kind(file, PROTOCOL, is_kept)
