"""The values of one node in shared memory: written, read and lent to workers.

`pack` makes the payloads of the program, `admit` receives the payloads of workers, and
`dispatch` prepares payloads for a worker. A payload keeps all its references alive.
Descriptors travel over a second socket (`DescriptorServer`), since asyncio's transports
cannot carry them. Only workers that use shared memory connect to this socket.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.linux.sockets import peer_credentials
from aiogpu.memory.mapping import Mappings
from aiogpu.memory.segment import Segment
from aiogpu.memory.segment_pool import SegmentPool
from aiogpu.runtime.descriptors import values_limit
from aiogpu.runtime.directories import NodeDirectory
from aiogpu.runtime.objects.segments import (
    ActorHold,
    BorrowerReferences,
    ObjectMemory,
    SharedSegment,
    is_short,
)
from aiogpu.runtime.objects.values import Value, find
from aiogpu.serialization.payload import Contents, Payload, is_compound, unpack
from aiogpu.serialization.references import SHARED_FROM, ActorReference, PickledValue
from aiogpu.wire.messages import (
    FIRST_SEGMENT,
    OWNER_BITS,
    ProtocolError,
    Recycle,
    descriptor_path,
)
from aiogpu.wire.messages import WARM_BYTES as WARM_OF_WORKER

if TYPE_CHECKING:
    from aiogpu.memory.control_page import ControlPage
    from aiogpu.runtime.connection import Peer
    from aiogpu.runtime.objects.segments import ActorRegister


DEEPEST: Final = 4
"""Most levels of payloads within payloads; aiogpu itself uses two, for several
results. The content is copied at each level."""


WARM: Final = 1 << 30
"""Bytes of segments that this process keeps for reuse."""


@dataclass(slots=True, eq=False)
class Borrower:
    """A process at the other end of a connection, to which values are lent.

    Attributes:
        id: unique among workers and programs.
        pid: its process id, 0 if unknown.
        peer: its connection, None before it is made and after it has ended.
        store: lends the references in its payloads.
        borrowers: its references, None before the first.
    """

    id: int
    pid: int = field(default=0, kw_only=True)
    peer: Peer | None = field(default=None, kw_only=True)
    store: Store | None = field(default=None, kw_only=True)
    borrowers: BorrowerReferences | None = field(default=None, kw_only=True)

    def borrow(self, payload: bytes) -> bytes:
        """Lend the references in a payload; return the payload to send."""
        return payload if self.store is None else self.store.dispatch(self, payload)


class Store:
    """The values of one node. Made for the running loop, and used only on that loop.

    Attributes:
        memory: the memory in use and its limit.
        clients: the programs that have joined the node, by id.
        descriptors: accepts connections for descriptors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, memory: ObjectMemory) -> None:
        self._workers: Mapping[int, Borrower] = {}
        self._actors: ActorRegister | None = None
        self.clients: dict[int, Borrower] = {}
        self.descriptors: DescriptorServer | None = None
        self.memory = memory
        self._loop = loop
        self._warm = SegmentPool(FIRST_SEGMENT + 1, WARM, lambda: memory.directory)
        self._mappings = Mappings(partial(self._do_soon, self._forget_mapping))
        self._mapped: dict[int, SharedSegment] = {}
        self._segments: weakref.WeakValueDictionary[int, SharedSegment] = (
            weakref.WeakValueDictionary()
        )
        self._named: weakref.WeakValueDictionary[int, Value] = (
            weakref.WeakValueDictionary()
        )  # with ids that workers and programs have chosen
        self._unused: deque[Callable[[], object]] = deque()

    def __repr__(self) -> str:
        return f"<Store {len(self._segments)} segments>"

    def serve(
        self,
        workers: Mapping[int, Borrower],
        page: ControlPage | None,
        actors: ActorRegister | None,
    ) -> None:
        """Lend to these workers, by id, and count handles to these actors.

        `page` is None once there are no workers any more.
        """
        self._workers, self._actors = workers, actors
        self.memory.show_on(page)

    def caller(self, identity: int) -> Borrower | None:
        """Return the worker or program with an id."""
        return self._workers.get(identity) or self.clients.get(identity)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload for an object that this program sends.

        Raises:
            SerializationError: the object is too large for a frame, and there is no
                shared memory.
            ObjectMemoryError: there is no room for the object.
        """
        values = tuple(handle.share() for handle in outgoing.handles)
        for value in (*values, *outgoing.references):
            if type(value) is not ActorReference:
                self._check(value)
        parts = tuple(
            part if type(part) is bytes else self.pack(part) for part in outgoing.parts
        )
        contents = Contents(
            stream=outgoing.stream,
            needs=tuple(value.id for value in values),
            places=outgoing.places,
            parts=parts,
            values=outgoing.values,
            returns=outgoing.returns,
            actors=outgoing.actors,
        )
        segment = shown = None
        if outgoing.is_large:
            if len(outgoing.stream) < SHARED_FROM:
                # The buffers may already lie in a mapped segment.
                shown = self._mappings.shown(outgoing.buffers)
            if shown is not None:
                segment = self._mapped[shown.segment]
                contents = contents.in_segment(*shown)
            else:
                segment, contents = self._write(outgoing, contents)
        parcel = Payload.of(contents, (segment, *outgoing.references), self, values)
        parcel.is_shown = shown is not None
        return parcel

    def _check(self, value: Any) -> None:
        """Raise `MisuseError` for a value of a node that was closed."""
        payload = value.payload
        if type(payload) is Payload and payload.source not in (None, self):
            from aiogpu.serialization.references import closed_node_error

            raise closed_node_error(value.name)

    def _write(
        self, outgoing: PickledValue, contents: Contents
    ) -> tuple[SharedSegment | None, Contents]:
        buffers, stream = outgoing.split()
        try:
            shared, spans = self._write_buffers(buffers)
        except OSError:
            # No descriptor, or no memory: send the buffers in the message.
            whole = tuple(map(bytes, outgoing.buffers))
            return None, contents._replace(buffers=whole)
        contents = contents._replace(stream=stream)
        return shared, contents.in_segment(shared.id, shared.size, spans)

    def _write_buffers(
        self, buffers: list[memoryview]
    ) -> tuple[SharedSegment, tuple[tuple[int, int], ...]]:
        """Write buffers to a segment; return the segment and the spans."""
        room = Segment.room_for(buffer.nbytes for buffer in buffers)
        is_scarce = room + self._warm.bytes_warm > self.memory.left
        segment = self._warm.take(room, is_scarce)
        try:
            spans = segment.write(buffers)
            descriptor = segment.share()
            if descriptor >= values_limit():
                # The remaining descriptors are for connections of workers.
                os.close(descriptor)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            shared = SharedSegment(segment.id, descriptor, segment.size)
            return self._register(shared), spans
        except BaseException:
            self._warm.discard(segment.id)
            raise

    def _register(self, shared: SharedSegment) -> SharedSegment:
        shared.counted = self.memory.take(shared.size if shared.is_memory else 0)
        shared.on_free = partial(self._do_soon, self._reclaim)
        self._segments[shared.id] = shared
        return shared

    def borrowers(self, caller: Borrower) -> BorrowerReferences:
        """Return the references of a worker or program."""
        if caller.borrowers is None:
            caller.borrowers = BorrowerReferences(self._loop, caller.id)
        return caller.borrowers

    def announce(self, caller: Borrower, identity: int) -> None:
        """Register a value that a worker names, if the value is new.

        The message that settles the value may be delayed by earlier output.
        """
        if self.find(identity) is None:
            value = self._named[identity] = Value("put", identity=identity)
            self.borrowers(caller).lend(value)

    def find(self, identity: int) -> Value | None:
        """Return the value with an id; None if it is not in use."""
        return self._named.get(identity) if identity < 0 else find(identity)

    def known(self, identity: int) -> Value:
        """Return the value with an id.

        Raises:
            ProtocolError: the value is not in use any more.
        """
        value = self.find(identity)
        if value is None:
            raise ProtocolError(f"the value {identity} is not in use any more")
        return value

    def admit(self, caller: Borrower, payload: bytes, depth: int = 0) -> bytes:
        """Receive a worker's payload; the returned payload holds its references.

        Args:
            caller: the sender.
            payload: the bytes received.
            depth: the number of payloads around this payload.

        Raises:
            ProtocolError: the payload contains an unknown reference.
        """
        if not is_compound(payload):
            return payload
        if depth > DEEPEST:
            raise ProtocolError(f"payloads are nested more than {DEEPEST} levels deep")
        contents = unpack(payload)
        segment = None
        if contents.segment:
            segment = self._segments.get(contents.segment)
            if segment is None:
                segment = self._adopt(caller, contents)
        values = tuple(map(self.known, contents.values))
        needs = tuple(map(self.known, contents.needs))
        actors = (ActorReference(id_, self._hold(id_)) for id_ in contents.actors)
        holds = (segment, *values, *actors)
        parcel = Payload.of(contents, holds, self, needs, payload)
        admit = partial(self.admit, caller, depth=depth + 1)
        parcel.parts = tuple(map(admit, contents.parts))
        return parcel

    def _adopt(self, caller: Borrower, contents: Contents) -> SharedSegment:
        shared = self._receive(caller, contents.segment)
        if not 0 < contents.size <= shared.size:
            raise ProtocolError(
                f"the segment {shared.id} has {shared.size} bytes, not {contents.size}"
            )
        shared.size = contents.size
        if shared.copy is not None:
            self._close_original(shared.id)
        return self._register(shared)

    def _receive(self, caller: Borrower, segment: int) -> SharedSegment:
        """Return a segment that a worker has written and sent."""
        if (segment - FIRST_SEGMENT) >> OWNER_BITS != caller.id:
            raise ProtocolError(f"the segment {segment} is not in use any more")
        borrowers = self.borrowers(caller)
        self.memory.use_warm(borrowers.warm.pop(segment, 0))
        if not borrowers.is_connected and self.descriptors is not None:
            self.descriptors.catch_up()
        return borrowers.receive(segment)

    def take_back(
        self, caller: Borrower, things: tuple[int, ...], counts: tuple[int, ...]
    ) -> None:
        """Take back things from a worker, each as often as counted.

        They may include segments that the worker wrote but never named. An empty
        message asks this process to read descriptors (`READ_DESCRIPTORS`).
        """
        if not things:
            self.borrowers(caller).read_descriptors()
        for unknown in self.borrowers(caller).take_back(things, counts):
            with suppress(ProtocolError):  # the worker has not sent it
                self._receive(caller, unknown)

    def dispatch(self, caller: Borrower, payload: bytes) -> bytes:
        """Lend the references in a payload; return the payload for the worker."""
        if type(payload) is not Payload:
            return payload
        parcel = filled(payload)
        self._lend(self.borrowers(caller), parcel)
        return parcel

    def _lend(self, borrowers: BorrowerReferences, parcel: Payload) -> None:
        for thing in parcel.holds:
            lent = self._hold(thing.id) if type(thing) is ActorReference else thing
            if isinstance(lent, SharedSegment | Value | ActorHold):
                borrowers.lend(lent)
        for part in parcel.parts:
            if type(part) is Payload:
                self._lend(borrowers, part)

    def _hold(self, actor: int) -> ActorHold | None:
        """Count one more holder of an actor; None if the actor is unknown."""
        if self._actors is None or not self._actors.hold(actor):
            return None
        return ActorHold(actor, self._actors)

    def lend_actor(self, caller: Borrower, actor: int) -> None:
        """Lend an actor to a worker that got a handle as part of a function."""
        hold = self._hold(actor)
        if hold is not None:
            self.borrowers(caller).lend(hold)

    def forget(
        self, borrowers: BorrowerReferences, error: Exception, is_all: bool
    ) -> None:
        """Drop the references of a caller that has ended.

        Args:
            borrowers: its references.
            error: the outcome of values that no other process can settle.
            is_all: whether the values of its child tasks fail as well.
        """
        for value in borrowers.own_values():
            if is_all or value.stop is None:
                value.settle(error)
        self.memory.use_warm(sum(borrowers.warm.values()))
        borrowers.warm.clear()
        borrowers.close()

    def views(self, contents: Contents) -> list[memoryview]:
        """Return the buffers of a payload, for this process alone."""
        segment = self._segments[contents.segment]
        flat = contents.spans
        spans = list(zip(flat[::2], flat[1::2], strict=True))
        # A mapping has a descriptor of its own up to Python 3.12.
        if segment.copy is None and is_short() and segment.keep_copy():
            # Count the copy of a file; a segment in memory is counted already.
            segment.counted = segment.counted or self.memory.take(segment.size)
            self._close_original(segment.id)
        if segment.copy is not None:
            return segment.views_of_copy(spans)
        self._mapped[segment.id] = segment
        views: list[memoryview] = self._mappings.views(
            segment.id, segment.fd, segment.size, spans
        )
        return views

    def _close_original(self, identity: int) -> None:
        """Tell the writer to close a segment of which this process has a copy."""
        owner = (identity - FIRST_SEGMENT) >> OWNER_BITS
        writer = self.caller(owner) if owner else None
        if not owner:
            self._warm.discard(identity)
        elif writer is not None and writer.peer is not None:
            writer.peer.send(Recycle((-identity,)))

    def _do_soon(self, action: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop; safe from `__del__` in any thread."""
        self._unused.append(partial(action, *arguments))
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._clean_up)

    def _clean_up(self) -> None:
        while self._unused:
            self._unused.popleft()()

    def _forget_mapping(self, identity: int) -> None:
        if not self._mappings.is_mapped(identity):
            self._mapped.pop(identity, None)

    def _reclaim(self, identity: int, counted: int, was_copy: bool) -> None:
        """Return a segment without readers to its writer, unless it was a copy."""
        self.memory.give_back(counted)
        if was_copy:
            return
        owner = (identity - FIRST_SEGMENT) >> OWNER_BITS
        if not owner:
            with suppress(KeyError):  # the store was closed
                self._warm.give_back(identity)
            return
        writer = self.caller(owner)
        if writer is not None and writer.peer is not None:
            warm = self.borrowers(writer).warm
            is_kept = sum(warm.values()) + counted <= WARM_OF_WORKER
            is_kept = is_kept and self.memory.keep_warm(counted)
            if is_kept:
                warm[identity] = counted
            writer.peer.send(Recycle((identity if is_kept else -identity,)))

    def close(self) -> None:
        """Release all segments; mapped segments stay until their readers have gone."""
        self._clean_up()
        self._warm.close()


