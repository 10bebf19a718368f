"""Which sockets processes have, read from /proc: of the internet's, and Unix ones.

A node, its workers and its programs are to have none of the former at all, so nobody
can reach them from outside, nor by the loopback.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.soak.processes import descriptors

INTERNET: Final = (
    *("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6"),
    *("raw", "raw6", "icmp", "icmp6"),
)
STATES: Final = {"0A": "listens", "07": "is bound", "01": "is connected"}
ACCEPTS: Final = 1 << 16
"""Of a Unix socket's flags: it listens; see unix(4) of proc(5)."""


def of_the_internet(pids: Iterable[int]) -> list[str]:
    """Each socket of these processes by which another machine could be met."""
    known = {
        inode: told for table in INTERNET for inode, told in _table_of_internet(table)
    }
    return [
        f"process {pid}: {known[inode]}"
        for pid, inode in _sockets(pids)
        if inode in known
    ]


def listening(pids: Iterable[int]) -> set[str]:
    """Where these processes listen on Unix sockets: paths; "@…" has no file."""
    paths = dict(_listening())
    return {paths[inode] for _, inode in _sockets(pids) if inode in paths}


def _sockets(pids: Iterable[int]) -> Iterator[tuple[int, str]]:
    for pid in pids:
        for target in descriptors(pid):
            if target.startswith("socket:["):
                yield pid, target[8:-1]


def _table_of_internet(table: str) -> Iterator[tuple[str, str]]:
    """By inode what there is."""
    for fields in _rows(table):
        address, state, inode = fields[1], fields[3], fields[9]
        yield inode, f"{table} {address} {STATES.get(state, f'is in state {state}')}"


def _listening() -> Iterator[tuple[str, str]]:
    for fields in _rows("unix"):
        if int(fields[3], 16) & ACCEPTS:
            yield fields[6], fields[7] if len(fields) > 7 else "a socket without a name"


def _rows(table: str) -> Iterator[list[str]]:
    with suppress(FileNotFoundError):  # the kernel knows no such protocol
        text = Path(f"/proc/net/{table}").read_text(encoding="utf-8")
        for line in text.splitlines()[1:]:
            yield line.split()
