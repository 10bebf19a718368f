"""Limits and places in the cgroups, read from made-up trees of /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from aiogpu.linux.cgroup import (
    UNIFIED,
    Place,
    find_cgroup,
    find_hierarchy,
    usable_cpus,
)

HYBRID = """\
30 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
"""
GROUPS = "9:name=systemd:/\n4:memory:/jobs/7\n2:cpu,cpuacct:/c:d\n0::/user/me\n"


class FakeProc:
    """A made-up /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir()

    def write(self, mounts: str, groups: str) -> None:
        (self.root / "self/mountinfo").write_bytes(mounts.encode())
        (self.root / "self/cgroup").write_bytes(groups.encode())


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_a_hybrid_machine_has_both_versions(proc: FakeProc) -> None:
    proc.write(HYBRID, GROUPS)
    unified = find_hierarchy(UNIFIED, proc.root)
    assert unified is not None
    top = "/sys/fs/cgroup/unified"
    assert unified == (top, f"{top}/user/me", True, True)
    assert unified.groups == [f"{top}/user/me", f"{top}/user", top]
    memory = find_hierarchy("memory", proc.root)
    assert memory is not None
    assert memory.own == "/sys/fs/cgroup/memory/jobs/7"
    cpu = find_hierarchy("cpuacct", proc.root)
    assert cpu == (
        "/sys/fs/cgroup/cpu,cpuacct",
        "/sys/fs/cgroup/cpu,cpuacct/c:d",
        True,
        False,
    )
    assert find_hierarchy("pids", proc.root) is None


@pytest.mark.parametrize(
    ("root", "path", "own", "is_seen"),
    [
        ("/", "/", "/m", True),
        ("/", "/a/b", "/m/a/b", True),
        ("/docker/x", "/docker/x", "/m", True),
        ("/docker/x", "/docker/x/y", "/m/y", True),
        ("/docker/x", "/docker/other", "/m", False),
        ("/docker/x", "/docker/xy", "/m", False),
        ("/", "/../other", "/m", False),
        ("/..", "/", "/m", False),
    ],
)
def test_a_mount_may_show_a_part_of_the_hierarchy(
    root: str, path: str, own: str, is_seen: bool, proc: FakeProc
) -> None:
    proc.write(f"41 31 0:38 {root} /m rw - cgroup2 cgroup2 rw\n", f"0::{path}\n")
    found = find_hierarchy(UNIFIED, proc.root)
    assert found is not None
    assert (found.own, found.is_seen) == (own, is_seen)
    assert found.groups[-1] == "/m"


def test_escaped_and_undecodable_names_are_read(proc: FakeProc) -> None:
    proc.write("41 31 0:38 / /a\\040b\\134 rw - cgroup2 none rw\n", "0::/caf\xe9\n")
    found = find_hierarchy(UNIFIED, proc.root)
    assert found is not None
    assert found.own == "/a b\\/caf\xe9"


def test_a_missing_or_garbled_file_gives_no_hierarchy(proc: FakeProc) -> None:
    assert find_hierarchy(UNIFIED, proc.root) is None
    proc.write("garbage\n\n1 2 - cgroup2\n", "0::/\n")
    assert find_hierarchy(UNIFIED, proc.root) is None
    proc.write(HYBRID, "4:memory:/\n")
    assert find_hierarchy(UNIFIED, proc.root) is None


class CpuTree:
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
def cpu_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuTree:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    return CpuTree(tmp_path)


def test_affinity_counts_without_a_quota(cpu_tree: CpuTree) -> None:
    assert cpu_tree.cpus == 8.0, "no /proc/self/cgroup"
    cpu_tree.belongs_to("0::/")
    assert cpu_tree.cpus == 8.0, "no quota"
    cpu_tree.has({"cpu.max": "max 100000\n"})
    assert cpu_tree.cpus == 8.0


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("200000 100000\n", 2.0),
        ("150000 100000\n", 1.5),
        ("50000 100000\n", 1.0),
        ("6400000 100000\n", 8.0),
        ("", 8.0),
        ("many few\n", 8.0),
    ],
)
def test_a_quota_of_version_2(cpu_tree: CpuTree, text: str, cpus: float) -> None:
    cpu_tree.belongs_to("0::/user.slice/mine")
    cpu_tree.has({"user.slice/mine/cpu.max": text})
    assert cpu_tree.cpus == cpus


