"""The order in which the calls of one actor reach its process, and stream windows.

Calls are known by their ids alone. Each concurrency group of an actor has a mailbox of
its own, so that a slow group holds up no other. At most `window` calls are with the
process at a time. The process runs them at once, or one after the other if the group
runs one at a time. A `Window` counts how far a stream may run ahead of its consumer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Window:
    """The consumer's end: the items it has taken, and the limit the producer knows.

    The producer may yield `limit` items in all. It is told a higher limit whenever
    the consumer has taken half a window since, so that it need not be held while the
    consumer keeps up, and few messages pass.

    Attributes:
        size: items that the producer may be ahead, 1 or more.
        taken: items that the consumer has taken.
        limit: what the producer was told last.
    """

    __slots__ = ("_step", "limit", "size", "taken")

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.limit = size
        self._step = (size + 1) // 2

    def __repr__(self) -> str:
        return f"<Window {self.taken} taken, {self.limit} allowed>"

    def take(self) -> int:
        """Note that an item was taken; return the limit to send now, 0 for none."""
        self.taken += 1
        limit = self.taken + self.size
        if limit - self.limit < self._step:
            return 0
        self.limit = limit
        return limit

    def holds(self, buffered: int) -> bool:
        """Return whether the producer has to wait, with so many items not taken yet."""
        return self.taken + buffered >= self.limit


CallId = int
"""Counts up, over all actors and tasks of a node."""


class Mailbox:
    """One group's calls.

    Attributes:
        window: most calls that are with the process.
        is_serial: whether it runs them one at a time, so that what follows the one
            that it has begun has not begun.
        low: with no more than that left, the process is to be sent others; one that
            runs one at a time has enough to do until half are left.
        is_open: whether there is a process to send to.
        waiting: calls that were not sent, first to be sent first.
        sent: calls that were sent and not answered, in that order; the value says
            whether somebody still wants the answer.
    """

    __slots__ = ("is_open", "is_serial", "low", "sent", "waiting", "window")

    def __init__(self, window: int, is_serial: bool) -> None:
        self.window = window
        self.is_serial = is_serial
        self.low = window // 2 if is_serial else window - 1
        self.is_open = False
        self.waiting: OrderedDict[CallId, None] = OrderedDict()
        self.sent: dict[CallId, bool] = {}

    def __repr__(self) -> str:
        return f"<Mailbox {len(self.waiting)} waiting, {len(self.sent)} sent>"

    def __len__(self) -> int:
        return len(self.waiting) + len(self.sent)

    def post(self, call: CallId) -> bool:
        """Take in a new call; True if it is to be sent now."""
        if self.is_open and len(self.sent) < self.window and not self.waiting:
            self.sent[call] = True
            return True
        self.waiting[call] = None
        return False

    def finish(self, call: CallId) -> bool:
        """Note that a call was answered; False if it was not sent or was given up."""
        return self.sent.pop(call, False)

    def take(self) -> list[CallId]:
        """The calls that are to be sent now, first one first."""
        calls: list[CallId] = []
        if not self.is_open:
            return calls
        while self.waiting and len(self.sent) < self.window:
            call, _ = self.waiting.popitem(last=False)
            self.sent[call] = True
            calls.append(call)
        return calls

    def open(self) -> list[CallId]:
        """The process is there; gives the calls that are to be sent now."""
        self.is_open = True
        return self.take()

    def cancel(self, call: CallId) -> bool:
        """Cancel a call; return True if its process must be told."""
        if call in self.sent:
            is_new = self.sent[call]
            self.sent[call] = False
            return is_new
        self.waiting.pop(call, None)
        return False

    def lose(self, begun: CallId, is_retried: Iterable[CallId]) -> list[CallId]:
        """The process has gone; another may come.

        Calls that it cannot have begun wait again, before all others; so do those
        that are to be tried again. What was cancelled is forgotten.

        Args:
            begun: the call that it had begun last, where it runs one at a time.
            is_retried: of those that it may have begun, the ones to be tried again.

        Returns:
            Those that it may have begun and that are lost.
        """
        self.is_open = False
        again = set(is_retried)
        lost: list[CallId] = []
        kept: list[CallId] = []
        sent, self.sent = self.sent, {}
        # Ids count up, and so does what a serial process begins.
        for call, is_wanted in sent.items():
            if not is_wanted:
                continue
            has_begun = not self.is_serial or call <= begun
            (lost if has_begun and call not in again else kept).append(call)
        for call in reversed(kept):
            self.waiting[call] = None
            self.waiting.move_to_end(call, last=False)
        return lost

    def close(self) -> list[CallId]:
        """Close for good; return the calls whose answers are awaited."""
        self.is_open = False
        left = [call for call, is_wanted in self.sent.items() if is_wanted]
        left += self.waiting
        self.sent.clear()
        self.waiting.clear()
        return left
