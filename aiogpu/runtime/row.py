"""Calls of one function that a program makes in a row, where others wait already.

None of them can start, so nothing is to be decided about any: they are told to the
core together, before anything else is, which halves what a submission costs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiogpu.runtime.call import Call, Receiver, Site

if TYPE_CHECKING:
    from aiogpu.core.queue.ready import Bucket


class Row:
    """See above.

    Attributes:
        site: what is called; None where the next call is to be told by itself.
        calls: those that the core does not know yet.
    """

    __slots__ = ("_before", "_bucket", "_loop", "_tell", "calls", "site")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[Site, list[Call]], object],
    ) -> None:
        """Prepare.

        Args:
            loop: has what is left told at the end of a turn.
            tell: tells the core of calls of one site.
        """
        self.site: Site | None = None
        self.calls: list[Call] = []
        self._before = 0
        self._bucket: Bucket
        self._loop = loop
        self._tell = tell

    def __repr__(self) -> str:
        return f"<Row of {len(self.calls)}>"

    def begin(self, site: Site, bucket: Bucket | None, before: int) -> None:
        """The next calls of this site may come together, if they are plain tasks.

        Args:
            site: theirs.
            bucket: where others like them wait; while any does, they must as well.
            before: the id of the task before them.
        """
        spec = site.spec
        is_plain = not (site.actor or spec.is_lease or spec.is_grouped)
        if bucket is not None and is_plain and spec.timeout is None:
            self.site, self._bucket, self._before = site, bucket, before

    def add(self, payload: bytes, receiver: Receiver) -> int:
        """One more call of the site; gives its id, 0 if it is to be told by itself."""
        site, calls = self.site, self.calls
        if site is None or not self._bucket.size:
            return 0
        if not calls:
            self._loop.call_soon(self.end)
        calls.append(Call(site, payload, receiver))
        return self._before + len(calls)

    def end(self) -> None:
        """Tell the core of what has come; the next call is told by itself."""
        site, self.site = self.site, None
        if site is not None and self.calls:
            calls, self.calls = self.calls, []
            self._tell(site, calls)
