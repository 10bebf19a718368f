"""Cases of the fuzzer: bytes for one of aiogpu's readers, and their invariants.

Whatever comes, a reader gives messages that its peer may say, or raises the wire's own
error and takes no more. It never needs more steps than the bytes are worth, nor more
memory, and another reader works as before.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, get_type_hints

import aiogpu
from aiogpu.client.function_spec import Function
from aiogpu.client.spec_codec import load_spec
from aiogpu.memory.fd_passing import MOST, DescriptorReceiver
from aiogpu.serialization.payload import unpack
from aiogpu.wire.codec import from_fields, unpack_as
from aiogpu.wire.connection import (
    CLIENT,
    FROM_PEER,
    KEEPER,
    TO_PEER,
    WORKER,
    ZYGOTE,
    Connection,
    ConnectionState,
)
from aiogpu.wire.messages import TAGS, Bind, Hello, Message, ProtocolError

CORPUS: Final = Path(__file__).with_name("corpus")
NODE: Final = "node"
"""The end that accepts, whoever greets it."""
ROLES: Final = (ZYGOTE, KEEPER, WORKER, CLIENT)
"""The ends that connect."""
DESCRIPTORS: Final = "descriptors"
LATER: Final = 0x80
"""Marks a message after which the next one comes before they are read."""
LOADERS: Final[dict[str, Callable[[bytes], object]]] = {
    "parcel": unpack,
    "terms": partial(load_spec, function=Function(0, b"")),
    "grant": partial(unpack_as, Bind),
}
TARGETS: Final = (NODE, *ROLES, *LOADERS, DESCRIPTORS)

STEPS: Final = 1500
"""Lines of aiogpu's code that any case may take."""
STEPS_A_BYTE: Final = 30
STEPS_A_CHUNK: Final = 60
MEMORY: Final = 1 << 20
"""Bytes that any case may take."""
MEMORY_A_BYTE: Final = 200
"""An empty map is one byte of a frame, and an object of 64."""
AHEAD: Final = 1024 * 8
"""msgpack makes room for items that were announced before they come: in each of 1024
levels, and from 1.2.4 on for no more than 10,000 of them."""
MOST_AHEAD: Final = 11_000
_ROOTS: Final = tuple(
    os.path.dirname(aiogpu.__file__) + part
    for part in (
        "/wire/",
        "/serialization/payload",
        "/memory/fd_passing",
        "/client/spec_codec",
    )
)


class Case(NamedTuple):
    """Bytes for a reader.

    Attributes:
        target: which reader.
        cut: bytes that come at a time, 0 for all at once.
        data: for `DESCRIPTORS`, messages: how many descriptors, how many bytes, bytes.
    """

    target: str
    cut: int
    data: bytes

    def pack(self) -> bytes:
        """Encode a case as a file: a header in words, then the bytes."""
        return f"{self.target} {self.cut}\n".encode() + self.data

    @classmethod
    def unpack(cls, content: bytes) -> Case:
        """Undo `pack`."""
        head, _, data = content.partition(b"\n")
        target, cut = head.decode().split()
        return cls(target, int(cut), data)

    @property
    def chunks(self) -> list[bytes]:
        """Yield the bytes in chunks."""
        if not self.cut:
            return [self.data]
        starts = range(0, len(self.data), self.cut)
        return [self.data[start : start + self.cut] for start in starts]

    @property
    def steps(self) -> int:
        """The most lines of code that the case may execute."""
        chunks = STEPS_A_CHUNK * len(self.chunks)
        return STEPS + STEPS_A_BYTE * len(self.data) + chunks

    @property
    def memory(self) -> int:
        """The most bytes of memory that the case may take."""
        size = len(self.data)
        return MEMORY + MEMORY_A_BYTE * size + AHEAD * min(size, MOST_AHEAD)


def kept() -> dict[str, Case]:
    """Return the kept cases by file name."""
    paths = sorted(path for path in CORPUS.iterdir() if path.is_file())
    return {path.name: Case.unpack(path.read_bytes()) for path in paths}


SIMPLEST: Final[dict[object, object]] = {
    int: 1,
    str: "a",
    float: 0.5,
    bool: True,
    bytes: b"b",
    dict[str, str]: {"k": "v"},
    dict[str, float]: {"k": 0.5},
    dict[str, int]: {"k": 5},
    dict[str, tuple[int | str, ...]]: {"gpu": (0, "MIG-1")},
    tuple[int, ...]: (1, 2),
    tuple[str, ...]: ("a", "b"),
    tuple[bytes, ...]: (b"a", b""),
    bytes | None: None,
}


