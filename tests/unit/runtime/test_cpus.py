"""CPUs by affinity and by cgroup quota, against made-up /proc and /sys trees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from aiogpu.linux.cgroup import usable_cpus


class Machine:
    """A made-up machine: its affinity, its cgroup files."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()

    def belongs_to(self, *lines: str, root: str = "/") -> None:
        """Say which groups it is in, by lines of `/proc/self/cgroup`, and mount them.

        Args:
            lines: one for each hierarchy.
            root: the directory of each hierarchy that is seen at its mount point.
        """
        text = "".join(f"{line}\n" for line in lines)
        (self.proc / "self/cgroup").write_text(text)
        mounts = ""
        for line in lines:
            kind, controllers = "cgroup", line.split(":")[1]
            place = self.cgroups / controllers
            if not controllers:
                kind, place = "cgroup2", self.cgroups
                if len(lines) > 1:
                    place /= "unified"
            mounts += f"1 2 0:1 {root} {place} rw - {kind} x rw,{controllers}\n"
        (self.proc / "self/mountinfo").write_text(mounts)

    def has(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.cgroups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    @property
    def cpus(self) -> float:
        return usable_cpus(self.proc)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    return Machine(tmp_path)


def test_affinity_counts_where_nothing_else_is_said(machine: Machine) -> None:
    assert machine.cpus == 8.0, "no /proc/self/cgroup"
    machine.belongs_to("0::/")
    assert machine.cpus == 8.0, "no quota"
    machine.has({"cpu.max": "max 100000\n"})
    assert machine.cpus == 8.0


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("200000 100000\n", 2.0),
        ("150000 100000\n", 1.5),
        ("50000 100000\n", 1.0),
        ("6400000 100000\n", 8.0),
        ("max 100000\n", 8.0),
        ("", 8.0),
        ("200000\n", 8.0),
        ("many few\n", 8.0),
    ],
)
def test_a_quota_of_version_2(machine: Machine, text: str, cpus: float) -> None:
    machine.belongs_to("0::/user.slice/mine")
    machine.has({"user.slice/mine/cpu.max": text})
    assert machine.cpus == cpus


def test_the_tightest_of_a_group_and_its_parents_counts(machine: Machine) -> None:
    machine.belongs_to("0::/a/b/c")
    machine.has({"a/b/c/cpu.max": "max 100000", "a/cpu.max": "300000 100000"})
    assert machine.cpus == 3.0
    machine.has({"cpu.max": "200000 100000"})
    assert machine.cpus == 2.0
    machine.has({"other/cpu.max": "100000 100000"})
    assert machine.cpus == 2.0, "another's quota"


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [
        ("250000", "100000", 2.5),
        ("-1", "100000", 8.0),
        ("100000", "0", 8.0),
        ("x", "100000", 8.0),
        ("20000", "100000", 1.0),
    ],
)
def test_a_quota_of_version_1(
    machine: Machine, quota: str, period: str, cpus: float
) -> None:
    machine.belongs_to(
        "12:cpuset:/elsewhere", "4:cpu,cpuacct:/docker/abc", "1:name=systemd:/docker/x"
    )
    folder = "cpu,cpuacct/docker/abc"
    machine.has(
        {
            f"{folder}/cpu.cfs_quota_us": quota,
            f"{folder}/cpu.cfs_period_us": period,
            "cpuset/elsewhere/cpu.cfs_quota_us": "1000",
            "cpuset/elsewhere/cpu.cfs_period_us": "1000",
        }
    )
    assert machine.cpus == cpus


def test_a_container_sees_its_own_group_at_the_root(machine: Machine) -> None:
    """The path is the host's, while the mounted tree begins at the container."""
    machine.belongs_to("4:cpu,cpuacct:/docker/abc", root="/docker/abc")
    folder = "cpu,cpuacct"
    machine.has(
        {
            f"{folder}/cpu.cfs_quota_us": "400000",
            f"{folder}/cpu.cfs_period_us": "100000",
        }
    )
    assert machine.cpus == 4.0


def test_a_hierarchy_is_where_it_is_mounted(machine: Machine) -> None:
    """It once was taken to be at /sys/fs/cgroup, and a quota elsewhere was not seen."""
    machine.belongs_to("0::/mine")
    text = (machine.proc / "self/mountinfo").read_text()
    moved = text.replace(str(machine.cgroups), f"{machine.cgroups}/else\\040where")
    (machine.proc / "self/mountinfo").write_text(moved)
    machine.has({"mine/cpu.max": "100000 100000"})
    machine.has({"else where/mine/cpu.max": "300000 100000"})
    assert machine.cpus == 3.0


def test_a_hierarchy_that_is_not_mounted_limits_nothing(machine: Machine) -> None:
    machine.belongs_to("0::/mine")
    (machine.proc / "self/mountinfo").write_text("")
    machine.has({"mine/cpu.max": "200000 100000"})
    assert machine.cpus == 8.0


def test_a_hybrid_machine_has_both(machine: Machine) -> None:
    machine.belongs_to("4:cpu:/v1", "0::/v2")
    machine.has(
        {
            "cpu/v1/cpu.cfs_quota_us": "500000",
            "cpu/v1/cpu.cfs_period_us": "100000",
            "unified/v2/cpu.max": "300000 100000",
        }
    )
    assert machine.cpus == 3.0


def test_a_path_that_is_no_utf8(machine: Machine) -> None:
    machine.belongs_to("0::/")
    (machine.proc / "self/cgroup").write_bytes(b"0::/caf\xe9:with:colons\n")
    folder = machine.cgroups / "caf\udce9:with:colons"
    folder.mkdir()
    (folder / "cpu.max").write_text("200000 100000")
    assert machine.cpus == 2.0


def test_what_cannot_be_read_limits_nothing(machine: Machine) -> None:
    machine.belongs_to("0::/a")
    (machine.cgroups / "a/cpu.max").mkdir(parents=True)
    assert machine.cpus == 8.0


def test_a_group_outside_of_the_namespace(machine: Machine) -> None:
    """cgroup_namespaces(7): the path may lead out by dots."""
    machine.belongs_to("0::/../sibling")
    machine.has({"cpu.max": "200000 100000"})
    assert machine.cpus == 2.0


def test_this_machine() -> None:
    assert usable_cpus() >= 1.0
