"""Exceptions on their way from a worker to the program.

An exception travels as a pickle where it can, and as text always. On arrival it is the
user's own exception with the worker's traceback as its cause. It is a `TaskError` where
its kind must not travel: `StopIteration` and all that is not an `Exception` would upset
the program's loop.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from aiogpu.errors import (
    ActorDiedError,
    DeserializationError,
    ObjectMemoryError,
    RemoteTraceback,
    SerializationError,
    TaskError,
)
from aiogpu.wire.messages import Failed


def dump_exception(error: BaseException) -> tuple[bytes | None, str]:
    """Pickle an exception.

    Returns:
        The payload and "". None if it cannot be pickled, and why not, with the path to
        the part of it that cannot: its text at least travels.
    """
    # cloudpickle comes with it, which plain values do not need.
    from aiogpu.serialization import pickler

    try:
        return pickler.dump_exception(error), ""
    except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
        try:
            path = _unpicklable_path({"error": error})
        except BaseException:  # noqa: BLE001 - the same
            path = "error"
        return None, f"{path}: {describe(second)}"


def text_of(error: BaseException) -> str:
    """An exception's text, also when asking for it raises."""
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
        return f"<its text cannot be had: {type(second).__name__}>"


def describe(error: BaseException) -> str:
    """The type and the text of an exception, on one line where the text is."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _unpicklable_path(roots: Mapping[str, object]) -> str:
    from aiogpu.serialization.diagnostics import find_unpicklable
    from aiogpu.serialization.pickler import measure

    return find_unpicklable(roots, measure)


class Outcome(NamedTuple):
    """See above.

    Attributes:
        values: the results so far.
        seconds: that they took.
        failure: the fields of a `Failed`, if the item after them has failed.
    """

    values: list[Any]
    seconds: float
    failure: tuple[Any, ...] | None

    def before_culprit(self, dump: Callable[[object], object]) -> Outcome:
        """The same up to the first value that cannot be pickled; that one has failed.

        Args:
            dump: raises for such a value.
        """
        # Only a failure pays for the import.

        for number, value in enumerate(self.values):
            try:
                dump(value)
            except Exception as error:  # noqa: BLE001 - it travels
                failed = pack_failure(0, UNSENDABLE, error, "")
                return Outcome(self.values[:number], self.seconds, tuple(failed))
        return self


RAISED: Final = "raised"
"""The task's code raised."""

STOPPED: Final = "stopped"
"""The task's code ended because it was asked to stop."""

LEFT: Final = "left"
"""The method has ended its actor, by `exit_actor()`."""

UNREADABLE: Final = "unreadable"
"""The function or its arguments could not be unpickled in the worker."""

UNSENDABLE: Final = "unsendable"
"""The result could not be pickled."""

DIED: Final = "died"
"""The constructor of an actor has failed: the kind of that and the actor's name follow,
each after a colon. Its exception is the cause of what is told."""

TOLD: Final = "told"
"""The node says so itself: an error of aiogpu's own, with its cause."""

_NO_ROOM: Final = f"{ObjectMemoryError.__module__}.{ObjectMemoryError.__qualname__}"

_OURS: Final = "aiogpu."
"""Begins the names of errors whose text says all that is to be said."""

_HARMLESS: Final = frozenset({BaseException, BaseExceptionGroup})
_CAUSE: Final = vars(BaseException)["__cause__"]


def pack_failure(task: int, kind: str, error: BaseException, skip: str) -> Failed:
    """Describe an exception.

    Args:
        task: the task that failed.
        kind: one of the kinds above.
        error: the exception.
        skip: frames whose file name contains this are left out.
    """
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    travels = kind == RAISED and _may_travel(type(error))
    message, payload = text_of(error), None
    if travels:
        payload, why_not = dump_exception(error)
        if why_not:
            message += f" (it cannot be pickled: {why_not})"
    text = _traceback_text(error, skip)
    return Failed(task, kind, name.removeprefix("builtins."), message, text, payload)


