"""Errors for which a test waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


async def raises(
    kind: type[E] | tuple[type[E], ...],
    *calls: Awaitable[object] | Callable[[], Awaitable[object]],
    match: str | None = None,
) -> E:
    """Await each call; all must raise `kind`. Return the last error.

    A function is called first: some engines raise before there is anything to await.
    """
    assert calls, "nothing to await"
    for call in calls:
        with pytest.raises(kind, match=match) as caught:
            await (call if isawaitable(call) else call())  # type: ignore[operator]
    try:
        return caught.value
    finally:
        # The traceback holds this frame. Its locals must not hold the handles.
        del caught, call, calls
