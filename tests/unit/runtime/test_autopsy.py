"""What the kernel says of a death, by made-up files of /proc and cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiogpu.linux import procfs as autopsy
from aiogpu.linux.procfs import ExitEvidence, Findings, message_of, names


class Machine:
    """A machine of both versions of cgroups, and its kernel's log."""

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
        self.autopsy = ExitEvidence(self.proc, self.kmsg)

    def count(self, v1: int = 0, v2: int = 0, machine: int = 0) -> None:
        (self.v1 / "me/memory.oom_control").write_text(
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {v1}\n"
        )
        (self.v2 / "me/memory.events").write_text(
            f"low 0\noom 9\noom_kill {v2}\noom_group_kill 7\n"
        )
        (self.proc / "vmstat").write_text(f"nr_free 1\noom_kill {machine}\n")

    def log(self, record: str) -> None:
        os.write(self._log, record.encode())

    def close(self) -> None:
        self.autopsy.close()
        os.close(self._log)


@pytest.fixture
def machine(tmp_path: Path):  # type: ignore[no-untyped-def]
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_counters_are_compared_with_what_was_before(machine: Machine) -> None:
    machine.count(v1=3, v2=4, machine=9)
    assert machine.autopsy.examine(12) == Findings(), "nobody knows since when"
    machine.autopsy.begin()
    assert machine.autopsy.examine(12) == Findings(0, 0)
    machine.count(v1=4, v2=4, machine=10)
    assert machine.autopsy.examine(12) == Findings(1, 1)
    assert machine.autopsy.examine(13) == Findings(0, 0), "one kill, one death"
    machine.count(v1=4, v2=6, machine=12)
    assert machine.autopsy.examine(14) == Findings(2, 2)
    assert machine.autopsy.examine(15) == Findings(1, 1)


def test_without_files_nothing_is_known(tmp_path: Path) -> None:
    blind = ExitEvidence(tmp_path / "proc", tmp_path / "kmsg")
    assert blind.examine(12) == Findings()
    blind.begin()
    assert blind.examine(12) == Findings()
    blind.close()


def test_files_that_are_garbage(machine: Machine) -> None:
    machine.count()
    (machine.v2 / "me/memory.events").write_bytes(b"\xff\noom_kill many\n")
    machine.autopsy.begin()
    assert machine.autopsy.examine(12) == Findings()


def test_the_log_is_searched_for_the_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe gives all records at once, so each is read by its length here."""
    machine.count()
    machine.autopsy.begin()
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

    monkeypatch.setattr(autopsy.os, "read", read)
    log = "Out of memory: Killed process 4711 (python) total-vm:1kB"
    assert machine.autopsy.examine(4711).log == log
    records += [b"lost", b"6,15,8,-;python[4712]: segfault at 0 ip 0\n"]
    assert machine.autopsy.examine(4712).log == "python[4712]: segfault at 0 ip 0"
    records += [b"lost"] * (autopsy.RECORDS + 5)
    assert machine.autopsy.examine(4713).log == ""
    assert len(records) == 5, "no death costs more than that"
    records.clear()
    records.append(b"")
    assert machine.autopsy.examine(4713).log == ""


def test_records_of_the_log() -> None:
    assert message_of(b"6,1,2,-;a; b\\x0a\n KEY=value\n") == "a; b\\x0a"
    assert message_of(b"garbage") == ""
    assert names("Memory cgroup out of memory: Killed process 12 (x)", 12)
    assert names("traps: python[12] trap divide error", 12)
    assert not names("Killed process 123 (x)", 12)
    assert not names("python[123]: segfault", 12)


def test_this_machine() -> None:
    real = ExitEvidence()
    real.begin()
    found = real.examine(os.getpid())
    assert found.group_kills >= 0
    real.close()
    real.close()
