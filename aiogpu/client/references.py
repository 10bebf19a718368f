"""Values and segments of this process: what it was lent, writes, and gives to others.

A received payload names values, actors and a segment. Each of them counts as lent once
more (`Loan`). A loan ends when no payload, handle or mapping in this process needs it;
the driver is told at the next opportunity. A segment that this process has written is
reused when the driver says that nobody reads it any more.

Descriptors of segments travel over a socket of their own, which is connected on first
use. A descriptor may come before or after the message that names its segment, so it is
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
from aiogpu.errors import NodeClosedError
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


class Uncut(Protocol):
    """Defers interrupts while this process handles shared memory."""

    def if_open(self) -> AbstractContextManager[None]:
        """Defer interrupts in the block, if this thread can be interrupted at all."""
        ...

    def catch_up(self) -> None:
        """Raise the interrupt that was deferred, if there is one."""
        ...


class Loan:
    """One thing that was lent to this process. It is over when this object is.

    Attributes:
        id: of the thing.
        count: how often it came.
    """

    __slots__ = ("__weakref__", "_loans", "count", "id")

    def __init__(self, loans: Loans, identity: int, count: int = 1) -> None:
        self.id = identity
        self.count = count
        self._loans = loans

    def __repr__(self) -> str:
        return f"<Loan of {self.id}, {self.count} times>"

    def __del__(self) -> None:
        # Wherever the collector runs: in another thread, or amid user code.
        self._loans.end(self.id, self.count)


class Written:
    """A segment that this process has written; held by the payload that names it.

    The driver already has the segment's descriptor. If the payload is dropped unsent,
    the driver is told, or it would keep the segment for ever.

    Attributes:
        id: of the segment.
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
        over: loans that have ended, but whose end was not sent to the driver yet.
        unnamed: segments that were written, but not named in a message yet.
        are_used: whether anything was ever lent to this process.
        on_over: called when a loan has ended, in any thread; or None.
        descriptors: sends and receives the descriptors of segments.
    """

    def __init__(
        self,
        path: str,
        spill: str,
        page: ControlPage,
        interrupts: Uncut,
        press: Callable[[], object],
        owner: int = 0,
    ) -> None:
        """Prepare.

        Args:
            path: of the socket for descriptors.
            spill: directory for values beyond the limit, "" for the system's choice.
            page: tells how much memory is left for values.
            interrupts: defers interrupts while shared memory is handled.
            press: asks the driver to read the descriptors now. It is called if the
                socket is full: a segment is named only after its descriptor was sent.
            owner: id of the client whose process this is; 0 in a worker.
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
                if payload[:1] == MARK:  # as `is_compound`, without a call
                    taken = message._replace(payload=self.borrow(payload))  # type: ignore[call-arg]
                    messages[index] = taken
            elif type(message) is ChildItems:
                items = tuple(map(self.take_payload, message.payloads))
                messages[index] = message._replace(payloads=items)
            elif type(message) is Recycle:
                self._recycle(message.segments)
                has_recycled = True
        if has_recycled:
            return [one for one in messages if type(one) is not Recycle]
        return messages

    def take_payload(self, payload: bytes) -> bytes:
        """A payload that has come; a loan, if it refers to something."""
        return self.borrow(payload) if is_compound(payload) else payload

    def borrow(self, payload: bytes) -> Payload:
        """Take in a parcel: what it names was lent to this process, once more."""
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
        """Return the loan of a value that this process has put."""
        with self._interrupts.if_open():
            # The `__del__` of a half-made loan would raise.
            return self._note(identity)

    def loan(self, identity: int) -> Loan:
        """The loan of a value to which a handle is being unpickled."""
        return self._loans[identity]

    def find(self, identity: int) -> Loan | None:
        """The loan of something that may not have been lent."""
        return self._loans.get(identity)

    def with_actors(self, payload: bytes, actors: Sequence[ActorReference]) -> Payload:
        """A payload that has been made, and that keeps these actors alive as well."""
        ids = tuple(actor.id for actor in actors)
        if type(payload) is Payload:
            contents = payload.contents
            contents = contents._replace(actors=contents.actors + ids)
            packed = Payload.of(contents, (*payload.holds, *actors), self)
            packed.is_shown = payload.is_shown
            return packed
        return Payload.of(Contents(payload, actors=ids), tuple(actors), self)

    def end(self, identity: int, count: int) -> None:
        """A loan has ended: in whichever thread, maybe by the collector."""
        self.are_used = True
        self.over.append((identity, count))
        if self.on_over is not None:
            self.on_over()

    def name(self, message: Message) -> None:
        """Note that the driver learns of the segments that this message names."""
        for field in message:
            if type(field) is Payload:
                self._name(field)
            elif type(field) is tuple:
                for one in field:
                    if type(one) is Payload:
                        self._name(one)

    def _name(self, parcel: Payload) -> None:
        self.unnamed.discard(parcel.contents.segment)
        for part in parcel.parts:
            if type(part) is Payload:
                self._name(part)

    def tell(self) -> Returned | None:
        """Return the message that reports ended loans; None if no loan has ended."""
        if not self.over:
            return None
        ended: dict[int, int] = {}
        while self.over:
            identity, count = self.over.popleft()
            loan = self._loans.get(identity)
            if loan is not None:
                # It was lent again. To return it would close the descriptor here, so
                # the new loan takes over the count.
                loan.count += count
            else:
                ended[identity] = ended.get(identity, 0) + count
        with self._interrupts.if_open(), self._lock:
            # A descriptor that lies unread in the socket keeps its segment alive.
            self.descriptors.take_in()
            for identity in ended:
                self.descriptors.close(identity)
                if identity in self.unnamed:
                    self.unnamed.discard(identity)
                    self._own_segments().discard(identity)
        return Returned(tuple(ended), tuple(ended.values())) if ended else None

    def tell_to(self, say: Callable[[Message], object]) -> None:
        """Tell the driver of loans that have ended, if there are any."""
        returned = self.tell()
        if returned is not None:
            say(returned)

    def views(self, contents: Contents) -> list[memoryview]:
        """The buffers of a parcel, mapped and read-only; see `Source`."""
        identity, flat = contents.segment, contents.spans
        spans = list(zip(flat[::2], flat[1::2], strict=True))
        with self._interrupts.if_open(), self._lock:
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
        self, own: Segment, spans: list[tuple[int, int]]
    ) -> list[memoryview]:
        """Return what this process has put itself; the kernel knows that it is read."""
        assert self._mappings is not None, self
        descriptor = own.share()
        try:
            return self._mappings.views(own.id, descriptor, own.size, spans)
        finally:
            os.close(descriptor)

    def _on_unmapped(self, identity: int) -> None:
        if self._mappings is not None and not self._mappings.is_mapped(identity):
            self._mapped.pop(identity, None)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of what this process sends.

        Raises:
            SerializationError: it is too large for a frame, and there is no memory to
                share.
            ObjectMemoryError: there is no room for it.
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
        """Return where the buffers already lie in a segment, if they do."""
        if self._mappings is None or len(outgoing.stream) >= SHARED_FROM:
            return None
        shown = self._mappings.shown(outgoing.buffers)
        # Of what this process has put itself, the driver may know nothing any more.
        return shown if shown is not None and shown.segment in self._mapped else None

    def _write(
        self, outgoing: PickledValue, contents: Contents
    ) -> tuple[Written | None, Contents]:
        buffers, stream = outgoing.split()
        try:
            written, size, spans = self._written(buffers)
        except OSError:
            # No descriptor, or no memory: then it travels as a whole.
            whole = tuple(map(bytes, outgoing.buffers))
            return None, contents._replace(buffers=whole)
        contents = contents._replace(stream=stream)
        return written, contents.in_segment(written.id, size, spans)

    def _written(
        self, buffers: list[memoryview]
    ) -> tuple[Written, int, tuple[tuple[int, int], ...]]:
        """A segment with these, its bytes, and where they are; the driver has it."""
        from aiogpu.memory.segment import Segment

        room = Segment.room_for(buffer.nbytes for buffer in buffers)
        with self._interrupts.if_open(), self._lock:
            warm = self._own_segments()
            segment = warm.take(room, is_scarce=room > self._page.left())
            try:
                spans = segment.write(buffers)
                # It has taken its time; once the driver has it, it is too late.
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
        with self._interrupts.if_open(), self._lock:
            for identity in segments:
                if identity < 0:
                    self._own_segments().discard(-identity)
                else:
                    with suppress(KeyError):  # it was closed here
                        self._own_segments().give_back(identity)

    def move_in(self, connected: socket.socket, spill: str, page: ControlPage) -> None:
        """Take what a worker has from its start: `connected` is for descriptors."""
        self._spill, self._page = spill, page
        self.descriptors.use(connected)

    def close(self) -> None:
        """Give up this process's hold on all of it; what is mapped stays until read."""
        with self._interrupts.if_open(), self._lock:
            if self._warm is not None:
                self._warm.close()
            self.descriptors.close_all()

    def leave(self) -> None:
        """This process is a fork of the worker: it must not speak for it."""
        self.descriptors.leave()


