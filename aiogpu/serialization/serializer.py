"""Arguments, results and functions to bytes and back.

Scalars and arrays of numbers take the C pickler directly, at a third of the cost:
cloudpickle looks at each object in Python, in case it is a function or a class of the
program. Everything else goes by `pickler`, which carries lambdas, closures and what
lives in `__main__` by value. After which exceptions a task is tried again is decided in
the worker, which has the user's modules.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
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
    Outcome,
    _unpicklable_path,
    describe,
    text_of,
)
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import (
    APART,
    PickledValue,
    collecting,
    keeping,
    take_out,
)

PROTOCOL: Final = 5
SCALARS: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})

_KINDS: Final = frozenset("biufc")
"""Of numpy's types of items those that are numbers."""


def are_numbers(values: Iterable[object]) -> bool:
    """Whether each is a scalar or an array of numbers, and of no class of its own."""
    for value in values:
        kind = type(value)
        # By its name first: numpy may be a module that is loaded by a look at it.
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
        # What it, or a part of each item, is annotated with may be of any kind.
        and dtype.metadata is None
        and dtype.names is None
        # Nor has the program its own way to pickle arrays.
        and kind not in dispatch_table
    )


def dump_numbers(value: object) -> bytes | PickledValue:
    """Pickle something that holds nothing else; see `are_numbers`."""
    apart: list[memoryview] = []
    stream = pickle.dumps(value, PROTOCOL, buffer_callback=keeping(apart))
    return PickledValue(stream, apart) if apart or len(stream) >= APART else stream


_NO_NAMES: Final[dict[str, object]] = {}

NOTHING: Final = pickle.dumps(None, PROTOCOL)
"""The payload of `None`, the commonest result."""

NO_ARGUMENTS: Final = pickle.dumps(((), {}), PROTOCOL)
"""The payload of a call without any."""

RESULT: Final = ("the result", "result", "Return what it is made from.")
PUT: Final = ("the value given to put()", "value", "Put what it is made from.")

HEAVY: Final = 1 << 20
"""Bytes above which a warning is due for what is sent more than once."""


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
        returns: how many results the call shall have, 0 for the usual one.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    if not kwargs and not returns and SCALARS.issuperset(map(type, args)):
        payload = pickle.dumps((args, _NO_NAMES), PROTOCOL)
        return payload if len(payload) < APART else PickledValue(payload)
    named = dict(kwargs)
    if not returns and are_numbers((*args, *named.values())):
        return dump_numbers((args, named))
    handles, places = take_out(args, kwargs)
    if handles:
        args, named = _without(args, named, places)
    try:
        outgoing = _dump((args, named))
    except (Exception, SystemExit) as error:
        roots: dict[str, object] = {f"args[{i}]": arg for i, arg in enumerate(args)}
        roots |= {f"kwargs[{name!r}]": value for name, value in named.items()}
        raise _unpicklable(
            f"the arguments of {function}.remote()", roots, error
        ) from error
    if handles or returns:
        return outgoing._replace(handles=handles, places=places, returns=returns)
    return outgoing.stream if outgoing.is_plain else outgoing


