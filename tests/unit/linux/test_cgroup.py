"""Cgroups: limits and hierarchies in fake trees, real groups, slots."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from aiogpu.linux import syscalls as kernel
from aiogpu.linux.cgroup import (
    UNIFIED,
    Cgroup,
    ParentCgroup,
    SlotCgroup,
    end_node,
    end_slot,
    find_cgroup,
    find_hierarchy,
    fork_into_slot,
    usable_cpus,
)
from tests.support.cgroups import group, needs_cgroup
from tests.support.program import run


@pytest.fixture
def made() -> Iterator[Cgroup]:
    with group("one") as made:
        yield made


def enter(made: Cgroup) -> int:
    """Fork a process into the group; it ignores signals and has its own session."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            made.enter()
            os.write(writing, b".")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    os.close(writing)
    return pid


@needs_cgroup
def test_pids_lists_the_processes_of_a_group(made: Cgroup) -> None:
    assert (made.pids(), made.is_populated) == ([], False)
    assert made.wait_until_empty(0)
    below = made.child("below")
    below.make()
    pid = enter(below)
    assert below.pids() == [pid]
    assert (made.pids(), made.is_populated) == ([], True), "those below count"
    assert not made.wait_until_empty(0)
    assert not made.remove()
    made.kill()
    os.waitpid(pid, 0)
    assert made.wait_until_empty(10)


