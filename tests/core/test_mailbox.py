"""Mailboxes against a model: order kept, nothing twice, nothing lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aiogpu.core.mailbox import Mailbox
from tests.support.sampling import examples


def filled(window: int = 2, calls: int = 4, is_serial: bool = True) -> Mailbox:
    mailbox = Mailbox(window, is_serial)
    for call in range(1, calls + 1):
        assert not mailbox.post(call)
    assert mailbox.open() == list(range(1, min(window, calls) + 1))
    return mailbox


def test_it_sends_as_much_as_its_window_holds() -> None:
    mailbox = filled()
    assert not mailbox.post(5)
    assert mailbox.take() == []
    assert mailbox.finish(1)
    assert mailbox.take() == [3]
    assert len(mailbox) == 4
    assert repr(mailbox) == "<Mailbox 2 waiting, 2 sent>"


def test_an_empty_one_sends_at_once_and_in_order() -> None:
    mailbox = filled(calls=0)
    assert mailbox.post(1)
    assert mailbox.post(2)
    assert not mailbox.post(3)
    assert mailbox.finish(2)
    assert not mailbox.post(4), "3 goes first"
    assert mailbox.take() == [3]


def test_who_runs_one_at_a_time_is_sent_more_when_half_is_left() -> None:
    assert [Mailbox(window, is_serial=True).low for window in (1, 2, 256)] == [
        0,
        1,
        128,
    ]
    assert [Mailbox(window, is_serial=False).low for window in (1, 2, 9)] == [0, 1, 8]


def test_who_cancels() -> None:
    mailbox = filled()
    assert not mailbox.cancel(4), "it was never sent"
    assert mailbox.cancel(2)
    assert not mailbox.cancel(2), "it was told"
    assert not mailbox.cancel(9)
    assert not mailbox.finish(2), "nobody wants the answer"
    assert mailbox.take() == [3]
    assert not mailbox.finish(7)


def test_what_a_serial_process_takes_with_it() -> None:
    mailbox = filled(window=3, calls=5)
    mailbox.finish(1)
    mailbox.cancel(3)
    assert mailbox.lose(2, []) == [2]
    assert mailbox.take() == []
    assert mailbox.open() == [4, 5], "3 was cancelled"


def test_what_is_tried_again_keeps_its_place() -> None:
    mailbox = filled(window=3, calls=5)
    assert mailbox.lose(1, [1]) == []
    assert mailbox.open() == [1, 2, 3]


def test_a_concurrent_process_may_have_begun_all() -> None:
    mailbox = filled(window=3, calls=5, is_serial=False)
    assert mailbox.lose(0, [2]) == [1, 3]
    assert mailbox.open() == [2, 4, 5]


def test_the_end() -> None:
    mailbox = filled(window=2, calls=4)
    mailbox.cancel(1)
    assert mailbox.close() == [2, 3, 4]
    assert len(mailbox) == 0
    assert not mailbox.finish(2)
    assert not mailbox.post(5)


class Post(RuleBasedStateMachine):
    """A process that runs what it is sent, dies now and then, and comes again."""

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