def pack_told(error: Exception) -> Failed:
    """Describe an error that no code of the user's has raised, with its cause."""
    failed = pack_failure(0, RAISED, error, "")
    if failed.payload is None or error.__cause__ is None:
        return failed
    cause = pack_failure(0, RAISED, error.__cause__, "")
    if cause.payload is None:
        return failed
    return failed._replace(
        kind=f"{TOLD}:{len(failed.payload)}", payload=failed.payload + cause.payload
    )


def unpack_failure(failed: Failed, task_name: str) -> Exception:
    """The exception that the task's owner is to see.

    Args:
        failed: what the worker sent.
        task_name: the task's name, for messages.
    """
    kind, _, whose = failed.kind.partition(":")
    if kind == DIED:
        return _death(failed, *whose.partition(":")[::2])
    if kind == TOLD and failed.payload is not None:
        return _told(failed.payload, int(whose))
    advice = ""
    if failed.payload is not None:
        try:
            error = pickle.loads(failed.payload)
        except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
            error = None
            advice = _advice(second)
        if _may_travel(type(error)):
            return _with_trace(error, failed)
    revived: Exception
    what = (
        f"{failed.type_name}: {failed.message}" if failed.message else failed.type_name
    )
    if failed.kind == UNREADABLE:
        revived = DeserializationError(
            f"{task_name} could not start: the worker cannot load its function or "
            f"arguments: {what}"
        )
    elif failed.kind == UNSENDABLE:
        has_room = failed.type_name != _NO_ROOM
        unsendable = SerializationError if has_room else ObjectMemoryError
        is_ours = failed.type_name.startswith(_OURS)
        told = failed.message if is_ours else f"its result cannot be pickled: {what}."
        revived = unsendable(f"{task_name} ran, but {told}")
    else:
        revived = TaskError(
            f"{task_name} failed with an exception that cannot be raised here: {what}"
            f"{advice}",
            failed.type_name,
            failed.traceback,
        )
    return _with_trace(revived, failed)


def _advice(error: BaseException) -> str:
    """Why an exception could not be unpickled."""
    told = text_of(error).rstrip(".")
    what = type(error).__name__
    return f" (unpickling it raises {what}{': ' if told else ''}{told})"


def _death(failed: Failed, kind: str, name: str) -> Exception:
    what = f"its constructor raised {failed.type_name}: {failed.message}"
    died = ActorDiedError(f"{name} is dead: {what}", name)
    died.__cause__ = unpack_failure(failed._replace(kind=kind), name)
    return died


def _told(payload: bytes, size: int) -> Exception:
    error: Exception = pickle.loads(payload[:size])
    error.__cause__ = pickle.loads(payload[size:])
    return error


def _may_travel(kind: type) -> bool:
    """Whether it is an `Exception`, and nothing else that a loop reacts to.

    A class may derive from `Exception` and, say, from `CancelledError` as well.
    """
    if not issubclass(kind, Exception) or issubclass(
        kind, StopIteration | StopAsyncIteration
    ):
        return False
    others = {base for base in kind.__mro__ if not issubclass(base, Exception)}
    return {base for base in others if issubclass(base, BaseException)} <= _HARMLESS


def _with_trace(error: Exception, failed: Failed) -> Exception:
    # As `raise ... from` does it: a class's own `__setattr__` may refuse.
    _CAUSE.__set__(error, RemoteTraceback(failed.traceback))
    return error


def _traceback_text(error: BaseException, skip: str) -> str:
    """The formatted traceback from the first frame that is the user's own."""
    from traceback import TracebackException

    try:
        trace = error.__traceback__
        while trace is not None and skip in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        described = TracebackException(type(error), error, trace)
        return "".join(described.format())
    except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
        return f"<its traceback cannot be had: {type(second).__name__}>"