@needs_cgroup
@pytest.mark.parametrize("way", ["at once", "one by one"])
def test_kill_ends_a_group_and_its_descendants(
    way: str, made: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = made.child("below")
    below.make()
    pids = [enter(made), enter(below)]
    if way == "one by one":

        def write(_group: Cgroup, name: str, _value: bytes) -> None:
            raise FileNotFoundError(name)

        monkeypatch.setattr(Cgroup, "_write", write)
    made.kill()
    for pid in pids:
        status = os.waitpid(pid, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert made.wait_until_empty(10)


def test_missing_group_is_empty(tmp_path: Path) -> None:
    gone = Cgroup(f"{tmp_path}/gone")
    assert repr(gone) == f"<Cgroup {tmp_path}/gone>"
    assert (gone.pids(), gone.children(), gone.is_populated) == ([], [], False)
    assert gone.wait_until_empty(10)
    assert gone.remove()
    gone.kill()
    with pytest.raises(FileNotFoundError):
        gone.enter()


@pytest.fixture
def node() -> Iterator[Cgroup]:
    with group("node") as node:
        yield node


def fork_into(node: Cgroup) -> tuple[str, int]:
    """Fork a slot's keeper; return its group and its exit code."""
    reading, writing = os.pipe()
    pid = fork_into_slot(node.path, 3)
    if pid == 0:
        try:
            with open("/proc/self/cgroup", "rb") as file:
                os.write(writing, file.read())
        finally:
            os._exit(7)
    os.close(writing)
    with os.fdopen(reading) as file:
        (mine,) = (line for line in file.read().splitlines() if line[:3] == "0::")
    return os.path.basename(mine), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@needs_cgroup
def test_keeper_is_born_in_its_group(node: Cgroup) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert fork_into(node) == ("3", 7)
    assert fork_into(node) == ("3", 7)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_cgroup
def test_keeper_is_forked_normally_without_clone3(
    node: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what earlier tests have left is not to go meanwhile
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(kernel, "SYS_CLONE3", 1 << 20)
    with pytest.raises(OSError, match="clone3"):
        kernel.fork_into(0)
    mine, code = fork_into(node)
    assert (mine != "3", code) == (True, 7)
    assert len(os.listdir("/proc/self/fd")) == before
    assert fork_into(Cgroup(""))[1] == 7


PROGRAM = """
    import os, signal, sys
    from aiogpu.linux.cgroup import Cgroup
    from aiogpu.linux import cgroup
    from aiogpu.linux import syscalls as kernel
    from aiogpu.linux.cgroup import SlotCgroup, end_node
    from aiogpu.worker.zygote.keeper import end_children
    from tests.support.cgroups import PLACE

    node = f"{PLACE.directory}/test-keeper-{os.getpid()}"
    kernel.adopt_orphans()

    def mine():
        lines = open("/proc/self/cgroup").read().splitlines()
        return [line for line in lines if line.startswith("0::")][0]

    origin = mine()
    slot = SlotCgroup(node, 3)
    assert mine().endswith("/3"), mine()
    assert not slot.has_others
    """


@needs_cgroup
def test_end_others_spares_the_keeper() -> None:
    source = """
    reading, writing = os.pipe()
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.write(writing, b".")
            signal.pause()
    os.read(reading, 1), os.read(reading, 1)
    assert slot.has_others
    slot.end_others()
    assert not slot.has_others
    assert mine().endswith("/3"), mine()
    end_children()
    Cgroup(node).child("4").make()
    slot.remove()
    assert mine() == origin
    assert not os.path.exists(node)
    """
    run(PROGRAM + source)


@needs_cgroup
def test_end_others_catches_forking_processes() -> None:
    """A chain of daemons, each of which forks and exits at once."""
    source = """
    kernel.kill = lambda pid, number=9: True
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b".")
        while True:
            os.setsid()
            if os.fork():
                os._exit(0)
    os.read(reading, 1)
    end_children(slot.end_others)
    assert kernel.children() == []
    assert not slot.has_others
    slot.remove()
    assert not os.path.exists(node)
    """
    run(PROGRAM + source)


def test_slot_without_a_group_does_nothing(tmp_path: object) -> None:
    for node in ("", f"{tmp_path}/no/cgroup2"):
        slot = SlotCgroup(node, 3)
        assert not slot.has_others
        slot.end_others()
        slot.forget()
        slot.remove()
    end_node("")
    end_slot("", 3)
    assert not os.path.exists(f"{tmp_path}/no/cgroup2/3/cgroup.procs")


HYBRID = """\
30 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
"""


class FakeProc:
    """A fake /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir()

    def write(self, mounts: str, groups: str) -> None:
        (self.root / "self/mountinfo").write_bytes(mounts.encode())
        (self.root / "self/cgroup").write_bytes(groups.encode())


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


@pytest.mark.parametrize(
    ("root", "path", "own", "is_visible"),
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
def test_hierarchy_may_be_mounted_in_part(
    root: str, path: str, own: str, is_visible: bool, proc: FakeProc
) -> None:
    proc.write(f"41 31 0:38 {root} /m rw - cgroup2 cgroup2 rw\n", f"0::{path}\n")
    hierarchy = find_hierarchy(UNIFIED, proc.root)
    assert hierarchy is not None
    assert (hierarchy.own, hierarchy.is_visible) == (own, is_visible)
    assert hierarchy.groups[-1] == "/m"


def test_escaped_and_undecodable_names_are_read(proc: FakeProc) -> None:
    proc.write("41 31 0:38 / /a\\040b\\134 rw - cgroup2 none rw\n", "0::/caf\xe9\n")
    hierarchy = find_hierarchy(UNIFIED, proc.root)
    assert hierarchy is not None
    assert hierarchy.own == "/a b\\/caf\xe9"


def test_missing_or_garbled_file_gives_no_hierarchy(proc: FakeProc) -> None:
    assert find_hierarchy(UNIFIED, proc.root) is None
    proc.write("garbage\n\n1 2 - cgroup2\n", "0::/\n")
    assert find_hierarchy(UNIFIED, proc.root) is None
    proc.write(HYBRID, "4:memory:/\n")
    assert find_hierarchy(UNIFIED, proc.root) is None


class CpuTree:
    """A fake machine with an affinity and cgroup files."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()

    def belongs_to(self, *lines: str, root: str = "/") -> None:
        """Write `/proc/self/cgroup` and mount its hierarchies.

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
def test_quota_of_version_2(cpu_tree: CpuTree, text: str, cpus: float) -> None:
    cpu_tree.belongs_to("0::/user.slice/mine")
    cpu_tree.has({"user.slice/mine/cpu.max": text})
    assert cpu_tree.cpus == cpus


def test_tightest_quota_of_all_ancestors_counts(cpu_tree: CpuTree) -> None:
    cpu_tree.belongs_to("0::/a/b/c")
    cpu_tree.has({"a/b/c/cpu.max": "max 100000", "a/cpu.max": "300000 100000"})
    assert cpu_tree.cpus == 3.0
    cpu_tree.has({"cpu.max": "200000 100000"})
    assert cpu_tree.cpus == 2.0
    cpu_tree.has({"other/cpu.max": "100000 100000"})
    assert cpu_tree.cpus == 2.0, "another's quota"


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [("250000", "100000", 2.5), ("-1", "100000", 8.0), ("100000", "0", 8.0)],
)
def test_quota_of_version_1(
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


def test_hierarchy_is_found_at_its_mount_point(cpu_tree: CpuTree) -> None:
    """Regression: /sys/fs/cgroup was assumed, and a quota elsewhere ignored."""
    cpu_tree.belongs_to("0::/mine")
    text = (cpu_tree.proc / "self/mountinfo").read_text()
    moved = text.replace(str(cpu_tree.cgroups), f"{cpu_tree.cgroups}/else\\040where")
    (cpu_tree.proc / "self/mountinfo").write_text(moved)
    cpu_tree.has({"mine/cpu.max": "100000 100000"})
    cpu_tree.has({"else where/mine/cpu.max": "300000 100000"})
    assert cpu_tree.cpus == 3.0


def test_hybrid_machine_uses_both_versions(cpu_tree: CpuTree) -> None:
    cpu_tree.belongs_to("4:cpu:/v1", "0::/v2")
    cpu_tree.has(
        {
            "cpu/v1/cpu.cfs_quota_us": "500000",
            "cpu/v1/cpu.cfs_period_us": "100000",
            "unified/v2/cpu.max": "300000 100000",
        }
    )
    assert cpu_tree.cpus == 3.0


def test_group_path_may_be_no_utf8(cpu_tree: CpuTree) -> None:
    cpu_tree.belongs_to("0::/")
    (cpu_tree.proc / "self/cgroup").write_bytes(b"0::/caf\xe9:with:colons\n")
    folder = cpu_tree.cgroups / "caf\udce9:with:colons"
    folder.mkdir()
    (folder / "cpu.max").write_text("200000 100000")
    assert cpu_tree.cpus == 2.0


class GroupTree:
    """A fake machine with a cgroup2 mount."""

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


def test_own_group_is_the_parent_of_the_nodes_group(group_tree: GroupTree) -> None:
    assert find_cgroup(group_tree.proc) == ParentCgroup(str(group_tree.own))
    (group_tree.own / "cgroup.type").write_text("domain\n")
    assert find_cgroup(group_tree.proc) == ParentCgroup(str(group_tree.own))


def test_find_cgroup_explains_why_no_group_can_be_made(
    group_tree: GroupTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason() -> str:
        place = find_cgroup(group_tree.proc)
        assert place.directory is None
        return place.reason

    group_tree.say(options="ro,nosuid")
    assert "read-only" in reason()
    group_tree.say(path="/../other")
    assert "outside the hierarchy" in reason()
    group_tree.say()
    (group_tree.own / "cgroup.type").write_text("threaded\n")
    assert "is of type 'threaded'; start the program with" in reason()
    for shut in (str(group_tree.own), f"{group_tree.own}/cgroup.procs"):
        monkeypatch.setattr(
            os, "access", lambda path, _mode, shut=shut: path != str(shut)
        )
        assert reason().startswith(f"{shut} is not writable; start")
    (group_tree.proc / "self/mountinfo").write_text("")
    assert reason().startswith("no cgroup2 is mounted")
