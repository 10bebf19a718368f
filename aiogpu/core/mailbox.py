"""The order in which the calls of one actor reach its process, and stream windows.

A call is an id here. Each concurrency group of an actor has a mailbox of its own, so a
slow group does not delay the others. At most `window` calls of a group are sent and
unanswered at a time; the process runs them concurrently or, in a serial group, one
after the other. A `Window` limits how far a stream may run ahead of its consumer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Window:
    """Flow control of a stream, as its consumer keeps it.

    The producer may yield `limit` items in total. It is sent a higher limit whenever
    the consumer has taken another half window: a consumer that keeps up never blocks
    the producer, and few messages are sent.

    Attributes:
        size: items that the producer may be ahead, 1 or more.
        taken: items that the consumer has taken.
        limit: the limit that was last sent to the producer.
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
        """Note that an item was taken; return the new limit to send, 0 for none."""
        self.taken += 1
        limit = self.taken + self.size
        if limit - self.limit < self._step:
            return 0
        self.limit = limit
        return limit

    def holds(self, buffered: int) -> bool:
        """Return True if the producer must wait, given the number of buffered items."""
        return self.taken + buffered >= self.limit


CallId = int
"""Increases over all actors and tasks of a node."""


class Mailbox:
    """The calls of one concurrency group.

    Attributes:
        window: the most calls that are sent and unanswered.
        is_serial: the process runs the calls one at a time, so the calls after the
            one that it runs have not begun.
        low: send more calls when no more than this number are unanswered; a serial
            process has enough to do until half are left.
        is_open: there is a process to send to.
        waiting: calls that were not sent, in order.
        sent: calls that were sent and not answered, in order; the value is False if
            the answer is no longer wanted.
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
        """Take in a new call; True if the caller must send it now."""
        if self.is_open and len(self.sent) < self.window and not self.waiting:
            self.sent[call] = True
            return True
        self.waiting[call] = None
        return False

    def finish(self, call: CallId) -> bool:
        """Note that a call was answered; False if it was not sent or was cancelled."""
        return self.sent.pop(call, False)

    def take(self) -> list[CallId]:
        """Return the calls to send now, in order."""
        calls: list[CallId] = []
        if not self.is_open:
            return calls
        while self.waiting and len(self.sent) < self.window:
            call, _ = self.waiting.popitem(last=False)
            self.sent[call] = True
            calls.append(call)
        return calls

    def open(self) -> list[CallId]:
        """Note that the process is ready; return the calls to send now."""
        self.is_open = True
        return self.take()

    def cancel(self, call: CallId) -> bool:
        """Cancel a call; return True if the process must be notified."""
        if call in self.sent:
            is_new = self.sent[call]
            self.sent[call] = False
            return is_new
        self.waiting.pop(call, None)
        return False

    def lose(self, last_begun: CallId, retried: Iterable[CallId]) -> list[CallId]:
        """Note that the process is gone; a new one may follow.

        Calls that cannot have begun, and calls that are retried, wait again before all
        others. Cancelled calls are forgotten.

        Args:
            last_begun: the last call that a serial process had begun.
            retried: calls that may have begun and are retried.

        Returns:
            The calls that may have begun and are lost.
        """
        self.is_open = False
        again = set(retried)
        lost: list[CallId] = []
        kept: list[CallId] = []
        sent, self.sent = self.sent, {}
        # A serial process begins calls in the order of their ids.
        for call, is_wanted in sent.items():
            if not is_wanted:
                continue
            has_begun = not self.is_serial or call <= last_begun
            (lost if has_begun and call not in again else kept).append(call)
        for call in reversed(kept):
            self.waiting[call] = None
            self.waiting.move_to_end(call, last=False)
        return lost

    def close(self) -> list[CallId]:
        """Close for good; return the calls whose answers are still wanted."""
        self.is_open = False
        unanswered = [call for call, is_wanted in self.sent.items() if is_wanted]
        unanswered += self.waiting
        self.sent.clear()
        self.waiting.clear()
        return unanswered
