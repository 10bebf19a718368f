"""The interrupt: only in the named task's user code, at no bad moment, memory kept."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar

import pytest

from aiogpu.client.current import Context
from aiogpu.client.references import Loans
from aiogpu.errors import SerializationError
from aiogpu.memory import fd_passing as passing
from aiogpu.memory.control_page import BEGUN, VOID, ControlPage
from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender
from aiogpu.memory.segment import Segment
from aiogpu.serialization.payload import Contents, Payload, pack
from aiogpu.serialization.references import PickledValue
from aiogpu.wire import codec as frames
from aiogpu.wire.messages import Done, Items, Returned
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import Interrupts
from tests.unit.worker.conftest import DriverEnd


def interrupt() -> None:
    """Runs the handler at once, in this frame."""
    signal.raise_signal(signal.SIGINT)


def own() -> str:
    """Stands for a frame of the worker's own."""
    signal.raise_signal(signal.SIGINT)
    return "to its end"


def own_around_user_code() -> None:
    interrupt()


def test_the_named_task_is_interrupted(
    page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    assert interrupts.is_asked(7)
    with pytest.raises(KeyboardInterrupt, match="task 7 was cancelled"):
        interrupt()
    assert page.heard(3) == 7


@pytest.mark.parametrize(
    ("asked", "entered", "slot"),
    [(7, 0, 3), (7, 8, 3), (0, 7, 3), (0, 0, 3), (7, 7, 2)],
)
def test_nothing_else_is(
    asked: int, entered: int, slot: int, page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(slot, asked)
    interrupts.entered = entered
    interrupt()
    assert page.heard(3) == 0


def test_own_frames_are_left_alone(page: ControlPage, interrupts: Interrupts) -> None:
    interrupts.spare(own.__code__, own_around_user_code.__code__)
    page.ask(3, 7)
    interrupts.entered = 7
    assert own() == "to its end"
    assert page.heard(3) == 0, "the driver will ask again"
    with pytest.raises(KeyboardInterrupt):
        own_around_user_code()


def test_a_shield_puts_it_off(page: ControlPage, interrupts: Interrupts) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    steps = []

    def shielded() -> None:
        with interrupts.shielded():
            interrupt()
            interrupt()
            steps.append("still here")
            assert page.heard(3) == 0

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert steps == ["still here"]
    assert page.heard(3) == 7
    with interrupts.shielded():
        steps.append("no more pending")
    assert len(steps) == 2


def test_a_shield_in_another_keeps_it_whole(
    page: ControlPage, interrupts: Interrupts
) -> None:
    page.ask(3, 7)
    interrupts.entered = 7
    steps = []

    def shielded() -> None:
        with interrupts.shielded():
            with interrupts.if_open():
                interrupt()
            interrupt()
            steps.append("still here")

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert steps == ["still here"]
    assert not interrupts.is_shielded


def test_a_blocked_signal_is_let_through_again(interrupts: Interrupts) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    interrupts.attend(3)
    interrupts.install()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_handler_that_a_task_has_changed_is_put_back(
    page: ControlPage, interrupts: Interrupts
) -> None:
    rehearsed = Interrupts(page)
    interrupts.install()
    handler = signal.getsignal(signal.SIGINT)
    rehearsed.restore()
    assert signal.getsignal(signal.SIGINT) is handler, "it was never installed"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_was_sent_may_begin(page: ControlPage, interrupts: Interrupts) -> None:
    page.revoke(3, 7)
    page.revoke(2, 100)
    assert interrupts.begin(7) == BEGUN
    assert interrupts.begin(8) == BEGUN
    assert page.begun(3) == 8


def test_what_is_revoked_does_not_begin(
    page: ControlPage, interrupts: Interrupts
) -> None:
    assert interrupts.begin(5) == BEGUN
    page.revoke(3, 8)
    for number in (6, 7):
        assert interrupts.begin(number) == VOID
    assert page.begun(3) == 5, "the driver sees that none has begun"
    assert interrupts.begin(8) == BEGUN


@pytest.mark.parametrize("name", ["interrupt", "interrupt_under_a_shield"])
def test_an_import_is_not_broken_off(
    name: str,
    page: ControlPage,
    interrupts: Interrupts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is one that prints, which is done under a shield."""

    def interrupt_under_a_shield() -> None:
        with interrupts.shielded():
            interrupt()

    monkeypatch.setitem(sys.modules, "of_this_test", ModuleType("of_this_test"))
    is_plain = name == "interrupt"
    sys.modules["of_this_test"].interrupt = (  # type: ignore[attr-defined]
        interrupt if is_plain else interrupt_under_a_shield
    )
    body = "import of_this_test; of_this_test.interrupt(); is_whole = True"
    (tmp_path / "module_under_interrupt.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_under_interrupt", raising=False)
    page.ask(3, 7)
    interrupts.entered = 7
    module = importlib.import_module("module_under_interrupt")
    assert module.is_whole
    assert page.heard(3) == 0, "the driver will ask again"
    with pytest.raises(KeyboardInterrupt):
        interrupt()


P = ParamSpec("P")
T = TypeVar("T")
WORKER = 5
TEXT = b"large" * 1000


class Node:
    """The node's end of the sockets for descriptors."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        self._connected: list[socket.socket] = []

    def accept(self) -> socket.socket:
        """The connection that is there; whose it is has been read."""
        connected, _ = self._listening.accept()
        self._connected.append(connected)
        assert int.from_bytes(connected.recv(8), "little") == WORKER
        return connected

    @property
    def is_called(self) -> bool:
        """Whether somebody has connected who was not accepted yet."""
        return bool(select.select([self._listening], [], [], 0)[0])

    def close(self) -> None:
        for one in (*self._connected, self._listening):
            one.close()
        os.unlink(self.path)


@pytest.fixture
def node(runtime_directory: Path) -> Iterator[Node]:
    node = Node(f"{runtime_directory}/descriptors.sock")
    yield node
    node.close()


@pytest.fixture
def loans(
    node: Node, page: ControlPage, interrupts: Interrupts, context: Context
) -> Iterator[Loans]:
    """Those of a worker whose task 7 is to stop."""
    context.worker = WORKER
    page.note_left(1 << 30)
    loans = Loans(node.path, "", page, interrupts, press=bool)
    page.ask(3, 7)
    interrupts.entered = 7
    yield loans
    interrupts.entered = 0
    loans.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(9, len(TEXT))
    segment.write([memoryview(TEXT)])
    yield segment
    segment.close()


def large() -> PickledValue:
    return PickledValue(b"", [memoryview(TEXT)])


def interrupting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the signal come when one of these is about to be made."""
    kind: Callable[[socket.socket], object] = getattr(passing, name)

    def make(sock: socket.socket) -> object:
        signal.raise_signal(signal.SIGINT)
        return kind(sock)

    monkeypatch.setattr(passing, name, make)


def lent(loans: Loans, segment: Segment) -> Payload:
    """What the worker makes of a payload that lies in a segment."""
    contents = Contents().in_segment(segment.id, segment.size, [(0, len(TEXT))])
    return loans.borrow(pack(contents))


@pytest.mark.parametrize("name", ["DescriptorSender", "DescriptorReceiver"])
def test_a_worker_connects_once(
    name: str,
    node: Node,
    loans: Loans,
    segment: Segment,
    monkeypatch: pytest.MonkeyPatch,
    interrupts: Interrupts,
) -> None:
    """A second time it would be turned away, and the next task would have no value."""
    interrupting(name, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        loans.pack(large())
    connected = node.accept()
    interrupts.entered = 8
    parcel, descriptor = lent(loans, segment), segment.share()
    assert DescriptorSender(connected).send(segment.id, descriptor)
    os.close(descriptor)
    opened, _ = parcel.open()
    assert opened == TEXT
    assert not node.is_called


def test_what_is_written_in_vain_is_given_up(
    node: Node, loans: Loans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the driver has a descriptor of it: that would keep the memory."""
    monkeypatch.setattr(Segment, "write", interrupted(Segment.write))
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        loans.pack(large())
    assert not node.is_called
    monkeypatch.undo()
    loans.pack(large())
    ((_, descriptor),) = DescriptorReceiver(node.accept()).read()
    os.close(descriptor)


@pytest.mark.parametrize("way", ["alone", "among several", "with others"])
def test_what_is_sent_is_not_taken_back(
    way: str, loans: Loans, channel: Channel, driver: DriverEnd
) -> None:
    channel.loans = loans
    outgoing = large()
    if way == "among several":
        outgoing = PickledValue(b"p", parts=(large(), b"q"))
    payload = loans.pack(outgoing)
    if way == "with others":
        channel.send_all([Items(7, (b"q", payload))])
    else:
        channel.send(Done(7, payload, 1))
    del payload, outgoing
    assert loans.tell() is None
    assert driver.next()


def test_what_cannot_be_sent_is_taken_back(
    loans: Loans, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.loans = loans
    payload = loans.pack(large())
    assert isinstance(payload, Payload)
    number = payload.contents.segment
    monkeypatch.setattr(frames.encode, "__defaults__", (8,))
    with pytest.raises(SerializationError, match="limit of 8"):
        channel.send(Done(7, payload))
    assert loans.tell() is None, "it may be sent in another way"
    del payload
    gc.collect()
    assert loans.tell() == Returned((number,), (1,))
    assert loans.tell() is None


def interrupted(work: Callable[P, T]) -> Callable[P, T]:
    def do(*args: P.args, **kwargs: P.kwargs) -> T:
        done = work(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return done

    return do


@pytest.mark.parametrize("kind", ["Loan", "Written", "finalized"])
def test_what_is_dropped_is_returned_whatever_comes_meanwhile(
    kind: str, loans: Loans, page: ControlPage
) -> None:
    """An interrupt would be lost there, and what goes would never be given back."""
    loans.on_over = interrupting_once = Once()
    if kind == "Loan":
        held: object = loans.own(-9)
    elif kind == "Written":
        held = loans.pack(large())
    else:
        held = Once()
        weakref.finalize(held, loans.end, -9, 1)
    del held
    gc.collect()
    assert interrupting_once.is_done
    assert page.heard(3) == 0, "the driver will ask again"
    assert loans.tell() is not None
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        signal.raise_signal(signal.SIGINT)


class Once:
    """Has the signal come where it is called."""

    is_done = False

    def __call__(self) -> None:
        self.is_done = True
        signal.raise_signal(signal.SIGINT)
