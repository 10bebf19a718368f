"""Segments: shared memory that one process writes and others only read.

A segment has no name: the kernel frees it with its last descriptor and mapping, however
their processes end. The kernel also knows whether a process still reads it. A
descriptor from `Segment.share` has its own open file description with a read lock
(fcntl(2), "Open file description locks"), which its copies, messages in flight,
mappings and forked children all keep.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from pickle import PickleBuffer
from struct import Struct
from typing import Final

ALIGNMENT: Final = 64
"""Bytes to which each buffer's start is aligned: a cache line, a vector register."""

# Not in the fcntl and mmap modules of Python 3.11: <linux/fcntl.h>, <linux/mman.h>.
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_MADV_POPULATE_WRITE: Final = 23
_MAP_NORESERVE: Final = 0x4000
_IOV_MAX: Final = 1024
_GAP: Final = bytes(ALIGNMENT)
# struct flock of fcntl(2): type, whence, start, length, pid.
_flock: Final = Struct("hhqqi4x")
_READ_LOCK: Final = _flock.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
_WRITE_LOCK: Final = _flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class Segment:
    """Memory that this process writes and others only read.

    It is a memfd, or an unnamed file on disk. Once written it is sealed: its size is
    fixed, and only the mapping made before can write it. Used by one thread at a time.

    Attributes:
        id: number of the segment in the node.
        size: bytes, whole pages.
        fd: the writer's own descriptor. Readers get descriptors from `share`.
        is_on_disk: the segment is a file on disk, and is written once.
    """

    def __init__(
        self, segment_id: int, size: int, fd: int, memory: mmap.mmap | None
    ) -> None:
        self.id = segment_id
        self.size = size
        self.fd = fd
        self.is_on_disk = memory is None
        self._memory = memory
        self._is_sealed = False
        self._is_populated = False
        self._tells_readers = True

    @classmethod
    def create(
        cls, segment_id: int, size: int, directory: str | None = None
    ) -> Segment:
        """Create a segment of at least `size` bytes, on disk if `directory` is given.

        Raises:
            OSError: there are too many descriptors (EMFILE, ENFILE), too little memory
                (ENOMEM) or disk space (ENOSPC, EDQUOT), or the directory is not
                writable.
        """
        size = whole_pages(size)
        memory = None
        if directory is None:
            fd = os.memfd_create(
                "aiogpu-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
        else:
            fd = _unnamed_file(directory)
        try:
            if directory is None:
                os.ftruncate(fd, size)
                fcntl.fcntl(
                    fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
                )
                memory = _map(fd, size, mmap.MAP_SHARED)
            else:
                # A write to a hole in the file, through a mapping, raises SIGBUS if the
                # disk is full.
                os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(segment_id, size, fd, memory)

    @staticmethod
    def room_for(lengths: Iterable[int]) -> int:
        """Return the bytes that a segment needs for buffers of these lengths."""
        end = 0
        for length in lengths:
            end = _aligned(end) + length
        return end

    def write(self, buffers: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
        """Copy buffers to the segment, one after another from its start.

        Args:
            buffers: contiguous buffers of any format and number of dimensions.

        Returns:
            Offset of each buffer, a multiple of `ALIGNMENT`, and its length, in bytes.

        Raises:
            ValueError: the buffers do not fit.
            BufferError: a buffer is not contiguous.
            OSError: there is too little memory (ENOMEM, ENOSPC). The segment may be
                partly written.
        """
        # memoryview.cast refuses most formats, such as "<f4" and "T{...}".
        sources = [PickleBuffer(buffer).raw() for buffer in buffers]
        spans = []
        end = 0
        for source in sources:
            start = _aligned(end)
            end = start + source.nbytes
            spans.append((start, source.nbytes))
        if end > self.size:
            raise ValueError(
                f"{len(sources)} buffers need {end} bytes, aligned to {ALIGNMENT}, and "
                f"segment {self.id} has {self.size}; see Segment.room_for"
            )
        if self._is_sealed:
            self._copy(sources, spans)
        else:
            self._store(sources)
            self._seal()
        return tuple(spans)

    def share(self) -> int:
        """Return a read-only descriptor for readers, to pass on and then close.

        `is_read` is True as long as the descriptor, a copy of it or a mapping made from
        it exists in any process.

        Raises:
            OSError: there are too many descriptors, or /proc is not mounted.
        """
        self._seal()
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _READ_LOCK)
        except OSError:
            # Some file systems and sandboxes do not support these locks.
            self._tells_readers = False
        return fd

    @property
    def is_read(self) -> bool:
        """True if a descriptor from `share`, or a mapping of it, still exists.

        True as well if this is unknown.
        """
        if not self._tells_readers:
            return True
        lock = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _WRITE_LOCK)
        kind: int = _flock.unpack(lock)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Close this process's descriptor and mapping; readers keep theirs."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _store(self, sources: list[memoryview]) -> None:
        """Write for the first time, by write(2): pages are neither faulted nor zeroed.

        If memory or the disk is full, this raises, where a mapping would get SIGBUS.
        """
        pieces: list[memoryview | bytes] = []
        end = 0
        for source in sources:
            pieces.append(_GAP[: _aligned(end) - end])
            pieces.append(source)
            end = _aligned(end) + source.nbytes
        first = offset = 0
        while first < len(pieces):
            wrote = os.pwritev(self.fd, pieces[first : first + _IOV_MAX], offset)
            offset += wrote
            while first < len(pieces) and wrote >= len(pieces[first]):
                wrote -= len(pieces[first])
                first += 1
            if wrote:
                pieces[first] = memoryview(pieces[first])[wrote:]

    def _copy(self, sources: list[memoryview], spans: list[tuple[int, int]]) -> None:
        """Write again, through the mapping: the pages exist, and write(2) is sealed."""
        if self._memory is None:
            raise ValueError(
                f"segment {self.id} is on disk or closed, and cannot be written again"
            )
        if not self._is_populated:
            _populate(self._memory)
            self._is_populated = True
        with memoryview(self._memory) as target:
            for source, (start, length) in zip(sources, spans, strict=True):
                target[start : start + length] = source

    def _seal(self) -> None:
        if self._is_sealed:
            return
        self._is_sealed = True
        if self.is_on_disk:
            return
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError:
            # Linux before 5.1 lacks this seal; readers' read-only descriptors must
            # suffice.
            return


