"""Segments: shared memory that one process writes and others only read.

A segment has no name anywhere: the kernel frees it with the last descriptor and the
last mapping of it, however their holders end. Whether somebody still reads it is asked
of the kernel too. A descriptor that `Segment.share` gives has an open file description
of its own with a read lock on it (fcntl(2), "Open file description locks"), which its
copies, messages under way, mappings and forked children all keep.
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

    It lies in a memfd, or in a file on disk that has no name. Once written it is
    sealed: its size stays, and nobody can write it but through the mapping that was
    made before. Used by one thread at a time.

    Attributes:
        id: its number in the node.
        size: bytes, whole pages.
        fd: the writer's own descriptor. Readers get those that `share` gives.
        is_on_disk: it is a file on disk, and written once.
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
        """Make a segment of at least `size` bytes; in `directory`, if one is given.

        Raises:
            OSError: there are too many descriptors (EMFILE, ENFILE), too little memory
                (ENOMEM) or no room on the disk (ENOSPC, EDQUOT); or the directory
                cannot be written.
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
                # A hole in a file kills by SIGBUS who writes it when the disk is full.
                os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(segment_id, size, fd, memory)

    @staticmethod
    def room_for(lengths: Iterable[int]) -> int:
        """Return how many bytes a segment needs for buffers of so many bytes each."""
        end = 0
        for length in lengths:
            end = _aligned(end) + length
        return end

    def write(self, buffers: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
        """Copy buffers to the segment, one after another from its beginning.

        Args:
            buffers: of any format and any number of dimensions, each contiguous.

        Returns:
            Where each one lies: its offset, a multiple of `ALIGNMENT`, and its length,
            both in bytes.

        Raises:
            ValueError: they need more room than there is.
            BufferError: one is not contiguous.
            OSError: there is too little memory (ENOMEM, ENOSPC). The segment may be
                written in part.
        """
        # memoryview.cast refuses most formats, as "<f4" and "T{...}".
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
        """Give a descriptor for readers: read-only, to pass on and then close.

        While it, a copy of it or a mapping made from it is there, in whatever process,
        `is_read` says so.

        Raises:
            OSError: there are too many descriptors, or /proc is not mounted.
        """
        self._seal()
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _READ_LOCK)
        except OSError:
            # As on file systems and in sandboxes that know no such locks.
            self._tells_readers = False
        return fd

    @property
    def is_read(self) -> bool:
        """True if it can still be seen through a descriptor that `share` gave.

        True as well where this cannot be known.
        """
        if not self._tells_readers:
            return True
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _WRITE_LOCK)
        kind: int = _flock.unpack(found)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Give up this process's hold on it; readers keep what they have mapped."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _store(self, sources: list[memoryview]) -> None:
        """The first time: pages that come by write(2) are neither faulted nor zeroed.

        And where memory or the disk is full it is an error here, not a SIGBUS.
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
        """Again: the pages are there, and only the mapping may write."""
        if self._memory is None:
            raise ValueError(f"segment {self.id} is on disk, or closed: written once")
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
            # Before Linux 5.1; that readers map it read-only must do there.
            return


def whole_pages(size: int) -> int:
    """Bytes of a segment that has room for `size`: whole pages, at least one."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def map_readonly(fd: int, size: int) -> mmap.mmap:
    """Map a segment for reading; its pages come as they are touched.

    Who writes there all the same, as torch does in place, gets copies of the pages
    that nobody else sees (MAP_PRIVATE, mmap(2)); read-only ones would kill the process.

    Python keeps a copy of the descriptor as long as the mapping lives (from 3.13 on it
    does not); the one given may be closed.

    Raises:
        ValueError: the file is shorter.
        OSError: there are too many descriptors or mappings.
    """
    return _map(fd, size, mmap.MAP_PRIVATE | _MAP_NORESERVE)


def _map(fd: int, size: int, flags: int) -> mmap.mmap:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, flags, access, trackfd=False)
    return mmap.mmap(fd, size, flags, access)


def _populate(memory: mmap.mmap) -> None:
    """Enter the pages in this process's table at once, not by a fault for each.

    Those that were never written are made; where there is no memory for them, it is an
    error here and not a SIGBUS.
    """
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        # Before Linux 5.14 they come by faults.
        if error.errno != errno.EINVAL:
            raise


def _unnamed_file(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # What open(2) says where the file system, or the kernel, knows no O_TMPFILE.
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR}:
            raise
    import tempfile  # heavy, and hardly ever needed

    fd, path = tempfile.mkstemp(prefix="aiogpu-", dir=directory)
    os.unlink(path)
    return fd


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


NAMED_BY: Final = ("TMPDIR", "TEMP", "TMP")
"""Variables that name the temporary directory, as for `tempfile.gettempdir`."""

USUAL: Final = ("/tmp", "/var/tmp", "/usr/tmp")


def spill_directory() -> str:
    """The temporary directory.

    `tempfile` tries each place with a file, which stays behind where the process is
    killed in that moment.
    """
    named = [os.environ.get(name) for name in NAMED_BY]
    for place in (*named, *USUAL):
        if place and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return os.path.abspath(place)
    return os.getcwd()
