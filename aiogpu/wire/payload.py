"""Objects to bytes and back. The only door to cloudpickle.

Arguments that are plain scalars take the C pickler directly; all else goes by
cloudpickle, which carries lambdas, closures and what lives in `__main__` by value.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from aiogpu.errors import DeserializationError, SerializationError
from aiogpu.wire.outcome import Outcome

PROTOCOL: Final = 5
_PLAIN: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
_NO_NAMES: Final[dict[str, object]] = {}
NOTHING: Final = pickle.dumps(None, PROTOCOL)
"""The payload of `None`, the commonest result."""


def dump_arguments(
    function: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bytes:
    """Pickle a call's arguments.

    Args:
        function: the function's name, for the message.
        args: positional arguments.
        kwargs: arguments by name.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    if not kwargs and _PLAIN.issuperset(map(type, args)):
        return pickle.dumps((args, _NO_NAMES), PROTOCOL)
    try:
        return _cloud_dumps((args, dict(kwargs)))
    except Exception as error:
        roots: dict[str, object] = {f"args[{i}]": arg for i, arg in enumerate(args)}
        roots |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
        raise _unpicklable(
            f"the arguments of {function}.remote()", roots, error
        ) from error


def load_arguments(payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo `dump_arguments`; raises whatever unpickling raises."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = pickle.loads(payload)
    return arguments


def dump_result(value: object) -> bytes:
    """Pickle a task's result.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    if value is None:
        return NOTHING
    if type(value) in _PLAIN:
        return pickle.dumps(value, PROTOCOL)
    try:
        return _cloud_dumps(value)
    except Exception as error:
        if type(value) is Outcome:
            kept = value.before_culprit(dump_result)
            if kept is not value:
                return dump_result(kept)
        raise _unpicklable("the result", {"result": value}, error) from error


def load_result(payload: bytes) -> Any:
    """Undo `dump_result`.

    Raises:
        DeserializationError: whatever unpickling raised is its cause, or is named
            in its text where it must not travel.
    """
    try:
        return pickle.loads(payload)
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
    except Exception as error:
        raise _unpicklable(f"the function {name}", {name: function}, error) from error


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


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception; None if it cannot be: its text travels at least."""
    try:
        return _cloud_dumps(error)
    except BaseException:  # noqa: BLE001 - foreign code may raise anything
        return None


def text_of(error: BaseException) -> str:
    """An exception's text, also when asking for it raises."""
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
        return f"<its text cannot be had: {type(second).__name__}>"


def is_sent_by_value(module: str) -> bool:
    """Whether the user asked cloudpickle to send what that module defines."""
    from cloudpickle import list_registry_pickle_by_value

    names = list_registry_pickle_by_value()
    return any(module == name or module.startswith(name + ".") for name in names)


def _cloud_dumps(value: object) -> bytes:
    from cloudpickle import dumps

    payload: bytes = dumps(value, PROTOCOL)
    return payload


def _unpicklable(
    what: str, roots: Mapping[str, object], error: Exception
) -> SerializationError:
    # Only a failure pays for the import.
    from aiogpu.wire.culprit import find_culprit

    path = find_culprit(roots, _cloud_dumps)
    return SerializationError(
        f"{what} cannot be pickled: {path}: {_described(error)}. Create it inside the "
        f"task, or pass what it is made from."
    )


def _unreadable(error: BaseException) -> str:
    return (
        f"the result cannot be unpickled in this process: {_described(error)}. Is its "
        f"class importable here, and of the same version as in the worker?"
    )


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"
