"""What Python's own words would not tell of: the wrong loop, the wrong `with`.

Each class here is mixed into those that newcomers use in that way. It costs their
objects nothing, and is hidden from type checkers, which have words of their own. Light
on purpose, as `api.task` is: user modules bring this file into every worker.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from inspect import CO_GENERATOR
from typing import TYPE_CHECKING, Any, NoReturn

from aiogpu.errors import MisuseError


class EnteredOnLoop:
    """What is used by `async with`, and not by `with`."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def _as_called(self) -> str:
            """The call that has given it, in the program's words."""
            raise NotImplementedError

        def __enter__(self) -> NoReturn:
            call = self._as_called()
            raise MisuseError(
                f"{call} begins and ends on the event loop: write `async with {call}`, "
                f"inside an `async def`."
            )

        def __exit__(self, *_: object) -> None:
            """Python looks for both of them before it calls either."""


class IteratedOnLoop(EnteredOnLoop):
    """What is iterated by `async for`, and not by `for`."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            call = self._as_called()
            raise MisuseError(
                f"{call} gives one item after the other, on the event loop: write "
                f"`async for item in {call}`, or for a list `[item async for item in "
                f"{call}]`."
            )

        def __getitem__(self, _: object) -> NoReturn:
            iter(self)


class NotItsResult:
    """What has to be awaited, or given to `get`, before it is of use."""

    __slots__ = ()

    def __bool__(self) -> NoReturn:
        raise self._no("has no truth value")

    def _no(self, what: str, more: str = "") -> MisuseError:
        return MisuseError(
            f"a handle is not its result and {what}; write {self._how_to_wait()}.{more}"
        )

    def _how_to_wait(self) -> str:
        """For the result."""
        raise NotImplementedError

    if not TYPE_CHECKING:

        def __len__(self) -> NoReturn:
            raise self._no("has no length")

        def __getitem__(self, _: object) -> NoReturn:
            raise self._no("has no items")

        def __contains__(self, _: object) -> NoReturn:
            raise self._no("holds nothing")

        def __iter__(self) -> Generator[Any, None, Any]:
            if sys._getframe(1).f_code.co_flags & CO_GENERATOR:
                return self.__await__()  # `yield from handle`, as of any future
            raise self._no(
                "cannot be iterated",
                " With num_returns= each of several results has a handle of its own.",
            )


class CalledFirst:
    """What gives something to await by `.remote(...)`; calling it says so."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            self()


class CalledFirstToIterate(CalledFirst):
    """The same of a generator."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __iter__ = __aiter__ = CalledFirst.__await__
