"""What a call needs around it: arguments, payloads, what its error holds.

- `arguments_in` and `packed` open and make payloads.
- `RetryRules` says whether a failure is one after which the task is to be tried again.
  That is decided here, where the user's classes are, and only once something has
  failed.
- `let_go` clears the frames of an error that was told. A traceback keeps the frames
  that an error has passed, with all that their variables refer to. Where one of these
  refers to the error, as a failed handle does, nothing of it would be freed before the
  collector runs, which in a process without work is never: a task that fails would keep
  actors and values from ending.
- `explain_quit` says why a debugger found no terminal.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from contextlib import suppress
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import current, services
from aiogpu.errors import NodeClosedError
from aiogpu.serialization.exceptions import safe_text
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.serializer import (
    Retried,
    is_retried,
    load_arguments,
    load_retried,
)
from aiogpu.wire.messages import Define

if TYPE_CHECKING:
    from aiogpu.serialization.references import PickledValue


def arguments_in(payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a call is given; what of it is kept keeps alive what it needs itself."""
    current.loader = get_ident()
    try:
        return load_arguments(payload)
    finally:
        current.loader = 0
        if type(payload) is Payload:
            payload.release()


def packed(outgoing: PickledValue) -> bytes:
    """The payload of what this worker sends; see `Loans.pack`."""
    if services.client is None:
        raise NodeClosedError("this process is a fork of a worker, and sends nothing.")
    # Late: code that only asks where it runs needs none of it.
    from aiogpu.worker.nested import task_client

    return task_client().loans.pack(outgoing)


class RetryRules:
    """What the functions of one worker say of it."""

    def __init__(self) -> None:
        self._wanted: dict[bytes, Retried] = {}

    def forget(self) -> None:
        """Drop all that was learnt."""
        self._wanted.clear()

    def wants(
        self, func: Define, error: BaseException, *told: type[BaseException]
    ) -> bool:
        """Return whether a failure is one of those that the function names.

        Args:
            func: what has failed.
            error: what it has raised.
            told: classes as one of which the task's owner is told of it.
        """
        retried = func.retried
        try:
            wanted = self._wanted.get(retried)
            if wanted is None:
                wanted = self._wanted[retried] = load_retried(retried)
            if isinstance(wanted, bool) or is_retried(wanted, error):
                return bool(wanted)
            return any(issubclass(kind, wanted) for kind in told)
        except BaseException as odd:  # noqa: BLE001 - foreign code may raise anything
            self._wanted[retried] = False
            sys.stderr.write(
                f"aiogpu: {func.name} is not tried again, whatever it raises: its "
                f"retry_exceptions cannot be asked: {type(odd).__name__}: "
                f"{safe_text(odd)}\n"
            )
            return False


_MAY_GO_ON: Final = 0x20 | 0x80 | 0x200
"""Among a code's flags: a generator, a coroutine, an async generator."""


def let_go(error: BaseException) -> None:
    """Clear the frames that an error, and what has led to it, have passed.

    Those of generators and coroutines stay: one may have caught the error and go on,
    and clearing its frame would end it.
    """
    known: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        trace = one.__traceback__
        while trace is not None:
            if not _may_go_on(trace.tb_frame.f_code):
                with suppress(RuntimeError):  # it runs
                    trace.tb_frame.clear()
            trace = trace.tb_next
        left += one.__cause__, one.__context__


def _may_go_on(code: CodeType) -> bool:
    return bool(code.co_flags & _MAY_GO_ON)


_NO_TERMINAL: Final = (
    "a debugger was started in a worker, which has no terminal to read from. To stop "
    "at a breakpoint, run the program by aiogpu.init(address='inline') or with "
    "AIOGPU_ADDRESS=inline: tasks and actors run in its own process then."
)


def explain_quit(error: BaseException) -> None:
    """Have the exception by which `pdb` leaves say why; nothing for any other one."""
    kind = type(error)
    # As `bdb.BdbQuit` without importing it.
    if kind.__name__ == "BdbQuit" and kind.__module__ == "bdb" and not error.args:
        error.args = (_NO_TERMINAL,)
