"""[B17] The window of a stream: a producer is never further ahead, and never stuck."""

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

from aiogpu.core.mailbox import Window


def test_with_one_each_item_waits_for_the_one_before():
    window = Window(1)
    assert window.limit == 1
    assert [window.take() for _ in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("size", [2, 3, 64, 65])
def test_few_messages_pass(size):
    window = Window(size)
    told = [limit for limit in (window.take() for _ in range(10 * size)) if limit]
    assert len(told) <= 20
    assert told == sorted(set(told))
    assert told[-1] == window.limit


def test_it_says_when_its_producer_is_held():
    window = Window(2)
    assert not window.holds(1)
    assert window.holds(2)
    window.take()
    assert not window.holds(1)


class Streaming(RuleBasedStateMachine):
    """A producer, a consumer, and two wires between them that deliver some time."""

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


def test_it_shows_how_far_it_is():
    window = Window(4)
    window.take()
    assert repr(window) == "<Window 1 taken, 4 allowed>"