def _without(
    args: tuple[object, ...], named: dict[str, object], places: tuple[int | str, ...]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments, with nothing where handles are."""
    positional = list(args)
    for place in places:
        if type(place) is int:
            positional[place] = None
        else:
            named[place] = None  # type: ignore[index]
    return tuple(positional), named


def load_arguments(payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo `dump_arguments`; raises whatever unpickling raises."""
    if type(payload) is not Payload:
        return pickle.loads(payload)  # type: ignore[no-any-return]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = load(payload)
    if not payload.parts:
        return arguments
    args, kwargs = list(arguments[0]), arguments[1]
    for place, part in zip(payload.contents.places, payload.parts, strict=True):
        if type(place) is int:
            args[place] = load(part)
        else:
            kwargs[place] = load(part)  # type: ignore[index]
    return tuple(args), kwargs


def load(payload: bytes) -> Any:
    """The object that was pickled; raises whatever unpickling raises."""
    if type(payload) is not Payload:
        return pickle.loads(payload)
    stream, buffers = payload.open()
    return pickle.loads(stream, buffers=buffers)


def dump_result(
    value: object, wording: tuple[str, str, str] = RESULT
) -> bytes | PickledValue:
    """Pickle a task's result.

    Args:
        value: the result.
        wording: how errors call it: what it is, its name in paths, what to do.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    if value is None:
        return NOTHING
    if type(value) in SCALARS:
        payload = pickle.dumps(value, PROTOCOL)
        return payload if len(payload) < APART else PickledValue(payload)
    if type(value) is Results:
        return PickledValue(parts=tuple(map(dump_result, value)))
    if are_numbers((value,)):
        return dump_numbers(value)
    try:
        outgoing = _dump(value)
    except (Exception, SystemExit) as error:
        if type(value) is Outcome:
            kept = value.before_culprit(dump_result)
            if kept is not value:
                return dump_result(kept)
        what, name, advice = wording
        raise _unpicklable(what, {name: value}, error, advice) from error
    return outgoing.stream if outgoing.is_plain else outgoing


def dump_whole(value: object) -> bytes:
    """Pickle something of aiogpu's own, all in one; raises whatever pickling raises."""
    return _cloud_dumps(value)


class Results(tuple[object, ...]):
    """The several results of one task, each of which is a value of its own."""

    __slots__ = ()


def several(value: object, payload: bytes) -> object:
    """What a call has returned, taken apart if it was asked for several results.

    Args:
        value: what it has returned.
        payload: its arguments.

    Raises:
        TypeError: it is no iterable.
        ValueError: it has more, or fewer.
    """
    count = payload.contents.returns if type(payload) is Payload else 0
    if not count:
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(
            f"the task returned a {type(value).__name__}, but num_returns={count} "
            f"asks for {count} objects."
        )
    results = Results(value)
    if len(results) != count:
        raise ValueError(
            f"the task returned {len(results)} objects, but num_returns={count}."
        )
    return results


def load_result(payload: bytes) -> Any:
    """Undo `dump_result`.

    Raises:
        DeserializationError: whatever unpickling raised is its cause, or is named
            in its text where it must not travel.
    """
    try:
        # By far the commonest; a call costs as much as unpickling what is small.
        return pickle.loads(payload) if type(payload) is bytes else load(payload)
    except Exception as error:
        raise DeserializationError(_unreadable(error)) from error
    except BaseException as error:  # noqa: BLE001
        # SystemExit and its like would end the driver's loop, also as a cause.
        raise DeserializationError(_unreadable(error)) from None


def dump_function(name: str, function: object) -> bytes:
    """Pickle a function by cloudpickle.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    try:
        return _cloud_dumps(function)
    except (Exception, SystemExit) as error:
        told, roots = f"the function {name}", {name: function}
        if "<locals>" in getattr(function, "__qualname__", "<locals>"):
            raise _unpicklable(told, roots, error) from error
        advice = (
            f"Create it inside the task, or put {name} into a module, which workers "
            f"import."
        )
        raise _unpicklable(told, roots, error, advice) from error


def dump_option(option: str, value: object) -> bytes:
    """Pickle what an option says, by cloudpickle.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    try:
        return _cloud_dumps(value)
    except (Exception, SystemExit) as error:
        raise _unpicklable(f"the option {option}", {option: value}, error) from error


def dump_reference(module: str, qualname: str) -> bytes:
    """The payload of a function that the other side is to import by name."""
    return pickle.dumps((module, qualname), PROTOCOL)


def load_function(payload: bytes) -> Any:
    """Undo `dump_function` or `dump_reference`.

    What is imported may be a remote function; what it runs is meant.
    Raises whatever the import or unpickling raises.
    """
    found = pickle.loads(payload)
    if type(found) is not tuple:
        return found
    found = load_reference(*found)
    return getattr(found, "__aiogpu_function__", found)


def load_reference(module: str, qualname: str) -> Any:
    """What a module holds under a name; raises whatever the import raises."""
    found: Any = import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def is_sent_by_value(module: str) -> bool:
    """Whether the user asked cloudpickle to send what that module defines."""
    # cloudpickle comes with it, which functions of modules do not need.
    from aiogpu.serialization import pickler

    return pickler.is_sent_by_value(module)


def _dump(value: object) -> PickledValue:
    # cloudpickle comes with it, which plain values do not need.
    from aiogpu.serialization.pickler import dump

    with collecting() as references:
        stream, buffers = dump(value)
    return PickledValue(stream, buffers, references=tuple(references))


def _cloud_dumps(value: object) -> bytes:
    # cloudpickle comes with it, which plain values do not need.
    from aiogpu.serialization.pickler import dump_whole

    return dump_whole(value)


def _unpicklable(
    what: str,
    roots: Mapping[str, object],
    error: BaseException,
    advice: str = "Create it inside the task, or pass what it is made from.",
) -> SerializationError:
    # Only a failure pays for the imports.
    from contextlib import nullcontext

    # An error of ours is about a handle, and says itself what to do instead.
    is_of_handle = isinstance(error, MisuseError)
    with nullcontext() if is_of_handle else collecting():  # else none is to blame
        path = _unpicklable_path(roots)
    told = describe(error).rstrip(".")
    after = "" if is_of_handle else f" {advice}"
    return SerializationError(f"{what} cannot be pickled: {path}: {told}.{after}")


def _unreadable(error: BaseException) -> str:
    if isinstance(error, AiogpuError):
        return f"the result cannot be had in this process: {text_of(error)}"
    told = describe(error).rstrip(".")
    return (
        f"the result cannot be unpickled in this process: {told}. Is its class "
        f"importable here, and of the same version as in the worker?"
    )


Retried = bool | tuple[type[BaseException], ...]
"""Exception classes; True for all, False for none."""

NONE: Final = b""

ALL: Final = b"*"
"""No pickle begins so."""


def dump_retried(wanted: Retried) -> bytes:
    """The option `retry_exceptions` as bytes.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    if isinstance(wanted, bool):
        return ALL if wanted else NONE
    return dump_option("retry_exceptions", wanted)


def load_retried(retried: bytes) -> Retried:
    """Undo `dump_retried`; raises whatever unpickling raises."""
    if retried in (NONE, ALL):
        return retried == ALL
    wanted: Any = load(retried)
    return tuple(wanted)


def is_one_of(wanted: Retried, error: BaseException) -> bool:
    """Whether it is one of these; raises what a metaclass of the user's may raise."""
    return wanted if isinstance(wanted, bool) else isinstance(error, wanted)
