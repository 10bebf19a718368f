"""Transfer of exceptions from a worker to the program.

An exception is sent as text, and as a pickle if possible. The program gets the user's
own exception, with the worker's traceback as its cause. It gets a `TaskError` if the
class must not be raised in the program: `StopIteration` and classes outside `Exception`
would break the program's loop.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from aiogpu.errors import (
    ActorDiedError,
    AiogpuError,
    DeserializationError,
    ObjectMemoryError,
    SerializationError,
    TaskError,
)
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import PickledValue, collect_references
from aiogpu.wire.messages import Failed


class RemoteTraceback(Exception):  # noqa: N818 - a cause that carries text, not an error
    """Carries the worker's traceback as the `__cause__` of a task's exception."""

    def __str__(self) -> str:
        return f'\n"""\n{_with_source(self.args[0])}"""'


def _with_source(text: str) -> str:
    """Add the source lines that only this process knows, such as a notebook's."""
    # Imported late: most programs print no traceback.
    import linecache
    import re

    def add_line(match: re.Match[str]) -> str:
        line = linecache.getline(match[1], int(match[2])).strip()
        return f"{match[0]}    {line}\n" if line else match[0]

    frame = r'^  File "(.+)", line (\d+), in .*\n(?!    )'
    return re.sub(frame, add_line, text, flags=re.MULTILINE)


def dump_exception(error: BaseException) -> tuple[bytes | None, str]:
    """Pickle an exception.

    Returns:
        The payload and "". If it cannot be pickled, None and the reason, with the path
        to the part that cannot be pickled.
    """
    # Imported late: it imports cloudpickle, which plain values do not need.
    from aiogpu.serialization import pickler

    try:
        return pickler.dump_exception(error), ""
    except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
        try:
            path = unpicklable_path({"error": error})
        except BaseException:  # noqa: BLE001 - the same
            path = "error"
        return None, f"{path}: {describe(second)}"


def safe_text(error: BaseException) -> str:
    """Return an exception's text, even if its `__str__` raises."""
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
        return f"<its text is not available: {type(second).__name__}>"


def describe(error: BaseException) -> str:
    """Return an exception's type and text."""
    text = safe_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unpicklable_path(roots: Mapping[str, object]) -> str:
    """Return the path to the part that cannot be pickled; see `find_unpicklable`."""
    # Imported after a failure only.
    from aiogpu.serialization.diagnostics import find_unpicklable
    from aiogpu.serialization.pickler import measure

    return find_unpicklable(roots, measure)


class ChunkOutcome(NamedTuple):
    """The results of a function that one task called with several items.

    Attributes:
        values: the results so far.
        seconds: time that they took.
        failure: the fields of a `Failed`, if the next item has failed.
    """

    values: list[Any]
    seconds: float
    failure: tuple[Any, ...] | None

    def before_unpicklable(self, dump: Callable[[object], object]) -> ChunkOutcome:
        """Return the outcome up to the first unpicklable value, which counts as failed.

        Args:
            dump: raises for an unpicklable value.
        """
        for number, value in enumerate(self.values):
            try:
                dump(value)
            except Exception as error:  # noqa: BLE001 - it is reported
                failed = pack_failure(0, UNSENDABLE, error, "")
                return ChunkOutcome(self.values[:number], self.seconds, tuple(failed))
        return self


RAISED: Final = "raised"
"""The task's code raised."""

STOPPED: Final = "stopped"
"""The task's code ended because of a cancel."""

LEFT: Final = "left"
"""The method has ended its actor, by `exit_actor()`."""

UNREADABLE: Final = "unreadable"
"""The function or its arguments could not be unpickled in the worker."""

UNSENDABLE: Final = "unsendable"
"""The result could not be pickled."""

DIED: Final = "died"
"""The constructor of an actor has failed. The kind of the failure and the actor's name
follow, each after a colon. The constructor's exception becomes the cause."""

CAUSED: Final = "caused"
"""An error of the node itself, with its cause. The length of the first pickle follows,
after a colon."""

_NO_ROOM: Final = f"{ObjectMemoryError.__module__}.{ObjectMemoryError.__qualname__}"

_OURS: Final = "aiogpu."
"""Prefix of error classes whose text needs no explanation."""

_HARMLESS: Final = frozenset({BaseException, BaseExceptionGroup})
_CAUSE: Final = vars(BaseException)["__cause__"]


def pack_failure(
    task: int,
    kind: str,
    error: BaseException,
    skip: str,
    pack: Callable[[PickledValue], bytes] | None = None,
) -> Failed:
    """Make the message that describes an exception.

    Args:
        task: the task that failed.
        kind: one of the kinds above.
        error: the exception.
        skip: leading frames whose file name contains this text are omitted.
        pack: makes the payload of an exception that holds handles to actors, to keep
            the actors alive; None if not needed.
    """
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    message, payload = safe_text(error), None
    if kind == RAISED and _may_be_raised(type(error)):
        with collect_references(are_actors=True) as actors:
            payload, why_not = dump_exception(error)
        if actors and payload is not None and pack is not None:
            payload = pack(PickledValue(payload, references=tuple(actors)))
        if why_not:
            message += f" (it cannot be pickled: {why_not})"
    text = _traceback_text(error, skip)
    return Failed(task, kind, name.removeprefix("builtins."), message, text, payload)