REFUSED: Final = 5e-3
"""Seconds after which a descriptor is sent again that the kernel would not take."""


PATIENCE: Final = 10.0
"""Seconds in which a node has sent a client what it has spoken of."""


class Descriptors:
    """The socket for descriptors of segments; see the module.

    Made in the zygote; used by one thread at a time. No interrupt may land in its
    methods: the driver refuses a second connection.
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
        """The descriptor of a segment, waiting for it.

        Raises:
            NodeClosedError: the driver has gone, or this process has left it.
            OSError: it cannot be had, as where there are too many.
        """
        if segment not in self._arrived:
            connected = self._connected()
            poll = select.poll()
            poll.register(connected, select.POLLIN)
            # A client's loop must not stand still; a worker has nothing else to do.
            limit = PATIENCE * 1000 if self._owner else None
            while segment not in self._arrived:
                if not poll.poll(limit):
                    raise NodeClosedError(f"the node has not sent segment {segment}.")
                self.take_in()
        return self._arrived[segment]

    def take_in(self) -> None:
        """Take in what has come, without waiting; raises as `receive` does."""
        if self._socket is None:
            return
        try:
            found = self._receiver.read(socket.MSG_DONTWAIT)
        except EOFError:
            raise NodeClosedError("the node has gone.") from None
        for segment, descriptor in found:
            self.close(segment)  # it may have come before
            self._arrived[segment] = descriptor

    def close(self, segment: int) -> None:
        """Close a segment that is no longer used."""
        descriptor = self._arrived.pop(segment, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Close all segments."""
        for segment in list(self._arrived):
            self.close(segment)
        self.leave()

    def send(self, segment: Segment, press: Callable[[], object]) -> None:
        """Send the driver a descriptor; it is read with the segment's message.

        Args:
            segment: whose.
            press: called while there is no room: has the driver read what was sent.

        Raises:
            OSError: the driver has gone, or there are too many descriptors.
        """
        connected = self._connected()
        descriptor = segment.share()
        try:
            is_sent = self._sender.send(segment.id, descriptor)
            while not is_sent:
                press()
                # Not by `select` alone: it is writable where the kernel refuses.
                waited_for = [] if self._sender.is_refused else [connected]
                select.select([], waited_for, [], REFUSED)
                is_sent = self._sender.flush()
        finally:
            os.close(descriptor)

    def use(self, connected: socket.socket) -> None:
        """Take a socket that is connected: descriptors come ahead of what names them.

        Raises:
            OSError: the node has gone.
        """
        # Late: a worker that has to do with no shared memory needs none of it.
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
                "its node was closed, and nobody had looked at it before; await large "
                "values while their node is open."
            )
        if self._socket is None:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.connect(self._path)
                check_server(connected, self._path)
            except BaseException:
                connected.close()
                raise
            self.use(connected)
        assert self._socket is not None, self
        return self._socket

    def leave(self) -> None:
        """This process is a fork of the worker: it must not speak for it."""
        if self._socket is not None:
            self._socket.close()
