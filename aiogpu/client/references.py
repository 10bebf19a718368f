"""Loans and segments of this process: values that it borrows, writes and shares.

A received payload refers to values, actors and a segment. Each of them is then lent
once more to this process (`Loan`). A loan ends when no payload, handle or mapping in
this process needs it; the driver is informed at the next opportunity. A segment that
this process has written is reused when the driver reports that no process reads it.

Descriptors of segments travel over a separate socket, which is connected on first use.
A descriptor may arrive before or after the message that names its segment, so it is
matched by the segment's id.
"""

from __future__ import annotations

import os
import select
import socket
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakValueDictionary

from aiogpu.client.current import current
from aiogpu.errors import NodeClosedError, NodeDiedError
from aiogpu.linux.sockets import check_server
from aiogpu.memory.segment import spill_directory
from aiogpu.serialization.payload import MARK, Contents, Payload, is_compound, unpack
from aiogpu.serialization.references import SHARED_FROM, ActorReference, PickledValue
from aiogpu.wire.messages import (
    FIRST_SEGMENT,
    OWNER_BITS,
    WARM_BYTES,
    ChildItems,
    Message,
    Recycle,
    Returned,
)

if TYPE_CHECKING:
    from aiogpu.memory.control_page import ControlPage
    from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender
    from aiogpu.memory.mapping import Mappings, SegmentSpans
    from aiogpu.memory.segment import Segment
    from aiogpu.memory.segment_pool import SegmentPool


class InterruptShield(Protocol):
    """Defers interrupts while this process handles shared memory."""

    def shielded_if_open(self) -> AbstractContextManager[None]:
        """Context manager: defer interrupts, if this thread can be interrupted."""
        ...

    def catch_up(self) -> None:
        """Raise a deferred interrupt, if there is one."""
        ...


class Loan:
    """A value, actor or segment that is lent to this process; ends with this object.

    Attributes:
        id: id of the value, actor or segment.
        count: how often it was received.
    """

    __slots__ = ("__weakref__", "_loans", "count", "id")

    def __init__(self, loans: Loans, identity: int, count: int = 1) -> None:
        self.id = identity
        self.count = count
        self._loans = loans

    def __repr__(self) -> str:
        return f"<Loan of {self.id}, {self.count} times>"

    def __del__(self) -> None:
        # May run in any thread, and in the middle of user code.
        self._loans.end(self.id, self.count)


class Written:
    """A segment that this process has written; held by the payload that names it.

    The driver already has the segment's descriptor. If the payload is dropped unsent,
    the driver is informed, or it would keep the segment forever.

    Attributes:
        id: id of the segment.
    """

    __slots__ = ("_loans", "id")

    def __init__(self, loans: Loans, identity: int) -> None:
        self.id = identity
        self._loans = loans

    def __repr__(self) -> str:
        return f"<Written {self.id}>"

    def __del__(self) -> None:
        if self.id in self._loans.unnamed:
            self._loans.end(self.id, 1)


