"""`.map(...)`, which all that has a `.remote(...)` has as well.

Light on purpose, as `api.remote_function` is: user modules bring this file into every
worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Literal, Never, TypeVar

from aiogpu.api.usage_errors import options_of
from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.api.map import Results, TakesOne

X_contra = TypeVar("X_contra", contravariant=True)
Y = TypeVar("Y")


class Mapper:
    """What can be called with each item of an iterable."""

    __slots__ = ()

    @options_of("map()")
    def map(
        self: TakesOne[X_contra, Y],
        iterable: Iterable[X_contra] | AsyncIterable[X_contra],
        *others: Never,
        limit: int | None = None,
        ordered: bool = True,
        chunk: int | Literal["auto"] | None = None,
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

        With `chunk`, several items go as one task, which calls the function with one
        after the other; results come one by one all the same. What an item raises
        comes after the results before it. The options hold for a task, and so for a
        chunk: it runs in one process, and `timeout` is for all of it.

        Args:
            iterable: the arguments, one a call; an iterable or an async iterable.
            *others: none; what takes two arguments is given them as one.
            limit: most items ahead, 1 or more; None for 256, or with `chunk` for 256
                chunks. Take less where arguments or results are large: that many
                are in memory.
            ordered: whether results come in the order of the items; if False, as
                the calls end.
            chunk: items in a task, 1 or more; "auto" for as many as take about 4 ms;
                None for 1.

        Raises:
            OptionError: `limit`, `ordered` or `chunk` is ill-valued, or `limit` has no
                room for a chunk.
            MisuseError: it is no iterable.
            NoLoopError: no event loop is running here.
        """
        if others:
            raise _not_zipped(self.__name__)
        from aiogpu.api.map import Results

        return Results(self, iterable, limit, ordered, chunk)


def _not_zipped(name: str) -> MisuseError:
    return MisuseError(
        f"{name}.map() takes one iterable: give it `zip(a, b)`, and let the function "
        f"take the pair."
    )


def no_map(name: str) -> MisuseError:
    """The error for mapping a generator."""
    return MisuseError(
        f"{name} is a generator, and map() takes one result a call; write `async for "
        f"item in {name}.remote(...)` for each argument."
    )
