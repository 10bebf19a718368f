"""`.map(...)`, which all that has a `.remote(...)` has as well.

Light on purpose, as `api.task` is: user modules bring this file into every worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar

from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.api.map import Results

X_contra = TypeVar("X_contra", contravariant=True)
Y = TypeVar("Y")


class TakesOne(Protocol[X_contra, Y]):
    """A remote function or method that can be called with one argument."""

    @property
    def __name__(self) -> str:
        """How errors call it."""
        ...

    def remote(self, argument: X_contra, /) -> Handle[Y]:
        """Start the call."""
        ...


class Mapper:
    """What can be called with each item of an iterable."""

    __slots__ = ()

    def map(
        self: TakesOne[X_contra, Y],
        iterable: Iterable[X_contra] | AsyncIterable[X_contra],
        *,
        limit: int | None = None,
        ordered: bool = True,
    ) -> Results[Y]:
        """Call it with each item; gives an async iterator over the results.

        At most `limit` calls are ahead: started, and their result not yet taken by
        the loop. So the iterable, which may be endless, is never read further than
        `limit` items beyond the results taken, and with `ordered` one slow call
        holds back those behind it. A plain iterable is read on the event loop.

        What a call raises is raised in its place, and what the iterable or
        `.remote()` raises at once; either ends the iteration, and so does leaving
        the loop. All calls that are ahead are then cancelled as by
        `handle.cancel()`. While a name refers to the results, write
        `async with f.map(...) as results:` to have that at the end of the block.

        Args:
            iterable: the arguments, one a call; an iterable or an async iterable.
            limit: most calls ahead, 1 or more; None for 256. Take less where
                arguments or results are large: that many are in memory.
            ordered: whether results come in the order of the items; if False, as
                the calls end.

        Raises:
            OptionError: `limit` or `ordered` is ill-valued.
            MisuseError: it is no iterable.
            NoLoopError: no event loop is running here.
        """
        from aiogpu.api.map import Results

        return Results(self.__name__, self.remote, iterable, limit, ordered)


def no_map(name: str) -> MisuseError:
    """The error for mapping a generator."""
    return MisuseError(
        f"{name} is a generator, and map() takes one result a call; write `async for "
        f"item in {name}.remote(...)` for each argument."
    )
