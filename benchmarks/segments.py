"""What shared memory costs beside the bytes: `python -m benchmarks.segments`.

By itself, without a node: one process writes, a forked one reads every page and says
so. Each figure is the median of its blocks; the ways take turns, block by block.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np

from aiogpu.linux.sockets import keep_pages
from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender
from aiogpu.memory.mapping import Mappings
from aiogpu.memory.segment import Segment
from aiogpu.memory.segment_pool import SegmentPool
from aiogpu.wire.codec import FrameReader, encode
from aiogpu.wire.messages import Done

LARGE: Final = 100_000_000
SIZES: Final = [1 << power for power in range(14, 23)] + [LARGE]
BLOCKS: Final = 15
A_PAGE: Final = mmap.PAGESIZE // 8
POPULATED: Final = mmap.MAP_SHARED | mmap.MAP_POPULATE
Array = np.ndarray[Any, np.dtype[np.uint64]]
Timed = Callable[[], float]


class Reader:
    """The other process: reads whatever comes, every page of it, and says so."""

    def __init__(self) -> None:
        self.frames, frames = socket.socketpair()
        self.descriptors, descriptors = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.frames.close()
            self.descriptors.close()
            _serve(frames, descriptors)
        frames.close()
        descriptors.close()
        self.sender = DescriptorSender(self.descriptors)
        self.warm = SegmentPool(1, 1 << 30, lambda: None)

    def close(self) -> None:
        """End it."""
        self.frames.close()
        self.descriptors.close()
        os.waitpid(self.pid, 0)
        self.warm.close()

    def by_frame(self, array: Array) -> None:
        """Send the bytes."""
        payload = pickle.dumps((None, array), protocol=5)
        self.frames.sendall(encode(Done(0, payload)))
        self.frames.recv(1)

    def by_segment(self, array: Array, is_warm: bool) -> None:
        """Write them once, and send the descriptor."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        room = Segment.room_for(map(len, raw))
        segment = self.warm.take(room) if is_warm else Segment.create(0, room)
        spans = segment.write(raw)
        fd = segment.share()
        self.sender.send(segment.id, fd)
        os.close(fd)
        parcel = pickle.dumps(((segment.id, segment.size, spans, pickled), None))
        self.frames.sendall(encode(Done(1, parcel)))
        self.frames.recv(1)
        if not is_warm:
            segment.close()
        elif not self.warm.give_back(segment.id):
            raise RuntimeError("the segment is still read")


def _serve(frames: socket.socket, descriptors: socket.socket) -> None:
    reader, receiver = FrameReader(), DescriptorReceiver(descriptors)
    mappings = Mappings(lambda segment: None)
    while data := frames.recv(max(1 << 18, min(reader.missing, 1 << 26))):
        for message in reader.feed(data):
            if not isinstance(message, Done):
                raise TypeError(f"{message} is not what was sent")
            parcel, array = pickle.loads(message.payload)
            if parcel is not None:
                number, size, spans, pickled = parcel
                [(received, fd)] = receiver.read()
                views = mappings.views(received, fd, size, spans)
                os.close(fd)
                array = pickle.loads(pickled, buffers=views)
                del views
                if received != number:
                    raise RuntimeError("another segment's descriptor came")
            array[::A_PAGE].sum()
            del array
            frames.sendall(b".")
    os._exit(0)


def timed(act: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = perf_counter()
    act()
    return perf_counter() - started


def memory_ways(source: memoryview) -> dict[str, Timed]:
    """Writing and reading as much within one process."""
    target = bytearray(len(source))
    kept = Segment.create(1, len(source))
    kept.write([source])
    kept.write([source])

    def memcpy() -> None:
        memoryview(target)[:] = source

    def cold() -> float:
        started = perf_counter()
        segment = Segment.create(2, len(source))
        segment.write([source])
        took = perf_counter() - started
        segment.close()
        return took

    def faulted(flags: int) -> float:
        fd = os.memfd_create("aiogpu-benchmark")
        os.ftruncate(fd, kept.size)
        started = perf_counter()
        with mmap.mmap(fd, kept.size, flags) as mapping:
            os.close(fd)
            mapping[: len(source)] = source
            return perf_counter() - started

    def read(flags: int) -> None:
        with mmap.mmap(kept.fd, kept.size, flags, mmap.PROT_READ) as mapping:
            np.frombuffer(mapping, np.uint64)[::A_PAGE].sum()

    return {
        "memcpy": lambda: timed(memcpy),
        "write, warm": lambda: timed(lambda: kept.write([source])),
        "write, cold (write(2))": cold,
        "write, cold (faults)": lambda: faulted(mmap.MAP_SHARED),
        "write, cold (MAP_POPULATE)": lambda: faulted(POPULATED),
        "map, read, unmap (faults)": lambda: timed(lambda: read(mmap.MAP_SHARED)),
        "map, read, unmap (MAP_POPULATE)": lambda: timed(lambda: read(POPULATED)),
    }


def passing_ways(reader: Reader, array: Array) -> dict[str, Timed]:
    """Bringing an array to the other process."""
    return {
        "frame": lambda: timed(lambda: reader.by_frame(array)),
        "cold segment": lambda: timed(lambda: reader.by_segment(array, False)),
        "warm segment": lambda: timed(lambda: reader.by_segment(array, True)),
    }


def medians(ways: dict[str, Timed], calls: int) -> dict[str, float]:
    """Microseconds of each; the first block warms up."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for block in range(BLOCKS + 1):
        for way, act in ways.items():
            took = [act() for _ in range(calls)]
            if block:
                samples[way] += took
    return {way: median(took) * 1e6 for way, took in samples.items()}


def main() -> None:
    """Print both tables."""
    keep_pages()
    source = memoryview(os.urandom(LARGE))
    for way, took in medians(memory_ways(source), 1).items():
        print(f"{way:33}{took / 1e3:8.2f} ms")
    print()
    reader = Reader()
    print(f"{'bytes':>11}{'frame':>14}{'cold segment':>14}{'warm segment':>14}  µs")
    for size in SIZES:
        array = np.ones(size // 8, np.uint64)
        ways = passing_ways(reader, array)
        costs = medians(ways, 1 if size == LARGE else 20).values()
        print(f"{size:11}", *(f"{cost:13.0f}" for cost in costs))
    reader.close()


if __name__ == "__main__":
    main()
