"""Mailboxes and stream windows against models: order kept, nothing twice or lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiogpu.core.mailbox import Mailbox, Window
from tests.support.sampling import examples


def filled(window: int = 2, calls: int = 4, is_serial: bool = True) -> Mailbox:
    mailbox = Mailbox(window, is_serial)
    for call in range(1, calls + 1):
        assert not mailbox.post(call)
    assert mailbox.open() == list(range(1, min(window, calls) + 1))
    return mailbox


class Post(RuleBasedStateMachine):
    """A process that runs its calls, and sometimes dies and restarts."""

    @initialize(window=st.integers(1, 4), is_serial=st.booleans())
    def begin(self, window: int, is_serial: bool) -> None:
        self.mailbox = Mailbox(window, is_serial)
        self.last = 0
        self.at_process: list[int] = []
        self.cancelled: set[int] = set()
        self.ended: set[int] = set()
        self.retried: set[int] = set()
        self.first_sent: list[int] = []

    def deliver(self, calls: list[int]) -> None:
        for call in calls:
            assert call not in self.ended
            assert call not in self.cancelled
            assert call not in self.at_process
            if call not in self.first_sent:
                self.first_sent.append(call)
        self.at_process += calls

    @rule()
    def post(self) -> None:
        self.last += 1
        if self.mailbox.post(self.last):
            self.deliver([self.last])

    @rule()
    def open(self) -> None:
        self.deliver(self.mailbox.open())

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.at_process:
            serial = self.mailbox.is_serial
            at = 0 if serial else data.draw(st.integers(0, len(self.at_process) - 1))
            call = self.at_process.pop(at)
            assert self.mailbox.finish(call) == (call not in self.cancelled)
            self.ended.add(call)
            self.deliver(self.mailbox.take())

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.last:
            call = data.draw(st.integers(1, self.last))
            is_told = self.mailbox.cancel(call)
            assert is_told == (call in self.at_process and call not in self.cancelled)
            if call not in self.ended:
                self.cancelled.add(call)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        begun = self.at_process if not self.mailbox.is_serial else self.at_process[:1]
        again = data.draw(st.sets(st.sampled_from(begun))) if begun else set()
        lost = self.mailbox.lose(begun[-1] if begun else 0, again)
        wanted = [call for call in begun if call not in self.cancelled]
        assert lost == [call for call in wanted if call not in again]
        self.ended.update(lost)
        self.at_process = []

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "mailbox"):
            return
        mailbox = self.mailbox
        assert list(mailbox.sent) == self.at_process
        assert len(mailbox.sent) <= mailbox.window
        wanted = set(range(1, self.last + 1)) - self.ended - self.cancelled
        kept = {call for call, is_wanted in mailbox.sent.items() if is_wanted}
        assert kept | set(mailbox.waiting) == wanted
        assert list(mailbox.waiting) == sorted(mailbox.waiting)
        assert self.first_sent == sorted(self.first_sent), "the order of sending"


TestPost = Post.TestCase


TestPost.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)


def test_mailbox_sends_calls_in_order_within_its_window() -> None:
    mailbox = filled()
    assert not mailbox.post(5)
    assert mailbox.take() == []
    assert mailbox.finish(1)
    assert mailbox.take() == [3]
    assert len(mailbox) == 4
    assert repr(mailbox) == "<Mailbox 2 waiting, 2 sent>"
    assert not mailbox.finish(7), "it was not sent"
    serial = [Mailbox(window, is_serial=True).low for window in (1, 2, 256)]
    assert serial == [0, 1, 128], "it has enough to do until half are left"
    assert [Mailbox(window, is_serial=False).low for window in (1, 2, 9)] == [0, 1, 8]


def test_closed_mailbox_stays_closed() -> None:
    mailbox = filled(window=2, calls=4)
    assert mailbox.cancel(1), "its process must be told"
    assert not mailbox.cancel(1), "it was told"
    assert not mailbox.cancel(4), "it does not know of it"
    assert mailbox.close() == [2, 3]
    assert len(mailbox) == 0
    assert not mailbox.finish(2)
    assert not mailbox.post(5)
    assert mailbox.take() == []


@pytest.mark.parametrize(
    ("is_serial", "begun", "again", "lost", "waiting"),
    [
        pytest.param(True, 0, (), [], [2, 3, 4], id="serial, none has begun"),
        pytest.param(True, 2, (), [2], [3, 4], id="serial, one has begun"),
        pytest.param(True, 2, (2,), [], [2, 3, 4], id="serial, and is retried"),
        pytest.param(False, 0, (), [2, 3], [4], id="all at once"),
        pytest.param(False, 0, (3,), [2], [3, 4], id="all at once, one is retried"),
    ],
)
def test_lose_requeues_calls_that_have_not_begun(
    is_serial, begun, again, lost, waiting
):
    """Call 1 was cancelled, 2 and 3 were sent, 4 waits."""
    mailbox = filled(window=3, calls=4, is_serial=is_serial)
    mailbox.cancel(1)
    assert mailbox.lose(begun, again) == lost
    assert list(mailbox.waiting) == waiting
    assert not mailbox.post(5), "there is no process"
    assert mailbox.open() == [*waiting, 5][:3]
    assert list(mailbox.sent) == [*waiting, 5][:3]
    assert mailbox.post(6) == (len(waiting) == 1), "where there is room"


def test_window_of_one_waits_after_each_item():
    window = Window(1)
    assert window.limit == 1
    assert [window.take() for _ in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("size", [2, 3, 64, 65])
def test_window_sends_few_messages(size):
    window = Window(size)
    told = [limit for limit in (window.take() for _ in range(10 * size)) if limit]
    assert len(told) <= 20
    assert told == sorted(set(told))
    assert told[-1] == window.limit
    ahead = window.limit - window.taken
    assert [window.holds(buffered) for buffered in (ahead - 1, ahead)] == [False, True]


class Streaming(RuleBasedStateMachine):
    """A producer and a consumer, with a delayed channel in each direction."""

    @initialize(size=st.integers(1, 9))
    def begin(self, size: int) -> None:
        self.window = Window(size)
        self.allowed = size
        self.yielded = 0
        self.buffered = 0
        self.items_under_way = 0
        self.limits_under_way: list[int] = []

    @precondition(lambda self: self.yielded < self.allowed)
    @rule()
    def produce(self) -> None:
        self.yielded += 1
        self.items_under_way += 1

    @precondition(lambda self: self.items_under_way)
    @rule()
    def arrive(self) -> None:
        self.buffered += self.items_under_way
        self.items_under_way = 0

    @precondition(lambda self: self.buffered)
    @rule()
    def consume(self) -> None:
        self.buffered -= 1
        limit = self.window.take()
        if limit:
            self.limits_under_way.append(limit)

    @precondition(lambda self: self.limits_under_way)
    @rule()
    def hear(self) -> None:
        self.allowed = max(self.allowed, self.limits_under_way.pop(0))

    @invariant()
    def it_is_never_further_ahead_than_it_may(self) -> None:
        assert self.yielded - self.window.taken <= self.window.size
        assert self.buffered <= self.window.size

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        is_held = self.yielded >= self.allowed
        is_quiet = not self.items_under_way and not self.limits_under_way
        assert self.buffered or not is_held or not is_quiet

    @invariant()
    def it_is_said_to_be_held_if_it_is(self) -> None:
        if not self.items_under_way and not self.limits_under_way:
            is_held = self.yielded >= self.allowed
            assert self.window.holds(self.buffered) == is_held


Streaming.TestCase.settings = settings(max_examples=50, deadline=None)


TestStreaming = Streaming.TestCase


def test_window_repr_shows_its_counts():
    window = Window(4)
    window.take()
    assert repr(window) == "<Window 1 taken, 4 allowed>"
