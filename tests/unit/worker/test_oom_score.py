"""Whom the kernel takes when memory runs out."""

from __future__ import annotations

import os

import pytest

from aiogpu.linux import syscalls as kernel
from tests.support.program import run


def test_forks_inherit_what_is_raised_meanwhile() -> None:
    source = """
    import os
    from aiogpu.linux.syscalls import OomScore
    def own():
        return open("/proc/self/oom_score_adj").read().strip()
    before = own()
    score = OomScore()
    score.expose()
    pid = os.fork()
    if pid == 0:
        os._exit(own() == "1000")
    score.restore()
    assert own() == before
    assert os.waitpid(pid, 0)[1] == 1 << 8
    score.close()
    score.expose()
    assert own() == before
    """
    run(source)


def test_where_it_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError

    score = kernel.OomScore()
    monkeypatch.setattr(kernel.os, "pwrite", forbidden)
    score.expose()
    score.restore()
    score.close()
    monkeypatch.setattr(kernel.os, "open", forbidden)
    absent = kernel.OomScore()
    absent.expose()
    absent.close()
    assert os.path.exists("/proc/self/oom_score_adj")
