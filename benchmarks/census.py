"""What processes weigh: their memory, descriptors and threads; see proc(5)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Weight:
    """Of one process, or of several together.

    Attributes:
        resident: bytes in memory; what a process shares with others counts in full.
        proportional: the same, but what is shared counts a part for each.
        private: the same, but what is shared does not count.
    """

    processes: int
    resident: int
    proportional: int
    private: int
    descriptors: int
    threads: int


def weigh(pids: list[int]) -> Weight:
    """Weigh processes of this user. None of them may end meanwhile."""
    places = [Path(f"/proc/{pid}") for pid in pids]
    memory = [_memory(place) for place in places]
    own = [each["Private_Clean"] + each["Private_Dirty"] for each in memory]
    return Weight(
        len(pids),
        sum(each["Rss"] for each in memory),
        sum(each["Pss"] for each in memory),
        sum(own),
        sum(len(os.listdir(place / "fd")) for place in places),
        sum(len(os.listdir(place / "task")) for place in places),
    )


def _memory(place: Path) -> dict[str, int]:
    """Bytes by the kernel's words for them."""
    _, *lines = (place / "smaps_rollup").read_text(encoding="ascii").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key: int(value.split()[0]) * 1024 for key, _, value in pairs}


def descendants(root: int | None = None) -> dict[int, str]:
    """The processes below this one that have not ended, and their names.

    Args:
        root: the process below which they are, if not this one.
    """
    root = root or os.getpid()
    parents = dict(_parents())
    found: dict[int, str] = {}
    for pid, (name, _) in parents.items():
        above = pid
        while above in parents and above != root:
            above = parents[above][1]
        if above == root != pid:
            found[pid] = name
    return found


def cpu_time(pids: Iterable[int]) -> float:
    """Seconds that these processes have run, those included that they have reaped."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
            ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _parents() -> Iterator[tuple[int, tuple[str, int]]]:
    """Of each process that has not ended its name, and its parent's id."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
            # The name in parentheses may hold anything, spaces included.
            name, _, rest = text.partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state != "Z":
                yield int(pid), (name, int(parent))


def by_part(lasting: Mapping[str, str]) -> dict[str, list[int]]:
    """Process ids of this process, the driver, and of its lasting ones below it.

    Args:
        lasting: a word for them, and how their names begin.
    """
    below = descendants()
    parts = {"driver": [os.getpid()]}
    for part, beginning in lasting.items():
        parts[part] = [p for p, name in below.items() if name.startswith(beginning)]
    return parts


def shared_memory() -> int:
    """Bytes of memory without a name that this process and those below it hold open.

    What several of them hold counts once; see memfd_create(2).
    """
    sizes: dict[int, int] = {}
    for pid in (os.getpid(), *descendants()):
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(entry.path).startswith("/memfd:"):
                        found = entry.stat()
                        sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def forget_peak() -> None:
    """Let `peak_memory` begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int:
    """Bytes that this process has had in memory at most, all kinds together."""
    return _own("VmHWM")


def memory_now() -> int:
    """Bytes that this process has in memory, all kinds together."""
    return _own("VmRSS")


def _own(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024
