"""Taking in answers while a program submits much and does not let its loop turn.

`[f.remote(x) for x in many]` holds the loop for as long as it takes, and workers that
have done what they were sent would rest meanwhile: a third of the time of gathered
calls, when they are short. So what has come is read by the way, and workers are sent
more. Who awaits is told by the loop, as ever.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiogpu.runtime.slot import LiveWorker
    from aiogpu.runtime.transport import Peer

_log: Final = logging.getLogger(__name__)
FEW: Final = 4
"""Submissions in a row, with no answer heard between them, after which it is looked
whether it is time."""
EVERY: Final = 300e-6
"""Seconds between two looks at least; a worker stays awake for as long."""
SHARE: Final = 20
"""Looking costs at most one part in so many of the time, however many workers."""
LONGEST: Final = 1e-3
"""Seconds of answers that are taken in by one submission; one row of them at least."""
HEARING: Final = -(1 << 60)
"""Counted while answers are taken in: none are to be heard amid others."""


class Burst:
    """See above; whoever submits for code of this process counts, and then looks.

    Attributes:
        count: submissions since answers were heard, or the clock was looked at;
            `HEARING` while answers are heard.
        before: called before answers are heard.
    """

    __slots__ = ("_due", "_first", "_workers", "before", "count")

    def __init__(self, workers: Mapping[int, LiveWorker]) -> None:
        self.before: Callable[[], object] = _nothing
        self.count = 0
        self._workers = workers
        self._due = 0.0
        self._first = 0

    def __repr__(self) -> str:
        return f"<Burst of {self.count}>"

    def note(self) -> None:
        """Code of this process is about to submit something."""
        self.count += 1
        if self.count > FEW:
            self.look()

    def look(self) -> None:
        """Take in what workers have said, if it is time."""
        begun, self.count = perf_counter(), 0
        if begun < self._due:
            return
        self.count = HEARING
        try:
            self.before()
            begun = perf_counter()
            ready = self._ready()
            took = perf_counter() - begun
            self._hear(ready, begun + took + LONGEST)
        finally:
            self.count = 0
        self._due = perf_counter() + max(EVERY, took * SHARE)

    def _ready(self) -> list[Peer]:
        poll, peers = select.poll(), {}
        for worker in self._workers.values():
            peer = worker.peer
            if peer is not None and (descriptor := peer.readable) >= 0:
                peer.send_posted()
                poll.register(descriptor, select.POLLIN)
                peers[descriptor] = peer
        return [peers[descriptor] for descriptor, _ in poll.poll(0)]

    def _hear(self, ready: list[Peer], until: float) -> None:
        # Who was not heard the last time is heard first.
        first = self._first if self._first < len(ready) else 0
        for place in (*range(first, len(ready)), *range(first)):
            if ready[place].readable >= 0:  # still, whatever the others have said
                _take_in(ready[place])
            if perf_counter() > until:
                self._first = place + 1
                return
        self._first = 0


def _take_in(peer: Peer) -> None:
    try:
        peer.read_now()
    except Exception:  # noqa: BLE001 - one of them harms no other
        _log.exception("! cut off %r", peer)
        peer.abort()


def _nothing() -> None:
    """Nobody has submitted anything yet."""
