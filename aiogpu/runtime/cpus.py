"""How many CPUs this process may use: affinity and cgroup quota, not the box's."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cpus(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> float:
    """CPUs by affinity, or by the tightest cgroup quota where that is less.

    A quota may be a fraction, 1.5; it is never answered below 1, since a task asks
    for one CPU unless told otherwise. Sources: sched_getaffinity(2); the kernel's
    cgroup-v2 (`cpu.max`) and cgroup-v1 (`cpu.cfs_quota_us`) documentation.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for folder in cgroup_folders(proc, cgroups, "cpu"):
        quota = _quota_v2(folder) or _quota_v1(folder)
        if quota is not None:
            limits.append(quota)
    return max(1.0, min(limits))


def cgroup_folders(proc: Path, cgroups: Path, controller: str) -> list[Path]:
    """This process's cgroups and their parents, of either version."""
    try:
        text = os.fsdecode((proc / "self/cgroup").read_bytes())
    except OSError:
        return []
    folders = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [cgroups, cgroups / "unified"]
        elif controller in controllers.split(","):
            roots = [cgroups / controllers, cgroups / controller]
        else:
            continue
        for root in roots:
            folder = root / path.lstrip("/")
            while folder != root:
                folders.append(folder)
                folder = folder.parent
            folders.append(root)
    return folders


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
