"""What the frames of an error hold: let go of, once the error has been told.

A traceback keeps the frames that an error has passed, with all that their variables
refer to. Where one of these refers to the error, as a handle does that has failed,
nothing of it would be freed before the collector runs, which in a process without work
is never: a task that fails would keep actors and values from ending.
"""

from __future__ import annotations

from contextlib import suppress
from types import CodeType
from typing import Final

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
