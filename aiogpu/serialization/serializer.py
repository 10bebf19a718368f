"""Pickles and unpickles arguments, results and functions.

Scalars and arrays of numbers go to the C pickler directly, at a third of the cost:
cloudpickle inspects each object in Python, in case it is a function or class of the
program. Other objects go to `pickler`, which pickles lambdas, closures and definitions
of `__main__` by value. The worker decides which exceptions are retried, since it has
the user's modules.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from copyreg import dispatch_table
from importlib import import_module
from sys import modules
from typing import Any, Final

from aiogpu.errors import (
    AiogpuError,
    DeserializationError,
    MisuseError,
    SerializationError,
)
from aiogpu.serialization.exceptions import (
    ChunkOutcome,
    describe,
    safe_text,
    unpicklable_path,
)
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import (
    HANDLE_MARK,
    PROTOCOL,
    SHARED_FROM,
    PickledValue,
    add_reference,
    collect_references,
    extract_handles,
    keep_small_buffers,
)

SCALARS: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})

_FLAT: Final = frozenset({tuple, list, dict, set})

_KINDS: Final = frozenset("biufc")
"""The kinds of numpy's item types that are numbers."""


def are_numbers(values: Iterable[object]) -> bool:
    """Return True if all values are scalars or arrays of numbers, no subclasses."""
    for value in values:
        kind = type(value)
        # The name first: numpy may be a lazy module, which an attribute access would
        # load.
        if kind not in SCALARS and (
            kind.__name__ != "ndarray" or not _is_array_of_numbers(kind, value)
        ):
            return False
    return True


def _is_array_of_numbers(kind: type, value: Any) -> bool:
    if kind is not getattr(modules.get("numpy"), "ndarray", None):
        return False
    dtype = value.dtype
    return (
        dtype.kind in _KINDS
        # The metadata of the dtype or of its fields may hold any object.
        and dtype.metadata is None
        and dtype.names is None
        # The program may have registered its own reducer of arrays.
        and kind not in dispatch_table
    )


def dump_numbers(value: object) -> bytes | PickledValue:
    """Pickle a value that contains only numbers; see `are_numbers`."""
    large: list[memoryview] = []
    stream = pickle.dumps(value, PROTOCOL, buffer_callback=keep_small_buffers(large))
    is_plain = not large and len(stream) < SHARED_FROM
    return stream if is_plain else PickledValue(stream, large)


_NO_NAMES: Final[dict[str, object]] = {}

NONE_PAYLOAD: Final = pickle.dumps(None, PROTOCOL)
"""The payload of `None`, the most common result."""

NO_ARGUMENTS: Final = pickle.dumps(((), {}), PROTOCOL)
"""The payload of a call without arguments."""

RESULT: Final = ("the result", "result", "Return what it is made from.")
_ADVICE: Final = "Create it inside the task, or pass what it is made from."
PUT: Final = ("the value given to put()", "value", "Put what it is made from.")

WARNED_FROM: Final = 1 << 20
"""Bytes from which repeated sends of an object are warned about."""


