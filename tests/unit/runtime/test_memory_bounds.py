"""How much memory may be used and is, by made-up files of machines of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiogpu.linux.cgroup import read_limit, read_numbers
from aiogpu.linux.procfs import MemoryBounds, Usage

GIB = 1 << 30


class Machine:
    """16 GiB, 3 of them in use, and cgroups of both versions."""

    def __init__(self, root: Path) -> None:
        self.proc, self.v1, self.v2 = (root / name for name in ("proc", "v1", "v2"))
        (self.proc / "self").mkdir(parents=True)
        for group in (self.v1 / "a/b", self.v2 / "c/d"):
            group.mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text(
            f"35 31 0:32 / {self.v1} rw - cgroup cgroup rw,memory\n"
            f"41 31 0:38 / {self.v2} rw - cgroup2 cgroup2 rw\n"
        )
        (self.proc / "self/cgroup").write_text("4:memory:/a/b\n0::/c/d\n")
        self.use(2, 1)

    def use(self, anonymous: int, shared: int) -> None:
        (self.proc / "meminfo").write_text(
            f"MemTotal:       {16 << 20} kB\nMemFree:    1 kB\nCached:  {9 << 20} kB\n"
            f"AnonPages:   {anonymous << 20} kB\nShmem:   {shared << 20} kB\n"
        )

    def limit_v1(self, group: str, limit: int, rss: int, shmem: int) -> None:
        place = self.v1 / group
        (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (place / "memory.stat").write_text(
            f"cache 99\nrss 1\nshmem 1\ntotal_cache {9 * GIB}\n"
            f"total_rss {rss}\ntotal_shmem {shmem}\n"
        )

    def limit_v2(self, group: str, limit: str, anon: int, shmem: int) -> None:
        place = self.v2 / group
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.stat").write_text(
            f"anon {anon}\nfile {9 * GIB}\nshmem {shmem}\nanon_thp 5\n"
        )

    def has_process(self, pid: int, anon: int, shmem: int = 0, **threads: str) -> None:
        place = self.proc / str(pid)
        (place / "task").mkdir(parents=True)
        (place / "status").write_text(
            f"Name:\tRssAnon:\nVmRSS:\t  9999 kB\nRssAnon:\t  {anon} kB\n"
            f"RssFile:\t  999 kB\nRssShmem:\t   {shmem} kB\nThreads:\t{len(threads)}\n"
        )
        for thread, children in threads.items():
            (place / "task" / thread[1:]).mkdir()
            (place / "task" / thread[1:] / "children").write_text(children)

    @property
    def usage(self) -> Usage:
        return MemoryBounds(self.proc).tightest()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_machine_counts_where_nothing_else_limits(machine: Machine) -> None:
    assert machine.usage == ("machine", 3 * GIB, 16 * GIB)
    assert MemoryBounds(machine.proc).safe_limit() == int(16 * GIB * 0.95)
    assert MemoryBounds(machine.proc).safe_limit(0.5) == 8 * GIB
    machine.limit_v1("", 9223372036854771712, 1, 1)
    machine.limit_v2("c", "max", 1, 1)
    assert machine.usage.where == "machine"


def test_the_place_with_the_least_room_counts(machine: Machine) -> None:
    machine.limit_v1("a/b", 4 * GIB, 1 * GIB, 1 * GIB)
    own = (str(machine.v1 / "a/b"), 2 * GIB, 4 * GIB)
    assert machine.usage == own
    machine.limit_v1("a", 6 * GIB, 1 * GIB, 1 * GIB)
    assert machine.usage == own
    machine.limit_v1("a", 6 * GIB, 4 * GIB, 1 * GIB)
    assert machine.usage == (str(machine.v1 / "a"), 5 * GIB, 6 * GIB)
    machine.limit_v2("c/d", str(GIB), GIB, 5)
    assert machine.usage == (str(machine.v2 / "c/d"), GIB + 5, GIB)
    assert machine.usage.room == int(GIB * 0.95) - GIB - 5
    machine.use(15, 3)
    assert machine.usage.where == "machine"


def test_limits_that_change_are_seen(machine: Machine) -> None:
    machine.limit_v2("c", "max", GIB, 0)
    bounds = MemoryBounds(machine.proc)
    assert bounds.tightest().where == "machine"
    machine.limit_v2("c", str(2 * GIB), GIB, 0)
    assert bounds.tightest() == (str(machine.v2 / "c"), GIB, 2 * GIB)


def test_without_files_nothing_is_limited(tmp_path: Path) -> None:
    bounds = MemoryBounds(tmp_path)
    usage = bounds.tightest()
    assert (usage.where, usage.used) == ("machine", 0)
    assert usage.room > 1 << 60
    assert bounds.used_by([1, 2]) == 0
    assert not bounds.has(1)


def test_a_process_is_counted_with_all_below_it(machine: Machine) -> None:
    machine.has_process(10, 100, 1, t10="11 12 ", t20="13")
    machine.has_process(11, 10, t11="")
    machine.has_process(12, 20, 2, t12="14")
    machine.has_process(13, 30, t13="10")
    machine.has_process(99, 1000, t99="")
    (machine.proc / "14").mkdir()
    bounds = MemoryBounds(machine.proc)
    assert bounds.used_by([10]) == 163 * 1024
    assert bounds.used_by([12, 12, 10]) == 163 * 1024
    assert bounds.used_by([]) == 0
    assert (bounds.has(10), bounds.has(15)) == (True, False)


@pytest.mark.parametrize(
    ("text", "limit"), [("12\n", 12), ("max\n", None), ("", None), ("-1\n", None)]
)
def test_limits(text: str, limit: int | None, tmp_path: Path) -> None:
    (tmp_path / "limit").write_text(text)
    assert read_limit(str(tmp_path / "limit")) == limit


def test_numbers_among_other_lines(tmp_path: Path) -> None:
    (tmp_path / "stat").write_bytes(b"anon 5\nName:  7 kB\n\nbad x\n\xff 1\nlone\n")
    numbers = read_numbers(str(tmp_path / "stat"))
    assert numbers.pop("\ufffd") == 1
    assert numbers == {"anon": 5, "Name": 7}


def test_real_memory_is_seen() -> None:
    """What a child fills is found below us, and the machine's use is plausible."""
    bounds = MemoryBounds()
    usage = bounds.tightest()
    assert 0 < usage.used < usage.limit
    before = bounds.used_by([os.getpid()])
    source = "kept = b'x' * (64 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        grown = bounds.used_by([os.getpid()]) - before
        assert bounds.used_by([child.pid]) >= 64 << 20
        child.communicate(b"\n")
    assert grown >= 64 << 20
