"""Interrupts hit only the user code of the right task; memory is never lost."""

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
from typing import Any

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
    """Run the handler immediately, in this frame."""
    signal.raise_signal(signal.SIGINT)


def own() -> str:
    """Raise the signal in a frame that belongs to the worker."""
    signal.raise_signal(signal.SIGINT)
    return "to its end"


def own_around_user_code() -> None:
    interrupt()


@pytest.fixture
def cancelled(page: ControlPage, interrupts: Interrupts) -> None:
    """Task 7 runs, and its cancellation is requested."""
    page.cancel(3, 7)
    interrupts.entered = 7


@pytest.mark.usefixtures("cancelled")
def test_interrupt_hits_its_task(page: ControlPage, interrupts: Interrupts) -> None:
    assert interrupts.is_cancelled(7)
    with pytest.raises(KeyboardInterrupt, match="task 7 was cancelled"):
        interrupt()
    assert page.acknowledged(3) == 7


@pytest.mark.parametrize(
    ("asked", "entered", "slot"),
    [(7, 0, 3), (7, 8, 3), (0, 7, 3), (0, 0, 3), (7, 7, 2)],
)
def test_interrupt_does_not_hit_other_tasks_and_slots(
    asked: int, entered: int, slot: int, page: ControlPage, interrupts: Interrupts
) -> None:
    page.cancel(slot, asked)
    interrupts.entered = entered
    interrupt()
    assert page.acknowledged(3) == 0


@pytest.mark.usefixtures("cancelled")
def test_worker_frames_are_spared(page: ControlPage, interrupts: Interrupts) -> None:
    interrupts.spare(own.__code__, own_around_user_code.__code__)
    assert own() == "to its end"
    assert page.acknowledged(3) == 0, "the driver will ask again"
    with pytest.raises(KeyboardInterrupt):
        own_around_user_code()


@pytest.mark.usefixtures("cancelled")
def test_shield_delays_the_interrupt(page: ControlPage, interrupts: Interrupts) -> None:
    steps = []

    def shielded() -> None:
        with interrupts.shielded():
            interrupt()
            interrupt()
            steps.append("still here")
            assert page.acknowledged(3) == 0

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert steps == ["still here"]
    assert page.acknowledged(3) == 7
    with interrupts.shielded():
        steps.append("no more pending")
    assert len(steps) == 2


@pytest.mark.usefixtures("cancelled")
def test_inner_shield_does_not_end_the_outer_one(interrupts: Interrupts) -> None:
    steps = []

    def shielded() -> None:
        with interrupts.shielded():
            with interrupts.shielded_if_open():
                interrupt()
            interrupt()
            steps.append("still here")

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert steps == ["still here"]
    assert not interrupts.is_shielded


def test_install_unblocks_the_signal(interrupts: Interrupts) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    interrupts.use_slot(3)
    interrupts.install()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_unrevoked_task_may_start(page: ControlPage, interrupts: Interrupts) -> None:
    page.revoke(3, 7)
    page.revoke(2, 100)
    assert interrupts.begin(7) == BEGUN
    assert interrupts.begin(8) == BEGUN
    assert page.begun(3) == 8


def test_revoked_task_does_not_start(page: ControlPage, interrupts: Interrupts) -> None:
    assert interrupts.begin(5) == BEGUN
    page.revoke(3, 8)
    for number in (6, 7):
        assert interrupts.begin(number) == VOID
    assert page.begun(3) == 5, "the driver sees that neither task started"
    assert interrupts.begin(8) == BEGUN