def label_arguments(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yield each argument with its name in messages."""
    for index, arg in enumerate(args):
        yield f"args[{index}]", arg
    for name, arg in kwargs.items():
        yield f"kwargs[{name!r}]", arg


def dump_arguments(
    function: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    returns: int = 0,
) -> bytes | PickledValue:
    """Pickle a call's arguments.

    Args:
        function: the function's name, for the message.
        args: positional arguments.
        kwargs: arguments by name.
        returns: number of results that the call shall have, 0 for the default.

    Raises:
        SerializationError: an argument cannot be pickled; the text has its path.
    """
    if not kwargs and not returns and SCALARS.issuperset(map(type, args)):
        payload = pickle.dumps((args, _NO_NAMES), PROTOCOL)
        return payload if len(payload) < SHARED_FROM else PickledValue(payload)
    named = dict(kwargs)
    if not returns and are_numbers((*args, *named.values())):
        return dump_numbers((args, named))
    args, named, handles = extract_handles(args, named)
    try:
        pickled = _dump((args, named))
    except (Exception, SystemExit) as error:
        roots = dict(label_arguments(args, named))
        raise _unpicklable(
            f"the arguments of {function}.remote()", roots, error
        ) from error
    if handles or returns:
        return pickled._replace(
            handles=tuple(handles.values()), places=tuple(handles), returns=returns
        )
    return pickled.stream if pickled.is_plain else pickled


class PickledItem:
    """An item of a chunk, pickled when it was read; it unpickles as the item itself.

    A chunk is sent when it is full, and parts of it may be sent again. The producer may
    refill the same buffer meanwhile, for the next item.
    """

    __slots__ = ("_pickled",)

    def __init__(self, pickled: PickledValue) -> None:
        self._pickled = pickled

    def __repr__(self) -> str:
        return f"<PickledItem of {len(self._pickled.stream)} bytes>"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        stream, buffers = self._pickled.stream, self._pickled.buffers
        for reference in self._pickled.references:
            add_reference(reference)
        return load_item, (stream, *map(pickle.PickleBuffer, buffers))


def load_item(stream: bytes, *buffers: bytes | memoryview) -> Any:
    """Unpickle a `PickledItem`; errors of unpickling pass through."""
    return pickle.loads(stream, buffers=buffers)


def fix_item(function: str, value: Any) -> Any:
    """Return an item of a chunk in a form that later writes to it do not change.

    Scalars, arrays of numbers and flat containers are copied: a pickle for each item
    takes as long as a short call.

    Args:
        function: the name of the function that gets the item, for the message.
        value: the item. A handle is returned unchanged.

    Raises:
        SerializationError: the item cannot be pickled; the text has the path.
    """
    kind = type(value)
    if kind in SCALARS or hasattr(kind, HANDLE_MARK):
        return value
    if are_numbers((value,)):
        array = value.copy(order="K")
        array.setflags(write=value.flags.writeable)
        return array
    if kind in _FLAT and SCALARS.issuperset(map(type, value)):
        if kind is tuple:
            return value
        if kind is not dict or SCALARS.issuperset(map(type, value.values())):
            return value.copy()
    try:
        pickled = _dump(value)
    except (Exception, SystemExit) as error:
        what = f"the arguments of {function}.remote()"
        raise _unpicklable(what, {"args[0]": value}, error) from error
    copies = [
        memoryview(bytes(buffer) if buffer.readonly else bytearray(buffer))
        for buffer in pickled.buffers
    ]
    return PickledItem(pickled._replace(buffers=copies))


def load_arguments(payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo `dump_arguments`; errors of unpickling pass through."""
    if type(payload) is not Payload:
        return pickle.loads(payload)  # type: ignore[no-any-return]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = load(payload)
    if not payload.parts:
        return arguments
    args, kwargs = list(arguments[0]), arguments[1]
    for place, part in zip(payload.contents.places, payload.parts, strict=True):
        holder: Any = args if type(place) is int else kwargs
        holder[place] = load(part)
    return tuple(args), kwargs


def load(payload: bytes) -> Any:
    """Unpickle an object; errors of unpickling pass through."""
    return payload.load() if type(payload) is Payload else pickle.loads(payload)


def dump_result(
    value: object, wording: tuple[str, str, str] = RESULT
) -> bytes | PickledValue:
    """Pickle a task's result.

    Args:
        value: the result.
        wording: texts for errors: the value, its name in paths, the advice.

    Raises:
        SerializationError: the value cannot be pickled; the text has the path.
    """
    if value is None:
        return NONE_PAYLOAD
    if type(value) in SCALARS:
        payload = pickle.dumps(value, PROTOCOL)
        return payload if len(payload) < SHARED_FROM else PickledValue(payload)
    if type(value) is SplitResults:
        return PickledValue(parts=tuple(map(dump_result, value)))
    if are_numbers((value,)):
        return dump_numbers(value)
    try:
        pickled = _dump(value)
    except (Exception, SystemExit) as error:
        if type(value) is ChunkOutcome:
            kept = value.before_unpicklable(dump_result)
            if kept is not value:
                return dump_result(kept)
        what, name, advice = wording
        raise _unpicklable(what, {name: value}, error, advice) from error
    return pickled.stream if pickled.is_plain else pickled


def dump_whole(value: object) -> bytes:
    """Pickle an object with its buffers; errors of pickling pass through."""
    # Imported late: it imports cloudpickle, which plain values do not need.
    from aiogpu.serialization import pickler

    return pickler.dump_whole(value)


class SplitResults(tuple[object, ...]):
    """The results of a task with `num_returns`, each a separate value."""

    __slots__ = ()


def split_results(value: object, payload: bytes) -> object:
    """Return a call's result, split if the caller requested several results.

    Args:
        value: the return value of the call.
        payload: the arguments of the call.

    Raises:
        TypeError: the value is no iterable.
        ValueError: the value has another number of items.
    """
    count = payload.contents.returns if type(payload) is Payload else 0
    if not count:
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(
            f"the task returned a {type(value).__name__}, but num_returns={count} "
            f"asks for {count} objects."
        )
    results = SplitResults(value)
    if len(results) != count:
        raise ValueError(
            f"the task returned {len(results)} objects, but num_returns={count}."
        )
    return results


def load_result(payload: bytes) -> Any:
    """Undo `dump_result`.

    Raises:
        DeserializationError: its cause is the exception of unpickling, or its text if
            the exception must not be raised here.
    """
    try:
        # Inlined: a call would take as long as unpickling a small value.
        return pickle.loads(payload) if type(payload) is bytes else load(payload)
    except Exception as error:
        raise DeserializationError(_unreadable(error)) from error
    except BaseException as error:  # noqa: BLE001
        # SystemExit and similar would end the driver's loop, even as a cause.
        raise DeserializationError(_unreadable(error)) from None


def dump_function(name: str, function: object) -> bytes:
    """Pickle a function by value, with cloudpickle.

    Raises:
        SerializationError: the function cannot be pickled; the text has the path.
    """
    advice = _ADVICE
    if "<locals>" not in getattr(function, "__qualname__", "<locals>"):
        advice = (
            f"Create it inside the task, or put {name} into a module, which workers "
            f"import."
        )
    return _dump_named(f"the function {name}", name, function, advice)


def dump_reference(module: str, qualname: str) -> bytes:
    """Return the payload of a function that the receiver imports by its name."""
    return pickle.dumps((module, qualname), PROTOCOL)


def load_function(payload: bytes) -> Any:
    """Undo `dump_function` or `dump_reference`.

    The name may refer to a remote function; then this returns the wrapped function.
    Errors of the import or of unpickling pass through.
    """
    function = pickle.loads(payload)
    if type(function) is not tuple:
        return function
    function = load_reference(*function)
    return getattr(function, "__aiogpu_function__", function)


def load_reference(module: str, qualname: str) -> Any:
    """Return a module's attribute by its name; errors of the import pass through."""
    target: Any = import_module(module)
    for name in qualname.split("."):
        target = getattr(target, name)
    return target


def _dump(value: object) -> PickledValue:
    # Imported late: it imports cloudpickle, which plain values do not need.
    from aiogpu.serialization.pickler import dump

    with collect_references() as references:
        stream, buffers = dump(value)
    return PickledValue(stream, buffers, references=tuple(references))


def _dump_named(what: str, name: str, value: object, advice: str = _ADVICE) -> bytes:
    try:
        return dump_whole(value)
    except (Exception, SystemExit) as error:
        raise _unpicklable(what, {name: value}, error, advice) from error


def _unpicklable(
    what: str,
    roots: Mapping[str, object],
    error: BaseException,
    advice: str = _ADVICE,
) -> SerializationError:
    problem = describe(error).rstrip(".")
    if isinstance(error, MisuseError):
        # aiogpu's own error about a handle, which contains the advice.
        path = unpicklable_path(roots)
        return SerializationError(f"{what} cannot be pickled: {path}: {problem}.")
    with collect_references():  # so that handles do not count as the cause
        path = unpicklable_path(roots)
    return SerializationError(f"{what} cannot be pickled: {path}: {problem}. {advice}")


def _unreadable(error: BaseException) -> str:
    if isinstance(error, AiogpuError):
        return f"the result is not available in this process: {safe_text(error)}"
    problem = describe(error).rstrip(".")
    return (
        f"the result cannot be unpickled in this process: {problem}. Is its class "
        f"importable here, and of the same version as in the worker?"
    )


Retried = bool | tuple[type[BaseException], ...]
"""The option `retry_exceptions`: exception classes, True for all, False for none."""

RETRY_NONE: Final = b""

RETRY_ALL: Final = b"*"
"""No pickle begins with this byte."""


def dump_retried(retried: Retried) -> bytes:
    """Return the option `retry_exceptions` as bytes.

    Raises:
        SerializationError: a class cannot be pickled; the text has the path.
    """
    if isinstance(retried, bool):
        return RETRY_ALL if retried else RETRY_NONE
    return _dump_named("the option retry_exceptions", "retry_exceptions", retried)


def load_retried(data: bytes) -> Retried:
    """Undo `dump_retried`; errors of unpickling pass through."""
    if data in (RETRY_NONE, RETRY_ALL):
        return data == RETRY_ALL
    classes: Any = load(data)
    return tuple(classes)


def is_retried(retried: Retried, error: BaseException) -> bool:
    """Return True if a task that raised this error is retried.

    Errors of a user's metaclass pass through.
    """
    return retried if isinstance(retried, bool) else isinstance(error, retried)
