"""How many CPUs this process may use: affinity and cgroup quota, not the box's."""

from __future__ import annotations

import os
from pathlib import Path

from aiogpu.runtime.hierarchy import PROC, UNIFIED, find_hierarchy


def usable_cpus(proc: Path = PROC) -> float:
    """CPUs by affinity, or by the tightest cgroup quota where that is less.

    A quota may be a fraction, 1.5; it is never answered below 1, since a task asks
    for one CPU unless told otherwise. Sources: sched_getaffinity(2); the kernel's
    cgroup-v2 (`cpu.max`) and cgroup-v1 (`cpu.cfs_quota_us`) documentation.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for folder in cgroup_folders(proc, "cpu"):
        quota = _quota_v2(folder) or _quota_v1(folder)
        if quota is not None:
            limits.append(quota)
    return max(1.0, min(limits))


def cgroup_folders(proc: Path, controller: str) -> list[Path]:
    """This process's cgroups and their parents, of either version.

    They are where `/proc/self/mountinfo` says that their hierarchies are mounted.
    """
    found = (find_hierarchy(name, proc) for name in (UNIFIED, controller))
    return [
        folder
        for hierarchy in found
        if hierarchy is not None
        for folder in hierarchy.groups
    ]


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
