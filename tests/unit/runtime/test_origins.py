"""The names and ancestors of processes, read from proc, real and on paper."""

from __future__ import annotations

import os
from pathlib import Path

from aiogpu.linux.procfs import DEEPEST, Origin, origins_of


def write(proc: Path, pid: int, parent: int, name: str = "x") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1\n")


def test_this_process_has_its_parent() -> None:
    pid = os.getpid()
    origin = origins_of([pid])[pid]
    assert origin.name
    assert origin.ancestors[:1] == ((os.getppid(),) if os.getppid() > 1 else ())


def test_ancestors_end_at_the_first_process(tmp_path: Path) -> None:
    write(tmp_path, 30, 20, "a (b) c) d")
    write(tmp_path, 20, 10)
    write(tmp_path, 10, 1)
    write(tmp_path, 40, 0)
    assert origins_of([30, 40], tmp_path) == {
        30: Origin("a (b) c) d", (20, 10)),
        40: Origin("x", ()),
    }


def test_what_has_ended_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 30, 20)
    (tmp_path / "50").mkdir()
    (tmp_path / "50" / "stat").write_text("")
    assert origins_of([30, 31, 50], tmp_path) == {30: Origin("x", (20,))}


def test_a_circle_of_reused_ids_ends(tmp_path: Path) -> None:
    write(tmp_path, 30, 20)
    write(tmp_path, 20, 30)
    assert len(origins_of([30], tmp_path)[30].ancestors) == DEEPEST