def example(kind: type[Message]) -> Message:
    """Make a message with the simplest value in each field."""
    return kind._make(SIMPLEST[hint] for hint in get_type_hints(kind).values())


class Step(NamedTuple):
    """A step of a case: a jump from line to line, or a result."""

    place: str
    before: object
    after: object


def run(case: Case) -> frozenset[Step]:
    """Read a case; gives what it has gone through.

    Raises:
        AssertionError: it breaks what a reader promises.
    """
    read = {**dict.fromkeys((NODE, *ROLES), _converse), DESCRIPTORS: _receive}
    with _watched() as watch:
        told = list(read.get(case.target, _load)(case))
    assert watch.steps <= case.steps, f"{watch.steps} steps, {case.steps} are allowed"
    assert watch.memory <= case.memory, f"{watch.memory} bytes of memory"
    told_of = {Step(case.target, None, _shape(each)) for each in told}
    return frozenset(watch.seen | told_of)


def _shape(told: str) -> str:
    """Return an error text without its varying parts."""
    return re.sub(r"\d+|'[^']*'|\([^)]*\)", "#", told)[:160]


def _converse(case: Case) -> Iterator[str]:
    is_node = case.target == NODE
    connection = Connection() if is_node else Connection(case.target)
    for chunk in case.chunks:
        was_open = connection.state is not ConnectionState.CLOSED
        try:
            messages = connection.receive(chunk)
        except ProtocolError as error:
            assert was_open, "one error ends it"
            assert connection.state is ConnectionState.CLOSED
            yield str(error)
            continue
        assert was_open or not messages, "it is closed"
        role = connection.peer.role if connection.peer else ""
        may = FROM_PEER.get(role, frozenset()) if is_node else TO_PEER[case.target]
        for message in messages:
            kind = type(message)
            assert kind in may or (kind is Hello and message is connection.peer)
            assert from_fields((TAGS[kind], *message)) == message
            yield kind.__name__
    assert connection.missing > 0 or connection.state is ConnectionState.CLOSED


def _load(case: Case) -> Iterator[str]:
    try:
        loaded: Any = LOADERS[case.target](case.data)
    except ProtocolError as error:
        yield str(error)
    else:
        yield type(loaded).__name__


def _receive(case: Case) -> Iterator[str]:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        receiver = DescriptorReceiver(ours)
        yield from _passed(case.data, receiver, theirs)
        receiver.close()
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"


def _passed(
    data: bytes, receiver: DescriptorReceiver, theirs: socket.socket
) -> Iterator[str]:
    while len(data) > 2:
        count, size = min(data[0], MOST), max(data[1] & ~LATER, 1)
        is_read = not data[1] & LATER
        said, data = data[2 : 2 + size], data[2 + size :]
        rights = array("i", [theirs.fileno()] * count)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
        theirs.sendmsg([said], control)
        if not is_read:
            continue
        try:
            pairs = receiver.read(socket.MSG_DONTWAIT)
        except (ProtocolError, OSError) as error:
            yield str(error)
            return
        for _, descriptor in pairs:
            os.close(descriptor)
        yield f"{min(len(pairs), 3)} of {min(count, 3)} descriptors"


class _Watch:
    """Traces the readers' code."""

    def __init__(self) -> None:
        self.seen: set[Step] = set()
        self.steps = 0
        self.memory = 0

    def enter(self, frame: FrameType, _what: str, _argument: object) -> Any:
        """Trace a frame if it belongs to a reader."""
        name = frame.f_code.co_filename
        if not name.startswith(_ROOTS):
            return None
        place, last = name.rpartition("aiogpu/")[2], 0

        def step(frame: FrameType, what: str, _argument: object) -> Any:
            nonlocal last
            if what == "line":
                self.steps += 1
                self.seen.add(Step(place, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step


@contextmanager
def _watched() -> Iterator[_Watch]:
    watch, before = _Watch(), sys.gettrace()
    tracemalloc.start()
    sys.settrace(watch.enter)
    try:
        yield watch
    finally:
        sys.settrace(before)
        watch.memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
