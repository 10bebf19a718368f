"""What a program that has joined a node does with its tasks' lines."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aiogpu.engines.remote import Terminal
from aiogpu.wire.messages import ChildDone, Message, Printed
from tests.support.until import until
from tests.unit.runtime.fakes import FakeSource, SlowTerminal

DONE = ChildDone(1, b"")
pytestmark = pytest.mark.either_loop


async def test_answers_wait_for_the_lines_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, taken = SlowTerminal(), list[Message]()
    terminal = Terminal(asyncio.get_running_loop(), FakeSource(), taken.append)
    assert not terminal.keeps(DONE), "nothing was printed before it"
    monkeypatch.setattr(sys, "stdout", screen)
    assert terminal.keeps(Printed(1, "(embed pid=4) hello"))
    assert terminal.keeps(DONE)
    assert taken == []
    screen.is_free.set()
    await until(lambda: taken)
    assert screen.getvalue() == "(embed pid=4) hello\n"
    assert not terminal.keeps(DONE), "the line is out"
    await terminal.close()


async def test_when_the_node_has_gone_nothing_is_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, taken = SlowTerminal(), list[Message]()
    terminal = Terminal(asyncio.get_running_loop(), FakeSource(), taken.append)
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.keeps(Printed(1, "a"))
    terminal.keeps(DONE)
    terminal.hold_nothing()
    assert taken == [DONE]
    screen.is_free.set()
    await terminal.close()
    assert screen.getvalue() == "a\n"
