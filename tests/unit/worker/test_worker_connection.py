"""A worker's connection to its driver, and the lines that a task prints."""

from __future__ import annotations

import io
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from tqdm import tqdm

from aiogpu.client.current import Context
from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.codec import encode
from aiogpu.wire.messages import Done, Forget, Fork, Log, Message, ProtocolError
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.stdio import BURST, LONGEST, LineSender
from tests.unit.worker.conftest import DriverEnd


def test_end_of_driver_ends_connection(driver: DriverEnd, channel: Channel) -> None:
    driver.send(Forget())
    driver.hang_up()
    assert channel.next() == Forget()
    assert channel.next() is None
    assert channel.read() is False
    with pytest.raises(OSError, match="pipe"):
        channel.send(Done(1, b""))


def test_message_for_keeper_is_refused(driver: DriverEnd, channel: Channel) -> None:
    driver.send(Fork(1))
    with pytest.raises(ProtocolError, match="Fork out of turn"):
        channel.next()


def test_interrupt_waits_until_the_message_is_sent(
    driver: DriverEnd, channel: Channel, interrupts: Interrupts, page: ControlPage
) -> None:
    message = Log(7, 1, b"x" * (1 << 22))
    received: list[bytes] = []
    main = threading.get_ident()

    def interrupt_midway() -> None:
        size = len(encode(message))
        received.append(driver.socket.recv(1000))
        page.cancel(3, 7)
        signal.pthread_kill(main, signal.SIGINT)
        while sum(map(len, received)) < size:
            received.append(driver.socket.recv(1 << 20))

    listener = threading.Thread(target=interrupt_midway)
    listener.start()
    interrupts.entered = 7
    with pytest.raises(KeyboardInterrupt):
        channel.send(message)
    interrupts.entered = 0
    listener.join(20)
    assert b"".join(received) == encode(message)


class FakeChannel(Channel):
    """A channel that records messages."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def lines(self) -> list[bytes]:
        return [message.line for message in self.sent if isinstance(message, Log)]


def test_line_is_sent_when_it_is_complete(context: Context) -> None:
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


def test_end_of_a_task_ends_its_line() -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 1)
    sender.end_line()
    sender.write(b"unfinished")
    assert channel.lines == []
    sender.end_line()
    sender.end_line()
    assert channel.lines == [b"unfinished"]


def test_long_line_without_an_end_is_sent_in_pieces() -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 1)
    sender.write(b"x" * (2 * LONGEST + 5))
    assert [len(line) for line in channel.lines] == [LONGEST, LONGEST]
    sender.write(b"\n")
    assert channel.lines[2:] == [b"x" * 5]
    sender.write(b"y" * (LONGEST + 1) + b"\n")
    assert channel.lines[3:] == [b"y" * (LONGEST + 1)], "it has ended"


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
def test_progress_is_sent_before_its_line_has_ended(
    written: list[bytes], sent: list[bytes]
) -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 2)
    for data in written:
        sender.write(data)
    assert channel.lines == sent


def test_erased_progress_is_sent_at_once() -> None:
    """Otherwise it would stay visible until the next line."""
    channel = FakeChannel()
    sender = LineSender(channel, 2)
    for number in range(10 * BURST):
        sender.write(b"\r%d" % number)
    sender.write(b"\r   \r")
    assert channel.lines[-1] == b"\r"


def nested_bars(file: Any) -> None:
    for epoch in tqdm(range(3), "all", file=file):
        for _ in tqdm(range(4), f"epoch {epoch}", file=file, leave=epoch == 1):
            pass
    print("done", file=file)


def bars_in_a_row(file: Any) -> None:
    for number in range(2):
        for _ in tqdm(range(4), f"bar {number}", file=file):
            pass
    print("done", file=file)


def parallel_bars(file: Any) -> None:
    bars = [tqdm(total=3, desc=f"file {n}", position=n, file=file) for n in range(3)]
    for _ in range(3):
        for bar in bars:
            bar.update()
    for bar in bars:
        bar.close()


@pytest.mark.parametrize(
    ("draw", "ended"),
    [
        # Until the cursor moves up, the first bar counts as a single bar.
        (nested_bars, ["all 0/3", "epoch 1 4/4", "all 3/3", "done"]),
        (bars_in_a_row, ["bar 0 4/4", "bar 1 4/4", "done"]),
        (parallel_bars, ["file 0 0/3", *[f"file {n} 3/3" for n in range(3)]]),
    ],
)
def test_finished_progress_bars_become_lines(
    draw: Callable[[Any], None], ended: list[str]
) -> None:
    channel = FakeChannel()
    sender = LineSender(channel, 2)
    file = io.TextIOWrapper(cast("Any", sender), write_through=True)
    draw(file)
    sender.end_line()
    lines = [line.decode() for line in channel.lines if not line.endswith(b"\r")]
    states = [re.sub(r":.*\| (\d/\d) .*", r" \1", line) for line in lines]
    assert states == ended
    assert not any(b"\x1b" in line for line in channel.lines)
