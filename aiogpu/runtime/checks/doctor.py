"""All checks in the order in which they are told."""

from __future__ import annotations

from functools import partial

from aiogpu.runtime.checks.finding import Check
from aiogpu.runtime.checks.gpus import check_gpus
from aiogpu.runtime.checks.machine import (
    check_cgroup,
    check_cpus,
    check_descriptors,
    check_directory,
    check_kernel,
    check_kernel_log,
    check_memory,
    check_node,
    check_oom_score,
    check_processes,
    check_python,
)
from aiogpu.runtime.checks.node import LIBRARIES, LIMIT, check_import, check_service


def all_checks(*, with_imports: bool = False) -> list[Check]:
    """Return what to try on this machine.

    Args:
        with_imports: also import the usual libraries, which takes seconds each.
    """
    checks = [
        Check("python", check_python, is_essential=True),
        Check("directory", check_directory, is_essential=True),
        Check("node", check_node, limit=70, is_essential=True),
        Check("subreaper, pidfd", check_kernel, limit=30, is_essential=True),
        Check("cgroup2", check_cgroup, limit=20),
        Check("cpus", check_cpus),
        Check("descriptors", check_descriptors),
        Check("processes", check_processes),
        Check("memory", check_memory),
        Check("oom_score_adj", check_oom_score, limit=15),
        Check("kernel log", check_kernel_log),
        Check("nvml", check_gpus, limit=30),
        Check("service", check_service),
    ]
    if with_imports:
        checks += [
            Check(f"import {name}", partial(check_import, name), limit=LIMIT + 10)
            for name in LIBRARIES
        ]
    return checks