def test_the_tightest_of_a_group_and_its_parents_counts(cpu_tree: CpuTree) -> None:
    cpu_tree.belongs_to("0::/a/b/c")
    cpu_tree.has({"a/b/c/cpu.max": "max 100000", "a/cpu.max": "300000 100000"})
    assert cpu_tree.cpus == 3.0
    cpu_tree.has({"cpu.max": "200000 100000"})
    assert cpu_tree.cpus == 2.0
    cpu_tree.has({"other/cpu.max": "100000 100000"})
    assert cpu_tree.cpus == 2.0, "another's quota"


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [
        ("250000", "100000", 2.5),
        ("-1", "100000", 8.0),
        ("100000", "0", 8.0),
    ],
)
def test_a_quota_of_version_1(
    cpu_tree: CpuTree, quota: str, period: str, cpus: float
) -> None:
    cpu_tree.belongs_to(
        "12:cpuset:/elsewhere", "4:cpu,cpuacct:/docker/abc", "1:name=systemd:/docker/x"
    )
    folder = "cpu,cpuacct/docker/abc"
    cpu_tree.has(
        {
            f"{folder}/cpu.cfs_quota_us": quota,
            f"{folder}/cpu.cfs_period_us": period,
            "cpuset/elsewhere/cpu.cfs_quota_us": "1000",
            "cpuset/elsewhere/cpu.cfs_period_us": "1000",
        }
    )
    assert cpu_tree.cpus == cpus


def test_a_hierarchy_is_where_it_is_mounted(cpu_tree: CpuTree) -> None:
    """It once was taken to be at /sys/fs/cgroup, and a quota elsewhere was not seen."""
    cpu_tree.belongs_to("0::/mine")
    text = (cpu_tree.proc / "self/mountinfo").read_text()
    moved = text.replace(str(cpu_tree.cgroups), f"{cpu_tree.cgroups}/else\\040where")
    (cpu_tree.proc / "self/mountinfo").write_text(moved)
    cpu_tree.has({"mine/cpu.max": "100000 100000"})
    cpu_tree.has({"else where/mine/cpu.max": "300000 100000"})
    assert cpu_tree.cpus == 3.0


def test_a_hybrid_machine_has_both(cpu_tree: CpuTree) -> None:
    cpu_tree.belongs_to("4:cpu:/v1", "0::/v2")
    cpu_tree.has(
        {
            "cpu/v1/cpu.cfs_quota_us": "500000",
            "cpu/v1/cpu.cfs_period_us": "100000",
            "unified/v2/cpu.max": "300000 100000",
        }
    )
    assert cpu_tree.cpus == 3.0


def test_a_group_whose_path_is_not_utf8(cpu_tree: CpuTree) -> None:
    cpu_tree.belongs_to("0::/")
    (cpu_tree.proc / "self/cgroup").write_bytes(b"0::/caf\xe9:with:colons\n")
    folder = cpu_tree.cgroups / "caf\udce9:with:colons"
    folder.mkdir()
    (folder / "cpu.max").write_text("200000 100000")
    assert cpu_tree.cpus == 2.0


def test_a_group_outside_of_the_namespace(cpu_tree: CpuTree) -> None:
    """cgroup_namespaces(7): the path may lead out by dots."""
    cpu_tree.belongs_to("0::/../sibling")
    cpu_tree.has({"cpu.max": "200000 100000"})
    assert cpu_tree.cpus == 2.0


class GroupTree:
    """A made-up machine with a cgroup2 at one place."""

    def __init__(self, root: Path) -> None:
        self.proc, self.top = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.own = self.top / "user/me"
        self.own.mkdir(parents=True)
        (self.own / "cgroup.procs").touch()
        self.say()

    def say(self, path: str = "/user/me", options: str = "rw") -> None:
        mount = f"41 31 0:38 / {self.top} {options} - cgroup2 cgroup2 rw\n"
        (self.proc / "self/mountinfo").write_text(mount)
        (self.proc / "self/cgroup").write_text(f"0::{path}\n")


@pytest.fixture
def group_tree(tmp_path: Path) -> GroupTree:
    return GroupTree(tmp_path)


def test_the_own_group_is_the_place_for_a_node(group_tree: GroupTree) -> None:
    assert find_cgroup(group_tree.proc) == Place(str(group_tree.own))
    (group_tree.own / "cgroup.type").write_text("domain\n")
    assert find_cgroup(group_tree.proc) == Place(str(group_tree.own))


def test_a_reason_is_given_where_no_group_can_be_made(
    group_tree: GroupTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason() -> str:
        place = find_cgroup(group_tree.proc)
        assert place.directory is None
        return place.reason

    group_tree.say(options="ro,nosuid")
    assert "read-only" in reason()
    group_tree.say(path="/../other")
    assert "outside of what is mounted" in reason()
    group_tree.say()
    (group_tree.own / "cgroup.type").write_text("threaded\n")
    assert "is of type 'threaded'; start the program by" in reason()
    for shut in (str(group_tree.own), f"{group_tree.own}/cgroup.procs"):
        monkeypatch.setattr(
            os, "access", lambda path, _mode, shut=shut: path != str(shut)
        )
        assert reason().startswith(f"{shut} may not be written to; start")
    (group_tree.proc / "self/mountinfo").write_text("")
    assert reason().startswith("no cgroup2 is mounted")
