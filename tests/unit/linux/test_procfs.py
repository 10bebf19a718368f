"""Memory, ancestors and deaths, from /proc and the kernel's log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiogpu.linux import procfs
from aiogpu.linux.cgroup import read_limit
from aiogpu.linux.procfs import (
    ExitEvidence,
    Findings,
    MemoryBounds,
    Origin,
    Usage,
    message_of,
    names,
    origins_of,
)

GIB = 1 << 30


class MemoryTree:
    """A fake machine: 16 GiB, 3 GiB in use, cgroups of both versions."""

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
def memory_tree(tmp_path: Path) -> MemoryTree:
    return MemoryTree(tmp_path)


def test_machine_is_the_limit_without_cgroup_limits(memory_tree: MemoryTree) -> None:
    assert memory_tree.usage == ("machine", 3 * GIB, 16 * GIB)
    assert MemoryBounds(memory_tree.proc).safe_limit() == int(16 * GIB * 0.95)
    assert MemoryBounds(memory_tree.proc).safe_limit(0.5) == 8 * GIB
    memory_tree.limit_v1("", 9223372036854771712, 1, 1)
    memory_tree.limit_v2("c", "max", 1, 1)
    assert memory_tree.usage.where == "machine"


def test_limit_with_the_least_room_counts(memory_tree: MemoryTree) -> None:
    memory_tree.limit_v1("a/b", 4 * GIB, 1 * GIB, 1 * GIB)
    own = (str(memory_tree.v1 / "a/b"), 2 * GIB, 4 * GIB)
    assert memory_tree.usage == own
    memory_tree.limit_v1("a", 6 * GIB, 1 * GIB, 1 * GIB)
    assert memory_tree.usage == own
    memory_tree.limit_v1("a", 6 * GIB, 4 * GIB, 1 * GIB)
    assert memory_tree.usage == (str(memory_tree.v1 / "a"), 5 * GIB, 6 * GIB)
    memory_tree.limit_v2("c/d", str(GIB), GIB, 5)
    assert memory_tree.usage == (str(memory_tree.v2 / "c/d"), GIB + 5, GIB)
    assert memory_tree.usage.room == int(GIB * 0.95) - GIB - 5
    memory_tree.use(15, 3)
    assert memory_tree.usage.where == "machine"


def test_no_limit_without_files(tmp_path: Path) -> None:
    bounds = MemoryBounds(tmp_path)
    usage = bounds.tightest()
    assert (usage.where, usage.used) == ("machine", 0)
    assert usage.room > 1 << 60
    assert bounds.used_by([1, 2]) == 0
    assert not bounds.has(1)


def test_used_by_counts_descendants(memory_tree: MemoryTree) -> None:
    memory_tree.has_process(10, 100, 1, t10="11 12 ", t20="13")
    memory_tree.has_process(11, 10, t11="")
    memory_tree.has_process(12, 20, 2, t12="14")
    memory_tree.has_process(13, 30, t13="10")
    memory_tree.has_process(99, 1000, t99="")
    (memory_tree.proc / "14").mkdir()
    bounds = MemoryBounds(memory_tree.proc)
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


def write_stat(proc: Path, pid: int, parent: int, name: str = "x") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1\n")


def test_ended_processes_are_left_out(tmp_path: Path) -> None:
    write_stat(tmp_path, 30, 20)
    (tmp_path / "50").mkdir()
    (tmp_path / "50" / "stat").write_text("")
    assert origins_of([30, 31, 50], tmp_path) == {30: Origin("x", (20,))}


class DeathTree:
    """A fake machine with cgroups of both versions and a kernel log."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.v1, self.v2 = root / "v1", root / "v2"
        for group in (self.v1, self.v2):
            (group / "me").mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text(
            f"35 31 0:32 / {self.v1} rw - cgroup cgroup rw,memory\n"
            f"41 31 0:38 / {self.v2} rw - cgroup2 cgroup2 rw\n"
        )
        (self.proc / "self/cgroup").write_text("4:memory:/me\n0::/me\n")
        self.kmsg = root / "kmsg"
        os.mkfifo(self.kmsg)
        self._log = os.open(self.kmsg, os.O_RDWR | os.O_NONBLOCK)
        self.evidence = ExitEvidence(self.proc, self.kmsg)

    def count(self, v1: int = 0, v2: int = 0, death_tree: int = 0) -> None:
        (self.v1 / "me/memory.oom_control").write_text(
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {v1}\n"
        )
        (self.v2 / "me/memory.events").write_text(
            f"low 0\noom 9\noom_kill {v2}\noom_group_kill 7\n"
        )
        (self.proc / "vmstat").write_text(f"nr_free 1\noom_kill {death_tree}\n")

    def log(self, record: str) -> None:
        os.write(self._log, record.encode())

    def close(self) -> None:
        self.evidence.close()
        os.close(self._log)


