"""Descriptors that are passed over a socket, each with a number."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiogpu.memory.fd_passing import MOST, DescriptorReceiver, DescriptorSender
from aiogpu.wire.messages import ProtocolError

Pairs = list[tuple[int, int]]


class Ends:
    """A sender, a receiver and their sockets."""

    def __init__(self) -> None:
        self.one, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.other.setblocking(False)
        self.sender = DescriptorSender(self.one)
        self.receiver = DescriptorReceiver(self.other)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.one.close()
        self.other.close()

    def fill(self) -> int:
        """Send until the socket is full; return how many were sent or queued."""
        sent = 1
        with file_with() as fd:
            while self.sender.send(sent, fd):
                sent += 1
        return sent


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@contextmanager
def file_with(text: bytes = b"") -> Iterator[int]:
    """A descriptor of a file with this text."""
    fd = os.memfd_create("aiogpu-test", os.MFD_CLOEXEC)
    os.pwrite(fd, text, 0)
    try:
        yield fd
    finally:
        os.close(fd)


def texts(pairs: Pairs) -> list[tuple[int, bytes]]:
    """Return the numbers with the texts of the files, and close the descriptors."""
    numbered_texts = [(number, os.pread(fd, 100, 0)) for number, fd in pairs]
    for _, fd in pairs:
        os.close(fd)
    return numbered_texts


def numbered(first: int, count: int) -> list[tuple[int, bytes]]:
    return [(number, b"%d" % number) for number in range(first, first + count)]


def send(sender: DescriptorSender, first: int, count: int) -> None:
    for number, text in numbered(first, count):
        with file_with(text) as fd:
            sender.send(number, fd)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_message_carries_as_many_descriptors_as_the_kernel_allows(ends: Ends) -> None:
    sent = ends.fill()
    send(ends.sender, sent + 1, MOST + 10)
    while ends.sender.waiting > MOST + 10:
        texts(ends.receiver.read())
        ends.sender.flush()
    sizes = []
    while not ends.sender.flush() or not sizes or sizes[-1]:
        pairs = ends.receiver.read()
        sizes.append(len(pairs))
        texts(pairs)
    assert max(sizes) >= MOST


# Partial messages


class Cut:
    """A socket that sends and receives parts of messages of the given sizes."""

    def __init__(self, sock: socket.socket, sizes: list[int]) -> None:
        self.sock = sock
        self.sizes = sizes
        self.calls = 0

    def _size(self) -> int:
        self.calls += 1
        return self.sizes[self.calls % len(self.sizes)]

    def sendmsg(self, data: list[bytes], control: list[object], flags: int) -> int:
        size = self._size()
        if not size:
            raise BlockingIOError(errno.EAGAIN, "full")
        return self.sock.sendmsg([data[0][:size]], control, flags)

    def recvmsg(self, size: int, control: int, flags: int) -> object:
        return self.sock.recvmsg(min(size, self._size()), control, flags)


@pytest.mark.parametrize(
    ("sizes", "reads"),
    [([1], [4000]), ([3], [5]), ([7, 0, 1], [13, 2]), ([0, 9], [1]), ([20, 5], [5])],
)
def test_cut_messages_are_joined(
    ends: Ends, sizes: list[int], reads: list[int]
) -> None:
    ends.sender._sock = Cut(ends.one, sizes)
    ends.receiver._sock = Cut(ends.other, reads)
    received: Pairs = []
    for number, text in numbered(1, 30):
        with file_with(text) as fd:
            ends.sender.send(number, fd)
        received += ends.receiver.read()
    while not ends.sender.flush():
        received += ends.receiver.read()
    while len(received) < 30:
        received += ends.receiver.read()
    assert texts(received) == numbered(1, 30)


# End of the peer


def test_end_of_the_peer_is_noticed_after_its_last_message(ends: Ends) -> None:
    """Also if the peer left bytes unread."""
    ends.other.send(b"never read")
    send(ends.sender, 1, 3)
    ends.one.close()
    assert texts(ends.receiver.read()) == numbered(1, 3)
    for _ in range(2):
        with pytest.raises(EOFError):
            ends.receiver.read()


def test_send_to_a_closed_peer_is_an_error(ends: Ends) -> None:
    sent = ends.fill()
    ends.other.close()
    with pytest.raises(BrokenPipeError):
        ends.sender.flush()
    assert ends.sender.waiting == 1
    ends.sender.close()
    assert sent > 1
    with file_with() as fd, pytest.raises(BrokenPipeError):
        ends.sender.send(1, fd)
    assert ends.sender.waiting == 0


# Limits and faults


@contextmanager
def open_files(spare: int) -> Iterator[None]:
    """Allow `spare` more descriptors to be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = [os.open("/dev/null", os.O_RDONLY)]
    # Take every number below the limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds[0] + 60, before[1]))
    try:
        while True:
            try:
                fds.append(os.dup(fds[0]))
            except OSError:
                break
        for _ in range(spare):
            os.close(fds.pop())
        yield
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("spare", [0, 4])
@pytest.mark.parametrize("is_one_message", [True, False])
def test_too_many_open_files_is_an_error_and_leaves_no_descriptors(
    ends: Ends, spare: int, is_one_message: bool
) -> None:
    if is_one_message:
        ends.sender._sock = Cut(ends.one, [0])
    send(ends.sender, 1, 8)
    ends.sender._sock = ends.one
    assert ends.sender.flush()
    with open_files(spare):
        with pytest.raises(OSError, match=r"RLIMIT_NOFILE.*ulimit -n") as caught:
            ends.receiver.read()
        assert caught.value.errno == errno.EMFILE
        # All received descriptors were closed.
        for fd in [os.open("/dev/null", os.O_RDONLY) for _ in range(spare)]:
            os.close(fd)
    with pytest.raises(ProtocolError, match="lost"):
        ends.receiver.read()


def test_descriptor_that_cannot_be_queued_is_refused_at_once(ends: Ends) -> None:
    ends.fill()
    with file_with() as fd, open_files(0), pytest.raises(OSError, match="open files"):
        ends.sender.send(7, fd)
    for number in (-1, 2**64):
        with file_with() as fd, pytest.raises(struct.error):
            ends.sender.send(number, fd)
    assert ends.sender.waiting == 1


def test_numbers_without_descriptors_are_refused(ends: Ends) -> None:
    before = open_descriptors()
    send(ends.sender, 1, 3)
    ends.one.send(bytes(8))
    with pytest.raises(ProtocolError, match="numbers came with only 0"):
        ends.receiver.read()
    assert open_descriptors() == before
    with pytest.raises(ProtocolError, match="cannot be matched"):
        ends.receiver.read()


def test_descriptors_without_numbers_are_refused(ends: Ends) -> None:
    before = open_descriptors()
    with file_with() as fd:
        for _ in range(3):
            socket.send_fds(ends.one, [b"\0"], [fd] * MOST)
    with pytest.raises(ProtocolError, match=r"\d+ descriptors came with only 0 numb"):
        ends.receiver.read()
    assert open_descriptors() == before


def test_sender_waits_when_the_kernel_refuses_more_descriptors(ends: Ends) -> None:
    real = ends.one

    class Refusing:
        def sendmsg(self, *_: object) -> int:
            raise OSError(errno.ETOOMANYREFS, "Too many references")

    ends.sender._sock = Refusing()
    send(ends.sender, 1, 2)
    assert not ends.sender.flush()
    assert ends.sender.is_refused
    assert ends.sender.waiting == 2
    ends.sender._sock = real
    assert ends.sender.flush()
    assert not ends.sender.is_refused
    assert texts(ends.receiver.read()) == numbered(1, 2)
