"""A worker's connection: reads cut anywhere, sends that nothing cuts in two."""

from __future__ import annotations

import signal
import threading
from itertools import count

import pytest

from aiogpu.errors import ProtocolError
from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.codec import encode
from aiogpu.wire.messages import (
    Cancel,
    Done,
    Exit,
    Forget,
    Fork,
    Log,
    Run,
)
from aiogpu.worker.connection import SHORT, Channel
from aiogpu.worker.interrupts import Interrupts
from tests.unit.worker.conftest import DriverEnd


def test_messages_come_in_order(driver: DriverEnd, channel: Channel) -> None:
    run = Run(1, 2, b"x" * 300_000, False)

    def speak() -> None:
        driver.send(Forget(), run, Exit())

    speaker = threading.Thread(target=speak)
    speaker.start()
    assert [channel.next() for _ in range(3)] == [Forget(), run, Exit()]
    speaker.join(20)


def test_awake_it_looks_for_a_moment_and_then_sleeps(
    driver: DriverEnd, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(0.0, SHORT * 0.4)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    looks: list[None] = []

    def speak_at_the_last_look() -> None:
        looks.append(None)
        if len(looks) == 2:
            driver.send(Cancel(2))

    monkeypatch.setattr("os.sched_yield", speak_at_the_last_look)
    channel._is_awake = True
    driver.send(Cancel(1))
    assert channel.next() == Cancel(1)
    assert (looks, channel._is_awake) == ([], True)
    assert channel.next() == Cancel(2)
    assert (len(looks), channel._is_awake) == (2, False)


def test_the_end_of_the_driver_ends_the_connection(
    driver: DriverEnd, channel: Channel
) -> None:
    driver.send(Forget())
    driver.hang_up()
    assert channel.next() == Forget()
    assert channel.next() is None
    assert channel.read() is False
    with pytest.raises(OSError, match="pipe"):
        channel.send(Done(1, b""))


def test_what_is_no_message_is_refused(driver: DriverEnd, channel: Channel) -> None:
    driver.send(Fork(1))
    with pytest.raises(ProtocolError, match="Fork out of turn"):
        channel.next()


def test_messages_of_one_kind_can_be_taken_out(
    driver: DriverEnd, channel: Channel
) -> None:
    assert channel.take(Cancel) == []
    driver.send(Forget(), Cancel(1), Exit(), Cancel(2))
    assert channel.read()
    assert channel.take(Cancel) == [Cancel(1), Cancel(2)]
    assert channel.take(Cancel) == []
    assert [channel.next(), channel.next()] == [Forget(), Exit()]


def test_frames_of_several_threads_are_not_mixed(
    driver: DriverEnd, channel: Channel
) -> None:
    def chatter(letter: bytes) -> None:
        for number in range(100):
            channel.send(Log(number, 1, letter * 5000))

    threads = [threading.Thread(target=chatter, args=(c,)) for c in (b"a", b"b")]
    for thread in threads:
        thread.start()
    heard = [driver.next() for _ in range(200)]
    for thread in threads:
        thread.join(20)
    for letter in (b"a", b"b"):
        mine = [m for m in heard if isinstance(m, Log) and m.line == letter * 5000]
        assert [message.task for message in mine] == list(range(100))


def test_an_interrupt_waits_until_the_frame_is_out(
    driver: DriverEnd, channel: Channel, interrupts: Interrupts, page: ControlPage
) -> None:
    message = Log(7, 1, b"x" * (1 << 22))
    heard: list[bytes] = []
    main = threading.get_ident()

    def interrupt_midway() -> None:
        assert driver.socket is not None
        size = len(encode(message))
        heard.append(driver.socket.recv(1000))
        page.ask(3, 7)
        signal.pthread_kill(main, signal.SIGINT)
        while sum(map(len, heard)) < size:
            heard.append(driver.socket.recv(1 << 20))

    listener = threading.Thread(target=interrupt_midway)
    listener.start()
    interrupts.entered = 7
    with pytest.raises(KeyboardInterrupt):
        channel.send(message)
    interrupts.entered = 0
    listener.join(20)
    assert b"".join(heard) == encode(message)


def test_outside_of_tasks_nothing_is_shielded(
    driver: DriverEnd, channel: Channel, interrupts: Interrupts, page: ControlPage
) -> None:
    page.ask(3, 7)
    signal.raise_signal(signal.SIGINT)
    channel.send(Done(7, b""))
    interrupts.entered = 7

    thread = threading.Thread(target=channel.send, args=(Log(7, 1, b"thread"),))
    thread.start()
    thread.join(20)
    interrupts.entered = 0
    assert [driver.next(), driver.next()] == [Done(7, b""), Log(7, 1, b"thread")]


def test_guests_read_while_they_are_admitted(
    driver: DriverEnd, channel: Channel
) -> None:
    driver.send(Forget())
    assert channel.read_ready(is_guest=True)
    assert channel.take(Forget) == [], "nobody has let them in"
    channel.admit_guests(True)
    channel.wait(None)
    assert channel.read_ready(is_guest=True)
    assert channel.read_ready(is_guest=True), "there is nothing, which is no end"
    assert channel.take(Forget) == [Forget()]
    channel.admit_guests(False)
    driver.send(Exit())
    assert channel.read_ready(is_guest=True)
    channel.wait(20)
    assert channel.read_ready()
    assert channel.next() == Exit()
    driver.hang_up()
    channel.wait(20)
    assert channel.read_ready() is False


def test_an_interrupt_waits_until_all_is_read(
    driver: DriverEnd, channel: Channel, interrupts: Interrupts, page: ControlPage
) -> None:
    def interrupt(_message: object) -> bool:
        signal.raise_signal(signal.SIGINT)
        return False

    channel.on_child = interrupt
    page.ask(3, 7)
    interrupts.entered = 7
    driver.send(Forget(), Exit())
    channel.wait(20)
    with pytest.raises(KeyboardInterrupt):
        channel.read_ready()
    interrupts.entered = 0
    assert [channel.next(), channel.next()] == [Forget(), Exit()]


def test_threads_wait_and_read_side_by_side(
    driver: DriverEnd, channel: Channel
) -> None:
    """A poll object is for one thread at a time."""
    channel.admit_guests(True)
    failures: list[BaseException] = []
    end = threading.Event()

    def visit() -> None:
        try:
            while not end.is_set():
                channel.wait(0.001)
                assert channel.read_ready(is_guest=True)
        except BaseException as error:
            failures.append(error)

    guests = [threading.Thread(target=visit) for _ in range(4)]
    for guest in guests:
        guest.start()
    for task in range(300):
        driver.send(Cancel(task))
    found = 0
    while found < 300 and not failures:
        channel.wait(0.001)
        assert channel.read_ready()
        found += len(channel.take(Cancel))
    end.set()
    for guest in guests:
        guest.join(20)
    assert failures == []