@pytest.fixture
def death_tree(tmp_path: Path):  # type: ignore[no-untyped-def]
    death_tree = DeathTree(tmp_path)
    yield death_tree
    death_tree.close()


def test_oom_counters_are_compared_with_earlier_values(death_tree: DeathTree) -> None:
    death_tree.count(v1=3, v2=4, death_tree=9)
    assert death_tree.evidence.examine(12) == Findings(), "nobody knows since when"
    death_tree.evidence.begin()
    assert death_tree.evidence.examine(12) == Findings(0, 0)
    death_tree.count(v1=4, v2=4, death_tree=10)
    assert death_tree.evidence.examine(12) == Findings(1, 1)
    assert death_tree.evidence.examine(13) == Findings(0, 0), "one kill, one death"
    death_tree.count(v1=4, v2=6, death_tree=12)
    assert death_tree.evidence.examine(14) == Findings(2, 2)
    assert death_tree.evidence.examine(15) == Findings(1, 1)


def test_no_evidence_without_files(tmp_path: Path) -> None:
    blind = ExitEvidence(tmp_path / "proc", tmp_path / "kmsg")
    assert blind.examine(12) == Findings()
    blind.begin()
    assert blind.examine(12) == Findings()
    blind.close()


def test_garbled_files_give_no_evidence(death_tree: DeathTree) -> None:
    death_tree.count()
    (death_tree.v2 / "me/memory.events").write_bytes(b"\xff\noom_kill many\n")
    death_tree.evidence.begin()
    assert death_tree.evidence.examine(12) == Findings()


def test_kernel_log_is_searched_for_the_process(
    death_tree: DeathTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe returns all records at once, so each is read by its length."""
    death_tree.count()
    death_tree.evidence.begin()
    records = [
        b"3,12,5,-;Out of memory: Killed process 4711 (python) total-vm:1kB\n SUB=x\n",
        b"6,13,6,-;eth0: link is up\n",
        b"6,14,7,-;python[4712]: segfault at 0 ip 0\n",
    ]

    def read(_descriptor: int, _size: int) -> bytes:
        if not records:
            raise BlockingIOError
        record = records.pop(0)
        if record == b"lost":
            raise BrokenPipeError
        return record

    monkeypatch.setattr(procfs.os, "read", read)
    log = "Out of memory: Killed process 4711 (python) total-vm:1kB"
    assert death_tree.evidence.examine(4711).log == log
    records += [b"lost", b"6,15,8,-;python[4712]: segfault at 0 ip 0\n"]
    assert death_tree.evidence.examine(4712).log == "python[4712]: segfault at 0 ip 0"
    records += [b"lost"] * (procfs.RECORDS + 5)
    assert death_tree.evidence.examine(4713).log == ""
    assert len(records) == 5, "no death costs more than that"
    records.clear()
    records.append(b"")
    assert death_tree.evidence.examine(4713).log == ""


def test_kernel_log_records_are_parsed() -> None:
    assert message_of(b"6,1,2,-;a; b\\x0a\n KEY=value\n") == "a; b\\x0a"
    assert message_of(b"garbage") == ""
    assert names("Memory cgroup out of memory: Killed process 12 (x)", 12)
    assert names("traps: python[12] trap divide error", 12)
    assert not names("Killed process 123 (x)", 12)
    assert not names("python[123]: segfault", 12)
