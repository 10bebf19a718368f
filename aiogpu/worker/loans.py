"""What this worker was lent, values and segments, and the segments that it writes.

Each payload that comes and names things counts as a loan of them. A loan ends when no
payload, no handle and no mapping in this process needs it any more; the driver is told
so at the next opportunity. What the worker writes itself it writes again when nobody
reads it any more, as the driver says.
"""

from __future__ import annotations

import os
from _thread import allocate_lock
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from aiogpu.memory.segment import spill_directory
from aiogpu.serialization.payload import Contents, Payload, is_compound, unpack
from aiogpu.serialization.references import SHARED_FROM, PickledValue
from aiogpu.wire.messages import (
    FIRST_SEGMENT,
    OWNER_BITS,
    WARM_BYTES,
    ChildItems,
    Recycle,
    Returned,
)
from aiogpu.worker.context import current
from aiogpu.worker.descriptors import Descriptors
from aiogpu.worker.loan import Loan, Written

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from aiogpu.memory.control_page import ControlPage
    from aiogpu.memory.mapping import Mappings, SegmentSpans
    from aiogpu.memory.segment import Segment
    from aiogpu.memory.segment_pool import SegmentPool
    from aiogpu.wire.messages import Message
    from aiogpu.worker.interrupts import Interrupts


class Loans:
    """See above. Made in the zygote; connects when it is first needed.

    Attributes:
        over: loans that have ended and of which the driver was not told.
        unnamed: segments that were written and of which the driver was not told yet.
        are_used: whether anything was ever lent to this process.
        on_over: told that a loan has ended, in whichever thread; None for nobody.
        press: has the driver read the descriptors that it was sent, soon: there is no
            room for more, and what would name them cannot be said before.
        descriptors: the way for those of shared memory.
    """

    def __init__(
        self,
        path: str,
        spill: str,
        page: ControlPage,
        interrupts: Interrupts,
        owner: int = 0,
    ) -> None:
        """Prepare.

        Args:
            path: of the socket for descriptors.
            spill: directory for values beyond the limit, "" for the system's choice.
            page: tells how much memory is left for values.
            interrupts: what must cut nothing of this in two.
            owner: id of the client whose process this is; 0 in a worker.
        """
        self.over: deque[tuple[int, int]] = deque()
        self.unnamed: set[int] = set()
        self.are_used = False
        self.on_over: Callable[[], object] | None = None
        self.press: Callable[[], object] = _nothing
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
        """What has come: its parcels as loans, and what concerns these taken in."""
        has_recycled = False
        for index, message in enumerate(messages):
            payload = getattr(message, "payload", None)
            if payload is not None:
                if is_compound(payload):
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
        things = [*contents.values]
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
        """A loan of what this process has just put; it counts as lent once."""
        with self._interrupts.if_open():
            # Half of a loan would complain of that as it goes.
            return self._note(identity)

    def loan(self, identity: int) -> Loan:
        """The loan of a value to which a handle is being unpickled."""
        return self._loans[identity]

    def end(self, identity: int, count: int) -> None:
        """A loan has ended: in whichever thread, maybe by the collector."""
        self.are_used = True
        self.over.append((identity, count))
        if self.on_over is not None:
            self.on_over()

    def name(self, message: Message) -> None:
        """The driver is being told what this message names."""
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
        """What the driver is to be told of loans that have ended; None for nothing."""
        if not self.over:
            return None
        ended: dict[int, int] = {}
        while self.over:
            identity, count = self.over.popleft()
            loan = self._loans.get(identity)
            if loan is not None:
                # It came again meanwhile: what is told as returned is closed here.
                loan.count += count
            else:
                ended[identity] = ended.get(identity, 0) + count
        with self._interrupts.if_open(), self._lock:
            # What nobody opened holds its segment as long as it is not read.
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
        """What this process has put itself; the kernel knows that it is read."""
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
            values=tuple(reference.id for reference in outgoing.references),
            returns=outgoing.returns,
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
        """Where it lies already, if it is what somebody has written to a segment."""
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
                self.descriptors.send(segment, self.press)
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


def _nothing() -> None:
    """Nobody can be told yet."""