@lru_cache(maxsize=8)
def _pack_message(kind: type[Exception], message: str) -> Failed:
    """Pack an error that is its message: a node may tell a million tasks the same."""
    return pack_failure(0, RAISED, kind(message), "")


def pack_own_error(error: Exception) -> Failed:
    """Make the message that describes an error of aiogpu, with its cause."""
    is_raised = error.__traceback__ or error.__cause__ or error.__context__
    if isinstance(error, AiogpuError) and not is_raised and not vars(error):
        return _pack_message(type(error), str(error))  # type: ignore[arg-type]
    failed = pack_failure(0, RAISED, error, "")
    if failed.payload is None or error.__cause__ is None:
        return failed
    cause = pack_failure(0, RAISED, error.__cause__, "")
    if cause.payload is None:
        return failed
    return failed._replace(
        kind=f"{CAUSED}:{len(failed.payload)}", payload=failed.payload + cause.payload
    )


def unpack_failure(failed: Failed, task_name: str) -> Exception:
    """Make the exception for the owner of a task.

    Args:
        failed: the message from the worker.
        task_name: the task's name, for messages.
    """
    kind, _, rest = failed.kind.partition(":")
    if kind == DIED:
        return _constructor_failure(failed, rest)
    if kind == CAUSED and failed.payload is not None:
        size = int(rest)
        raised: Exception = pickle.loads(failed.payload[:size])
        raised.__cause__ = pickle.loads(failed.payload[size:])
        return raised
    why_not = ""
    if failed.payload is not None:
        try:
            error = _load(failed.payload)
        except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
            error = None
            why_not = f" (unpickling it raises {describe(second).rstrip('.')})"
        if _may_be_raised(type(error)):
            return _with_trace(error, failed)
    what = (
        f"{failed.type_name}: {failed.message}" if failed.message else failed.type_name
    )
    if kind == UNREADABLE:
        raised = DeserializationError(
            f"{task_name} could not start: the worker cannot load its function or "
            f"arguments: {what}"
        )
    elif kind == UNSENDABLE:
        has_no_room = failed.type_name == _NO_ROOM
        is_ours = failed.type_name.startswith(_OURS)
        problem = (
            failed.message if is_ours else f"its result cannot be pickled: {what}."
        )
        raised = (ObjectMemoryError if has_no_room else SerializationError)(
            f"{task_name} ran, but {problem}"
        )
    else:
        raised = TaskError(
            f"{task_name} failed with an exception that cannot be raised here: {what}"
            f"{why_not}",
            failed.type_name,
            failed.traceback,
        )
    return _with_trace(raised, failed)


def error_of(outcome: Failed | Exception, task_name: str) -> Exception:
    """Return the exception of an outcome that is no result."""
    if isinstance(outcome, Exception):
        return outcome
    return unpack_failure(outcome, task_name)


def _load(payload: bytes) -> Any:
    return payload.load() if type(payload) is Payload else pickle.loads(payload)


def why_not_made(failed: Failed) -> str:
    """Return why an actor could not be made."""
    what = f"{failed.type_name}: {failed.message}"
    if failed.kind == UNREADABLE:
        return f"its worker cannot load its class or arguments: {what}"
    return f"its constructor raised {what}"


def _constructor_failure(failed: Failed, kind_and_name: str) -> Exception:
    kind, _, name = kind_and_name.partition(":")
    failed = failed._replace(kind=kind)
    died = ActorDiedError(f"{name} is dead: {why_not_made(failed)}", name)
    died.__cause__ = unpack_failure(failed, name)
    return died


def _may_be_raised(kind: type) -> bool:
    """Return True for an `Exception` class that has no special meaning for a loop.

    A class may derive from both `Exception` and, for example, `CancelledError`.
    """
    if issubclass(kind, StopIteration | StopAsyncIteration):
        return False
    others = {base for base in kind.__mro__ if not issubclass(base, Exception)}
    other_errors = {base for base in others if issubclass(base, BaseException)}
    return issubclass(kind, Exception) and other_errors <= _HARMLESS


def _with_trace(error: Exception, failed: Failed) -> Exception:
    # Like `raise ... from`: the class may have a `__setattr__` that refuses.
    _CAUSE.__set__(error, RemoteTraceback(failed.traceback))
    return error


def _traceback_text(error: BaseException, skip: str) -> str:
    """Format the traceback from the first frame of user code."""
    from traceback import TracebackException

    try:
        trace = error.__traceback__
        while trace is not None and skip in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        described = TracebackException(type(error), error, trace)
        return "".join(described.format())
    except BaseException as second:  # noqa: BLE001 - foreign code may raise anything
        return f"<its traceback is not available: {type(second).__name__}>"
