"""Passes descriptors to another process over a Unix socket, each with a number.

A message is n numbers, eight bytes each, little-endian, with n descriptors
(`SCM_RIGHTS`, unix(7)). The bytes of a message may arrive in pieces; its descriptors
arrive with its first byte, and both keep their order. So the n-th number belongs to the
n-th descriptor.
"""

from __future__ import annotations

import errno
import os
import socket
from array import array
from collections import deque
from struct import Struct
from typing import Final

from aiogpu.wire.messages import ProtocolError

MOST: Final = 253
"""Descriptors that a message can carry: SCM_MAX_FD of Linux."""

_READS: Final = 32
"""Messages that one `DescriptorReceiver.read` takes, so that other sockets get a
turn."""

_number: Final = Struct("<Q")
_int: Final = Struct("i")


class DescriptorSender:
    """Sends descriptors, never waiting for the peer. Used by one thread at a time.

    Attributes:
        is_refused: the last `flush` ended because this user's processes have too many
            descriptors in flight (ETOOMANYREFS, `RLIMIT_NOFILE`). The socket may still
            be writable: try again when receivers have read some.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Begin to send.

        Args:
            sock: connected, AF_UNIX and SOCK_STREAM, blocking or not. The caller closes
                it.
        """
        self.is_refused = False
        self._sock = sock
        # Numbers and copies of descriptors that could not be sent at once.
        self._queue: deque[tuple[bytes, int]] = deque()
        # The rest of a message whose descriptors have been sent.
        self._rest = b""

    @property
    def waiting(self) -> int:
        """The number of queued descriptors."""
        return len(self._queue)

    def send(self, number: int, fd: int) -> bool:
        """Send a descriptor now, or queue a copy of it; the caller may close its own.

        Args:
            number: the descriptor's number for the peer, 0 to 2**64 - 1.
            fd: the descriptor.

        Returns:
            True if nothing is left to `flush`.

        Raises:
            OSError: the peer is gone (EPIPE, ECONNRESET), or this process has too many
                descriptors for a copy (EMFILE): then nothing is queued.
        """
        packed = _number.pack(number)
        if not self._queue and self._send_rest() and self._send([(packed, fd)]):
            return not self._rest
        self._queue.append((packed, os.dup(fd)))
        return False

    def flush(self) -> bool:
        """Send as much of the queue as the socket takes now.

        Returns:
            True if nothing is left. If False, try again when the socket is writable;
            but see `is_refused`.

        Raises:
            OSError: the peer is gone; the queue can only be closed.
        """
        self.is_refused = False
        while self._send_rest() and self._queue:
            # One message at most: copies are closed when they have been sent.
            batch = [self._queue[place] for place in range(min(MOST, self.waiting))]
            if not self._send(batch):
                return False
            for _, fd in batch:
                self._queue.popleft()
                os.close(fd)
        return not self._rest

    def close(self) -> None:
        """Close the queued descriptors without sending them."""
        while self._queue:
            os.close(self._queue.popleft()[1])

    def _send(self, batch: list[tuple[bytes, int]]) -> bool:
        """Send one message, at least its first byte; False if the socket is full."""
        numbers = b"".join([packed for packed, _ in batch])
        fds = array("i", [fd for _, fd in batch])
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        sent = self._try(numbers, control)
        if sent:
            self._rest = numbers[sent:]
        return sent > 0

    def _send_rest(self) -> bool:
        while self._rest:
            sent = self._try(self._rest, [])
            if not sent:
                return False
            self._rest = self._rest[sent:]
        return True

    def _try(self, data: bytes, control: list[tuple[int, int, array[int]]]) -> int:
        """Send without waiting; return the number of bytes that the socket took."""
        try:
            return self._sock.sendmsg(
                [data], control, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self.is_refused = True
            return 0


class DescriptorReceiver:
    """Receives from a `DescriptorSender`. Used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        """Begin to receive.

        Args:
            sock: like the sender's. The caller closes it.
        """
        self._sock = sock
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self._is_out_of_step = False

    def read(self, flags: int = 0, most: int = _READS) -> list[tuple[int, int]]:
        """Return the numbers and descriptors that have arrived, in order.

        Waits for the first message if the socket blocks, and for no other. The list is
        empty if no whole number has arrived. It is incomplete if very many have arrived
        (the socket stays readable). The caller closes each descriptor; programs that
        the caller starts inherit none.

        Args:
            flags: flags of recv(2) for the first message, such as
                `socket.MSG_DONTWAIT`.
            most: number of messages to take at most.

        Raises:
            EOFError: the peer is gone, and all complete messages were returned.
            OSError: this process has too many descriptors (EMFILE), so some are lost,
                and numbers cannot be matched any more. All received descriptors are
                closed; the socket is unusable.
            ProtocolError: the peer sent numbers without descriptors, or descriptors
                without numbers. The socket is unusable.
        """
        pairs: list[tuple[int, int]] = []
        for _ in range(most):
            try:
                is_open = self._receive(flags)
                pairs += self._matched()
            except BlockingIOError:
                break
            except (OSError, ProtocolError):
                for _, fd in pairs:
                    os.close(fd)
                self._is_out_of_step = True
                self.close()
                raise
            if not is_open:
                if pairs:
                    break
                self.close()
                raise EOFError("the peer closed the socket for descriptors")
            flags |= socket.MSG_DONTWAIT
        return pairs

    def close(self) -> None:
        """Close the descriptors whose numbers have not completely arrived."""
        self._bytes.clear()
        while self._fds:
            os.close(self._fds.popleft())

    def _receive(self, flags: int) -> bool:
        """Receive one message or a part of it; False if the peer is gone."""
        if self._is_out_of_step:
            raise ProtocolError(
                "descriptors were lost; numbers cannot be matched any more"
            )
        try:
            data, control, status, _ = self._sock.recvmsg(
                MOST * _number.size,
                socket.CMSG_SPACE(MOST * _int.size),
                flags | socket.MSG_CMSG_CLOEXEC,
            )
        except ConnectionResetError:
            return False
        for level, kind, content in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) // _int.size * _int.size
                self._fds.extend(fd for (fd,) in _int.iter_unpack(content[:whole]))
        self._bytes += data
        if status & socket.MSG_CTRUNC:
            most = os.sysconf("SC_OPEN_MAX")
            raise OSError(
                errno.EMFILE,
                f"descriptors of shared memory were lost: process {os.getpid()} may "
                f"have {most} open files (RLIMIT_NOFILE); raise the limit "
                f"(ulimit -n), or keep fewer large values at a time",
            )
        return bool(data)

    def _matched(self) -> list[tuple[int, int]]:
        count = len(self._bytes) // _number.size
        if count > len(self._fds):
            raise ProtocolError(
                f"{count} numbers came with only {len(self._fds)} descriptors"
            )
        if len(self._fds) - count > MOST:
            # At most one message has incomplete numbers.
            raise ProtocolError(
                f"{len(self._fds)} descriptors came with only {count} numbers"
            )
        whole = bytes(self._bytes[: count * _number.size])
        del self._bytes[: count * _number.size]
        return [
            (number, self._fds.popleft()) for (number,) in _number.iter_unpack(whole)
        ]