class Loans:
    """The loans, segments and mappings of this process; see the module.

    Made in the zygote; connects on first use.

    Attributes:
        over: ended loans whose end was not yet sent to the driver.
        unnamed: written segments that no sent message has named yet.
        are_used: something was lent to this process before.
        on_over: called in any thread when a loan has ended; or None.
        descriptors: sends and receives the descriptors of segments.
    """

    def __init__(
        self,
        path: str,
        spill: str,
        page: ControlPage,
        interrupts: InterruptShield,
        press: Callable[[], object],
        owner: int = 0,
    ) -> None:
        """Prepare; nothing is connected yet.

        Args:
            path: path of the socket for descriptors.
            spill: directory for values beyond the memory limit, "" for the system's
                choice.
            page: shows how much memory is left for values.
            interrupts: defers interrupts while shared memory is handled.
            press: requests that the driver reads the descriptors now. It is called if
                the socket is full, since a segment is named only after its descriptor
                was sent.
            owner: id of the client of this process; 0 in a worker.
        """
        self.over: deque[tuple[int, int]] = deque()
        self.unnamed: set[int] = set()
        self.are_used = False
        self.on_over: Callable[[], object] | None = None
        self._press = press
        self._owner = owner
        self._spill = spill
        self._page = page
        self._interrupts = interrupts
        self._lock = allocate_lock()
        self._loans: WeakValueDictionary[int, Loan] = WeakValueDictionary()
        self._mapped: dict[int, Loan] = {}
        self.descriptors = Descriptors(path, owner)
        self._mappings: Mappings | None = None
        self._warm: SegmentPool | None = None

    def take_in(self, messages: list[Message]) -> list[Message]:
        """Register the loans in received messages; handle and remove `Recycle`s."""
        has_recycled = False
        for index, message in enumerate(messages):
            payload = getattr(message, "payload", None)
            if payload is not None:
                if payload[:1] == MARK:  # like `is_compound`, without a call
                    taken = message._replace(payload=self.borrow(payload))  # type: ignore[call-arg]
                    messages[index] = taken
            elif type(message) is ChildItems:
                items = tuple(map(self.take_payload, message.payloads))
                messages[index] = message._replace(payloads=items)
            elif type(message) is Recycle:
                self._recycle(message.segments)
                has_recycled = True
        if has_recycled:
            return [kept for kept in messages if type(kept) is not Recycle]
        return messages

    def take_payload(self, payload: bytes) -> bytes:
        """Return a received payload; a compound one registers its loans."""
        return self.borrow(payload) if is_compound(payload) else payload

    def borrow(self, payload: bytes) -> Payload:
        """Open a compound payload, and register the loans that it brings."""
        contents = unpack(payload)
        things = [*contents.values, *contents.actors]
        if contents.segment:
            things.append(contents.segment)
        holds = tuple(map(self._note, things))
        parcel = Payload.of(contents, holds, self, encoded=payload)
        if contents.parts:
            parcel.parts = tuple(map(self.take_payload, contents.parts))
        return parcel

    def _note(self, identity: int) -> Loan:
        loan = self._loans.get(identity)
        if loan is None:
            self.are_used = True
            loan = self._loans[identity] = Loan(self, identity)
        else:
            loan.count += 1
        return loan

    def own(self, identity: int) -> Loan:
        """Return the loan of a value that this process has created."""
        with self._interrupts.shielded_if_open():
            # The `__del__` of a half-made loan would raise.
            return self._note(identity)

    def loan(self, identity: int) -> Loan:
        """Return the loan of a value while a handle to it is unpickled."""
        return self._loans[identity]

    def find(self, identity: int) -> Loan | None:
        """Return the loan of an id; None if it was not lent."""
        return self._loans.get(identity)

    def with_actors(self, payload: bytes, actors: Sequence[ActorReference]) -> Payload:
        """Return a payload that keeps these actors alive as well."""
        ids = tuple(actor.id for actor in actors)
        if type(payload) is Payload:
            contents = payload.contents
            contents = contents._replace(actors=contents.actors + ids)
            packed = Payload.of(contents, (*payload.holds, *actors), self)
            packed.is_shown = payload.is_shown
            return packed
        return Payload.of(Contents(payload, actors=ids), tuple(actors), self)

    def end(self, identity: int, count: int) -> None:
        """Record the end of a loan; may run in any thread, also by the collector."""
        self.are_used = True
        self.over.append((identity, count))
        if self.on_over is not None:
            self.on_over()

    def name(self, message: Message) -> None:
        """Record that a message is sent which names segments."""
        for field in message:
            if type(field) is Payload:
                self._name(field)
            elif type(field) is tuple:
                for part in field:
                    if type(part) is Payload:
                        self._name(part)

    def _name(self, parcel: Payload) -> None:
        self.unnamed.discard(parcel.contents.segment)
        for part in parcel.parts:
            if type(part) is Payload:
                self._name(part)

    def take_report(self) -> Returned | None:
        """Return the message that reports ended loans; None if no loan has ended."""
        if not self.over:
            return None
        ended: dict[int, int] = {}
        while self.over:
            identity, count = self.over.popleft()
            loan = self._loans.get(identity)
            if loan is not None:
                # It was lent again. A return would close the descriptor here, so the
                # new loan takes over the count.
                loan.count += count
            else:
                ended[identity] = ended.get(identity, 0) + count
        with self._interrupts.shielded_if_open(), self._lock:
            # An unread descriptor in the socket keeps its segment alive.
            self.descriptors.take_in()
            for identity in ended:
                self.descriptors.close(identity)
                if identity in self.unnamed:
                    self.unnamed.discard(identity)
                    self._own_segments().discard(identity)
        return Returned(tuple(ended), tuple(ended.values())) if ended else None

    def report_to(self, send: Callable[[Message], object]) -> None:
        """Report ended loans by `send`, if there are any."""
        returned = self.take_report()
        if returned is not None:
            send(returned)

    def views(self, contents: Contents) -> list[memoryview]:
        """Map the buffers of a payload; see `Source`."""
        identity, flat = contents.segment, contents.spans
        spans = list(zip(flat[::2], flat[1::2], strict=True))
        with self._interrupts.shielded_if_open(), self._lock:
            if self._mappings is None:
                from aiogpu.memory.mapping import Mappings

                self._mappings = Mappings(self._on_unmapped)
            own = None if self._warm is None else self._warm.find(identity)
            if own is not None:
                return self._own_views(own, spans)
            descriptor = self.descriptors.receive(identity)
            self._mapped[identity] = self._loans[identity]
            try:
                return self._mappings.views(identity, descriptor, contents.size, spans)
            except BaseException:
                self._on_unmapped(identity)
                raise

    def _own_views(
        self, segment: Segment, spans: list[tuple[int, int]]
    ) -> list[memoryview]:
        """Map a segment that this process has written; so the kernel sees a reader."""
        assert self._mappings is not None, self
        descriptor = segment.share()
        try:
            return self._mappings.views(segment.id, descriptor, segment.size, spans)
        finally:
            os.close(descriptor)

    def _on_unmapped(self, identity: int) -> None:
        if self._mappings is not None and not self._mappings.is_mapped(identity):
            self._mapped.pop(identity, None)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a value that this process sends.

        Raises:
            SerializationError: the value is too large for a frame, and no shared memory
                can be created.
            ObjectMemoryError: there is not enough memory for it.
        """
        needs = tuple(handle.share().id for handle in outgoing.handles)
        contents = Contents(
            stream=outgoing.stream,
            needs=needs,
            places=outgoing.places,
            parts=tuple(
                part if type(part) is bytes else self.pack(part)
                for part in outgoing.parts
            ),
            values=outgoing.values,
            returns=outgoing.returns,
            actors=outgoing.actors,
        )
        hold: Loan | Written | None = None
        shown = None
        if outgoing.is_large:
            shown = self._shown(outgoing)
            if shown is not None:
                contents = contents.in_segment(*shown)
                hold = self._mapped[shown.segment]
            else:
                hold, contents = self._write(outgoing, contents)
        holds = (*outgoing.handles, *outgoing.references, hold)
        parcel = Payload.of(contents, holds, self)
        parcel.is_shown = shown is not None
        return parcel

    def _shown(self, outgoing: PickledValue) -> SegmentSpans | None:
        """Return the buffers' place if they already are in a received segment."""
        if self._mappings is None or len(outgoing.stream) >= SHARED_FROM:
            return None
        shown = self._mappings.shown(outgoing.buffers)
        # The driver may have forgotten a segment that this process has written.
        return shown if shown is not None and shown.segment in self._mapped else None

    def _write(
        self, outgoing: PickledValue, contents: Contents
    ) -> tuple[Written | None, Contents]:
        buffers, stream = outgoing.split()
        try:
            written, size, spans = self._written(buffers)
        except OSError:
            # No descriptor or no memory: send the buffers inside the message.
            whole = tuple(map(bytes, outgoing.buffers))
            return None, contents._replace(buffers=whole)
        contents = contents._replace(stream=stream)
        return written, contents.in_segment(written.id, size, spans)

    def _written(
        self, buffers: list[memoryview]
    ) -> tuple[Written, int, tuple[tuple[int, int], ...]]:
        """Write a segment and send its descriptor; return it with size and spans."""
        from aiogpu.memory.segment import Segment

        room = Segment.room_for(buffer.nbytes for buffer in buffers)
        with self._interrupts.shielded_if_open(), self._lock:
            warm = self._own_segments()
            segment = warm.take(room, is_scarce=room > self._page.left())
            try:
                spans = segment.write(buffers)
                # The copy may have taken long; after the send it is too late.
                self._interrupts.catch_up()
                self.descriptors.send(segment, self._press)
            except BaseException:
                warm.discard(segment.id)
                self.end(segment.id, 1)  # the driver may count it as warm
                raise
            self.unnamed.add(segment.id)
            return Written(self, segment.id), segment.size, spans

    def _own_segments(self) -> SegmentPool:
        if self._warm is None:
            from aiogpu.memory.segment_pool import SegmentPool

            owner = self._owner or current.worker
            first = FIRST_SEGMENT + (owner << OWNER_BITS) + 1
            self._warm = SegmentPool(first, WARM_BYTES, self._directory)
        return self._warm

    def _directory(self) -> str:
        return self._spill or spill_directory()

    def _recycle(self, segments: tuple[int, ...]) -> None:
        with self._interrupts.shielded_if_open(), self._lock:
            for identity in segments:
                if identity < 0:
                    self._own_segments().discard(-identity)
                else:
                    with suppress(KeyError):  # it was closed in this process
                        self._own_segments().give_back(identity)

    def connect(self, connected: socket.socket, spill: str, page: ControlPage) -> None:
        """Set the node's facts, which a worker has from its start.

        Args:
            connected: socket for descriptors.
            spill: directory for values beyond the memory limit, "" for the system's
                choice.
            page: shows how much memory is left for values.
        """
        self._spill, self._page = spill, page
        self.descriptors.use(connected)

    def close(self) -> None:
        """Close all segments and the socket; mappings stay while they are used."""
        with self._interrupts.shielded_if_open(), self._lock:
            if self._warm is not None:
                self._warm.close()
            self.descriptors.close_all()

    def leave(self) -> None:
        """Close the socket in a fork, which must not send for the worker."""
        self.descriptors.leave()