def filled(parcel: Payload) -> Payload:
    """Return a copy of the payload with its values filled in."""
    if not parcel.needs:
        return parcel
    parts: tuple[Any, ...] = tuple(value.payload for value in parcel.needs)
    contents = parcel.contents._replace(parts=parts)
    return Payload.of(contents, parcel.holds, parcel.source)


_log: Final = logging.getLogger(__name__)


RETRY: Final = 0.1
"""Seconds until connections are accepted again after a failure to accept one."""


ID: Final = 8
"""Bytes of a worker's id, little-endian."""


WITHIN: Final = 10.0
"""Seconds in which a worker must send its id; only a stopped worker takes so long."""


class DescriptorServer:
    """Accepts connections for descriptors and hands them to `BorrowerReferences`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        directory: NodeDirectory,
        store: Store,
    ) -> None:
        """Listen in the directory.

        Raises:
            NodeStartError: the socket cannot be made.
        """
        self._loop = loop
        self._store = store
        self._greeting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._later: asyncio.TimerHandle | None = None
        path = descriptor_path(directory.path)
        self._serve(directory.listen(path))
        directory.renew(path, self._serve_anew)
        store.descriptors = self

    def _serve(self, listening: socket.socket) -> None:
        self._listening = listening
        listening.setblocking(False)
        self._listen()

    def _serve_anew(self, listening: socket.socket) -> None:
        """Listen at another socket: the file of the present socket was removed."""
        self.catch_up()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        self._serve(listening)

    def _listen(self) -> None:
        self._later = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> bool:
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            # No descriptor, or no memory: accept waiting connections later.
            _log.warning("! a worker cannot connect for shared memory yet: %s", error)
            self._loop.remove_reader(self._listening.fileno())
            if self._later is None:
                self._later = self._loop.call_later(RETRY, self._listen)
            return False
        connected.setblocking(False)
        if peer_credentials(connected).uid != os.geteuid():
            connected.close()
            return True
        late = self._loop.call_later(WITHIN, self._drop_late, connected)
        self._greeting[connected] = late
        self._loop.add_reader(connected.fileno(), partial(self._read_id, connected))
        return True

    def catch_up(self) -> None:
        """Accept and read now, without waiting for the loop.

        A message that names a segment may arrive first, over the other socket.
        """
        while self._accept():
            pass
        for connected in list(self._greeting):
            self._read_id(connected)

    def _drop_late(self, connected: socket.socket) -> None:
        """Close a connection that has not sent an id in time."""
        self._loop.remove_reader(connected.fileno())
        del self._greeting[connected]
        connected.close()

    def _read_id(self, connected: socket.socket) -> None:
        data = b""
        try:
            data = connected.recv(ID)
        except BlockingIOError:
            return
        except OSError:
            pass  # the worker has ended
        self._greeting.pop(connected).cancel()
        self._loop.remove_reader(connected.fileno())
        caller = self._store.caller(int.from_bytes(data, "little"))
        if caller is None or len(data) != ID:
            connected.close()
            return
        borrowers, pid = self._store.borrowers(caller), peer_credentials(connected).pid
        if borrowers.is_connected or (caller.pid and caller.pid != pid):
            _log.warning(
                "! refused shared memory to process %d, which claims to be number %d "
                "(process %d): a process may connect once, and only for itself",
                pid,
                caller.id,
                caller.pid,
            )
            connected.close()
            return
        borrowers.connect(connected)

    def close(self) -> None:
        """Stop accepting connections."""
        if self._later is not None:
            self._later.cancel()
        for late in self._greeting.values():
            late.cancel()
        for sock in (*self._greeting, self._listening):
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._greeting.clear()
