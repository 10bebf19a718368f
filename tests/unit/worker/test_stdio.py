"""What a task prints, as lines that carry their task."""

from __future__ import annotations

import threading

import pytest

from aiogpu.client.current import Context
from aiogpu.wire.messages import Log, Message
from aiogpu.worker.connection import Channel
from aiogpu.worker.stdio import BURST, LONGEST, LineSender
from tests.support.program import run


class FakeChannel(Channel):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def lines(self) -> list[bytes]:
        return [message.line for message in self.sent if isinstance(message, Log)]


def test_lines_are_sent_when_they_are_whole(context: Context) -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 2)
    context.task = 7
    assert sender.write(b"one\ntwo\nthr") == 11
    assert channel.sent == [Log(7, 2, b"one"), Log(7, 2, b"two")]
    sender.write(bytearray(b"ee\n"))
    context.task = 0
    sender.write(memoryview(b"\n"))
    assert channel.sent[2:] == [Log(7, 2, b"three"), Log(0, 2, b"")]
    assert sender.partial == b""


def test_the_end_of_a_task_ends_its_line() -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 1)
    sender.end_line()
    sender.write(b"unfinished")
    assert channel.lines == []
    sender.end_line()
    sender.end_line()
    assert channel.lines == [b"unfinished"]


def test_a_line_without_end_is_sent_in_pieces() -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 1)
    sender.write(b"x" * (2 * LONGEST + 5))
    assert [len(line) for line in channel.lines] == [LONGEST, LONGEST]
    sender.write(b"\n")
    assert channel.lines[2:] == [b"x" * 5]
    sender.write(b"y" * (LONGEST + 1) + b"\n")
    assert channel.lines[3:] == [b"y" * (LONGEST + 1)], "one that has ended is whole"


def test_a_long_line_is_cut_once() -> None:
    """Not what is left of it anew for each piece, which takes minutes for 64 MB."""
    left: list[int] = []

    class Watching(FakeChannel):
        def send(self, message: Message) -> None:
            left.append(len(sender.partial))
            super().send(message)

    channel = Watching()
    sender = LineSender(channel, 1)
    sender.write(b"one\n" + bytes(8 * LONGEST + 3))
    assert left == [3] * 9
    assert channel.lines == [b"one", *[bytes(LONGEST)] * 8]


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ([b"\r1", b"\r2", b"\r3\n"], [b"1\r", b"2\r", b"3"]),
        ([b"1\r", b"2\r", b"3\r", b"\n"], [b"1\r", b"2\r", b"3\r", b"3"]),
        ([b"before\n\r1", b"\r1", b"\r2"], [b"before", b"1\r", b"2\r"]),
        ([b"\r1", b"\r   \r"], [b"1\r", b"\r"]),
        ([b"\r1", b"\r   \n", b"\n"], [b"1\r", b"\r", b""]),
        ([b"a line\r\n", b"\r\n"], [b"a line"]),
    ],
)
def test_states_are_sent_before_their_line_has_ended(
    written: list[bytes], sent: list[bytes]
) -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 2)
    for data in written:
        sender.write(data)
    assert channel.lines == sent


def test_many_states_are_few_lines_and_the_last_one_ends_it() -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 2)
    for number in range(10_000):
        sender.write(b"\r%d" % number)
    assert BURST <= len(channel.lines) <= 1000
    assert len(sender.partial) < 10
    sender.end_line()
    sender.end_line()
    assert channel.lines[-1] == b"9999"
    assert sender.partial == b""


def test_progress_that_goes_away_does_so_at_once() -> None:
    """It would be shown until the next line otherwise, however many states came."""
    channel = FakeChannel()
    sender = LineSender(channel, 2)
    for number in range(10 * BURST):
        sender.write(b"\r%d" % number)
    sender.write(b"\r   \r")
    assert channel.lines[-1] == b"\r"


def test_threads_do_not_tear_each_others_lines() -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 1)
    barrier = threading.Barrier(4)

    def write(letter: bytes) -> None:
        barrier.wait(20)
        for _ in range(500):
            sender.write(letter * 20 + b"\n" + letter * 20 + b"\n")

    threads = [threading.Thread(target=write, args=(c,)) for c in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    barrier.wait(20)
    for thread in threads:
        thread.join(20)
    assert len(channel.lines) == 3000
    assert {(len(line), len(set(line))) for line in channel.lines} == {(20, 1)}


def test_a_fork_of_a_worker_writes_to_the_descriptors() -> None:
    source = """
    import sys
    from tests.unit.worker.test_stdio import FakeChannel
    from aiogpu.worker.stdio import Stdio
    channel = FakeChannel()
    stdio = Stdio(channel)
    stdio.begin()
    print("by message")
    stdio.leave()
    print("by descriptor \\udc80")
    assert channel.lines == [b"by message"], channel.lines
    """
    assert run(source) == "by descriptor \\udc80\n"