@pytest.mark.usefixtures("cancelled")
@pytest.mark.parametrize("is_shielded", [False, True])
def test_import_is_not_interrupted(
    is_shielded: bool,
    page: ControlPage,
    interrupts: Interrupts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output, which an import may write, is sent under a shield."""

    def interrupt_under_a_shield() -> None:
        with interrupts.shielded():
            interrupt()

    of_this_test: Any = ModuleType("of_this_test")
    of_this_test.interrupt = interrupt_under_a_shield if is_shielded else interrupt
    monkeypatch.setitem(sys.modules, "of_this_test", of_this_test)
    body = "import of_this_test; of_this_test.interrupt(); is_whole = True"
    (tmp_path / "module_under_interrupt.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_under_interrupt", raising=False)
    module = importlib.import_module("module_under_interrupt")
    assert module.is_whole
    assert page.acknowledged(3) == 0, "the driver will ask again"
    with pytest.raises(KeyboardInterrupt):
        interrupt()


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
        """Accept the worker's connection and read its number."""
        connected, _ = self._listening.accept()
        self._connected.append(connected)
        assert int.from_bytes(connected.recv(8), "little") == WORKER
        return connected

    @property
    def has_new_connection(self) -> bool:
        """A connection waits to be accepted."""
        return bool(select.select([self._listening], [], [], 0)[0])

    def close(self) -> None:
        for connection in (*self._connected, self._listening):
            connection.close()
        os.unlink(self.path)


@pytest.fixture
def node(runtime_directory: Path) -> Iterator[Node]:
    node = Node(f"{runtime_directory}/descriptors.sock")
    yield node
    node.close()


@pytest.fixture
def loans(
    node: Node,
    page: ControlPage,
    interrupts: Interrupts,
    context: Context,
    cancelled: None,
) -> Iterator[Loans]:
    """The loans of a worker with task 7, whose cancellation is requested."""
    context.worker = WORKER
    page.note_left(1 << 30)
    loans = Loans(node.path, "", page, interrupts, press=bool)
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


@pytest.mark.parametrize("name", ["DescriptorSender", "DescriptorReceiver"])
def test_worker_connects_once_if_it_is_interrupted(
    name: str,
    node: Node,
    loans: Loans,
    segment: Segment,
    monkeypatch: pytest.MonkeyPatch,
    interrupts: Interrupts,
) -> None:
    """A second connection would be refused, and the next task would get no value."""
    kind: Callable[[socket.socket], object] = getattr(passing, name)

    def interrupt_and_make(sock: socket.socket) -> object:
        interrupt()
        return kind(sock)

    monkeypatch.setattr(passing, name, interrupt_and_make)
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        loans.pack(large())
    connected = node.accept()
    interrupts.entered = 8
    contents = Contents().in_segment(segment.id, segment.size, [(0, len(TEXT))])
    payload, descriptor = loans.borrow(pack(contents)), segment.share()
    assert DescriptorSender(connected).send(segment.id, descriptor)
    os.close(descriptor)
    opened, _ = payload.open()
    assert opened == TEXT
    assert not node.has_new_connection


def test_segment_of_an_interrupted_write_is_given_up(
    node: Node, loans: Loans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver gets no descriptor, which would keep the memory."""
    write = Segment.write

    def write_and_interrupt(segment: Segment, parts: Any) -> None:
        write(segment, parts)
        interrupt()

    monkeypatch.setattr(Segment, "write", write_and_interrupt)
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        loans.pack(large())
    assert not node.has_new_connection
    monkeypatch.undo()
    loans.pack(large())
    ((_, descriptor),) = DescriptorReceiver(node.accept()).read()
    os.close(descriptor)


@pytest.mark.parametrize("way", ["alone", "among several", "with others"])
def test_sent_payload_is_not_returned(
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
    assert loans.take_report() is None
    assert driver.next()


def test_payload_that_cannot_be_sent_is_returned(
    loans: Loans, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.loans = loans
    payload = loans.pack(large())
    assert isinstance(payload, Payload)
    number = payload.contents.segment
    monkeypatch.setattr(frames.encode, "__defaults__", (8,))
    with pytest.raises(SerializationError, match="limit of 8"):
        channel.send(Done(7, payload))
    assert loans.take_report() is None, "the payload may be sent in another way"
    del payload
    gc.collect()
    assert loans.take_report() == Returned((number,), (1,))
    assert loans.take_report() is None


@pytest.mark.parametrize("kind", ["Loan", "Written", "finalized"])
def test_dropped_loan_is_returned_during_an_interrupt(
    kind: str, loans: Loans, page: ControlPage
) -> None:
    """An interrupt in a finalizer would be lost, and the loan would not be returned."""
    loans.on_over = interrupter = Interrupter()
    if kind == "Loan":
        value: object = loans.own(-9)
    elif kind == "Written":
        value = loans.pack(large())
    else:
        value = Interrupter()
        weakref.finalize(value, loans.end, -9, 1)
    del value
    gc.collect()
    assert interrupter.is_called
    assert page.acknowledged(3) == 0, "the driver will ask again"
    assert loans.take_report() is not None
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        interrupt()


class Interrupter:
    """A callable that raises the signal."""

    is_called = False

    def __call__(self) -> None:
        self.is_called = True
        interrupt()
