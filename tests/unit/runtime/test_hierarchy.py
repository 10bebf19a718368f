"""Where a process stands in the cgroups, by made-up files of /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiogpu.linux.cgroup import UNIFIED, find_hierarchy

HYBRID = """\
30 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
"""
GROUPS = "9:name=systemd:/\n4:memory:/jobs/7\n2:cpu,cpuacct:/c:d\n0::/user/me\n"


class Proc:
    """A made-up /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir()

    def say(self, mounts: str, groups: str) -> None:
        (self.root / "self/mountinfo").write_bytes(mounts.encode())
        (self.root / "self/cgroup").write_bytes(groups.encode())


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_a_hybrid_machine_has_both_versions(proc: Proc) -> None:
    proc.say(HYBRID, GROUPS)
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
def test_a_mount_that_shows_a_part(
    root: str, path: str, own: str, is_seen: bool, proc: Proc
) -> None:
    proc.say(f"41 31 0:38 {root} /m rw - cgroup2 cgroup2 rw\n", f"0::{path}\n")
    found = find_hierarchy(UNIFIED, proc.root)
    assert found is not None
    assert (found.own, found.is_seen) == (own, is_seen)
    assert found.groups[-1] == "/m"


def test_awkward_names(proc: Proc) -> None:
    proc.say("41 31 0:38 / /a\\040b\\134 rw - cgroup2 none rw\n", "0::/caf\xe9\n")
    found = find_hierarchy(UNIFIED, proc.root)
    assert found is not None
    assert found.own == "/a b\\/caf\xe9"


def test_what_is_not_there_or_not_understood(proc: Proc) -> None:
    assert find_hierarchy(UNIFIED, proc.root) is None
    proc.say("garbage\n\n1 2 - cgroup2\n", "0::/\n")
    assert find_hierarchy(UNIFIED, proc.root) is None
    proc.say(HYBRID, "4:memory:/\n")
    assert find_hierarchy(UNIFIED, proc.root) is None