REFUSED: Final = 5e-3
"""Seconds after which a descriptor that the kernel refused is sent again."""


PATIENCE: Final = 10.0
"""Seconds that a client waits for a segment's descriptor."""


class Descriptors:
    """The socket for descriptors of segments; see the module.

    Made in the zygote; used by one thread at a time. No interrupt may land in its
    methods, since the driver refuses a second connection.
    """

    def __init__(self, path: str, owner: int = 0) -> None:
        self._path = path
        self._owner = owner
        self._arrived: dict[int, int] = {}
        self._socket: socket.socket | None = None
        self._sender: DescriptorSender
        self._receiver: DescriptorReceiver

    def __repr__(self) -> str:
        return f"<Descriptors of {len(self._arrived)} segments>"

    def receive(self, segment: int) -> int:
        """Wait for the descriptor of a segment.

        Raises:
            NodeClosedError: the driver has gone, or this process has left the node.
            OSError: the kernel refuses a descriptor, for example because of the limit.
        """
        if segment not in self._arrived:
            connected = self._connected()
            poll = select.poll()
            poll.register(connected, select.POLLIN)
            # A client must not block its loop forever; a worker has nothing else to do.
            limit = PATIENCE * 1000 if self._owner else None
            while segment not in self._arrived:
                if not poll.poll(limit):
                    raise NodeClosedError(f"the node has not sent segment {segment}.")
                self.take_in()
        return self._arrived[segment]

    def take_in(self) -> None:
        """Read arrived descriptors, without waiting; raises like `receive`."""
        if self._socket is None:
            return
        try:
            arrived = self._receiver.read(socket.MSG_DONTWAIT)
        except EOFError:
            raise NodeClosedError("the node has gone.") from None
        for segment, descriptor in arrived:
            self.close(segment)  # it may have arrived before
            self._arrived[segment] = descriptor

    def close(self, segment: int) -> None:
        """Close the descriptor of a segment that is no longer used."""
        descriptor = self._arrived.pop(segment, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Close all descriptors and the socket."""
        for segment in list(self._arrived):
            self.close(segment)
        self.leave()

    def send(self, segment: Segment, press: Callable[[], object]) -> None:
        """Send a segment's descriptor to the driver, which reads it with the message.

        Args:
            segment: the segment.
            press: called while the socket is full; makes the driver read it.

        Raises:
            OSError: the driver has gone, or there are too many descriptors.
        """
        connected = self._connected()
        descriptor = segment.share()
        try:
            is_sent = self._sender.send(segment.id, descriptor)
            while not is_sent:
                press()
                # Not by `select` alone: the socket stays writable when the kernel
                # refuses.
                waited_for = [] if self._sender.is_refused else [connected]
                select.select([], waited_for, [], REFUSED)
                is_sent = self._sender.flush()
        finally:
            os.close(descriptor)

    def use(self, connected: socket.socket) -> None:
        """Use a connected socket for descriptors.

        Raises:
            OSError: the node has gone.
        """
        # Late: a worker that uses no shared memory does not need it.
        from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender

        owner = self._owner or current.worker
        try:
            connected.sendall(owner.to_bytes(8, "little"))
        except BaseException:
            connected.close()
            raise
        self._sender = DescriptorSender(connected)
        self._receiver = DescriptorReceiver(connected)
        self._socket = connected

    def _connected(self) -> socket.socket:
        if self._socket is not None and self._socket.fileno() < 0:
            raise NodeClosedError(
                "its node was closed before the value was read. Await large values "
                "while their node is open."
            )
        if self._socket is None:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.connect(self._path)
                check_server(connected, self._path)
            except FileNotFoundError as error:
                connected.close()
                raise NodeDiedError(
                    f"large values cannot be passed: {self._path}, a socket of the "
                    f"running node, was removed, perhaps by a cleaner of /tmp. The "
                    f"node makes it anew when it starts the next worker."
                ) from error
            except BaseException:
                connected.close()
                raise
            self.use(connected)
        assert self._socket is not None, self
        return self._socket

    def leave(self) -> None:
        """Close the socket in a fork, which must not send for the worker."""
        if self._socket is not None:
            self._socket.close()