def whole_pages(size: int) -> int:
    """Round a size up to whole pages, at least one."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def map_privately(fd: int, size: int) -> mmap.mmap:
    """Map a segment; its pages are loaded on access.

    A write changes a private copy of the page, which this mapping alone sees
    (MAP_PRIVATE, mmap(2)).

    Before 3.13, Python keeps a copy of the descriptor as long as the mapping lives;
    `fd` itself may be closed.

    Raises:
        ValueError: the file is shorter. OSError: there are too many descriptors or
            mappings.
    """
    return _map(fd, size, mmap.MAP_PRIVATE | _MAP_NORESERVE)


def _map(fd: int, size: int, flags: int) -> mmap.mmap:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, flags, access, trackfd=False)
    return mmap.mmap(fd, size, flags, access)


def _populate(memory: mmap.mmap) -> None:
    """Map all pages at once, without a page fault for each.

    New pages are allocated; if there is no memory, this raises instead of SIGBUS later.
    """
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        # Linux before 5.14 maps them by page faults.
        if error.errno != errno.EINVAL:
            raise


def _unnamed_file(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # Errors of open(2) if the file system or the kernel lacks O_TMPFILE.
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR}:
            raise
    import tempfile  # slow to import, and rarely needed

    fd, path = tempfile.mkstemp(prefix="aiogpu-", dir=directory)
    os.unlink(path)
    return fd


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


NAMED_BY: Final = ("TMPDIR", "TEMP", "TMP")
"""Variables that name the temporary directory, in the order of `tempfile`."""

USUAL: Final = ("/tmp", "/var/tmp", "/usr/tmp")


def spill_directory() -> str:
    """Return the temporary directory.

    Unlike `tempfile.gettempdir`, this writes no test file, which would stay if the
    process were killed at this moment.
    """
    named = [os.environ.get(name) for name in NAMED_BY]
    for place in (*named, *USUAL):
        if place and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return os.path.abspath(place)
    return os.getcwd()
