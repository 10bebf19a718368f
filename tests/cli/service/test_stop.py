"""A node is asked to end, waited for, and killed if it will not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiogpu.daemon import place as pidfile
from aiogpu.daemon import stop as stop_module
from aiogpu.daemon.place import PidfileLock, Place, Record, living_node, start_time
from aiogpu.daemon.stop import stop
from aiogpu.errors import NodeError
from tests.cli.box import Box
from tests.support.program import environment

LIMIT = 60


@contextmanager
def daemon(here: Box, how: str) -> Iterator[subprocess.Popen[str]]:
    """A node of paper that is ready."""
    command = [sys.executable, "-m", "tests.cli.service.paper_daemon"]
    with subprocess.Popen(
        [*command, here.place.socket, how],
        env=environment(XDG_RUNTIME_DIR=here.directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"ready {process.pid}\n"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> list[str]:
    """What it says until it has ended, well."""
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    return out.splitlines()


def test_it_drains_and_ends(here: Box) -> None:
    waits: list[tuple[Record, float]] = []
    with daemon(here, "calm") as process:
        ended = stop(here.place, on_wait=lambda *wait: waits.append(wait))
        assert said(process) == ["drain 60", "close"]
    assert ended is not None
    assert (ended.record.pid, ended.is_forced) == (process.pid, False)
    assert waits == [(ended.record, 60)]
    assert here.files == []
    assert stop(here.place) is None


def test_how_long_it_drains_may_be_said(here: Box) -> None:
    with daemon(here, "deaf") as process:
        assert stop(here.place, drain=0.01)
        assert said(process) == ["drain 0.01", "close"]


def test_asked_once_more_it_ends_at_once(
    here: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(here, "deaf") as process:
        monkeypatch.setattr(stop_module, "SLACK", -80.0)  # its drain, and its end
        with pytest.raises(NodeError) as error:
            stop(here.place)
        assert f"(pid {process.pid}) has not ended within 0 s" in str(error.value)
        assert "Kill it by `aiogpu stop --force`" in str(error.value)
        assert process.stdout is not None
        assert process.stdout.readline() == "drain 60\n"
        monkeypatch.undo()
        assert stop(here.place)
        assert said(process) == ["force_close", "close"]


def test_one_that_cannot_end_is_killed(here: Box) -> None:
    with daemon(here, "stuck") as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stop_module, "SLACK", -20.0)
            with pytest.raises(NodeError, match="has not ended"):
                stop(here.place, drain=0)
        ended = stop(here.place, force=True)
        assert ended is not None
        assert ended.is_forced
        assert process.wait(LIMIT) == -9
    assert here.files == []


def test_a_process_of_the_same_number_is_not_hit(here: Box) -> None:
    here.place.prepare()
    lock = PidfileLock.take(here.place)
    started = start_time(os.getpid())
    assert started is not None
    mine = Record(os.getpid(), started - 1, "", "", 0.0, 0.0, "")
    lock.write(mine)
    assert stop(here.place, force=True) is None
    lock.release()


def test_a_node_that_ends_while_it_is_looked_for(
    here: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its pidfile and the hold on its process."""
    child = subprocess.Popen(["true"])
    child.wait()
    gone = Record(child.pid, 1, "", "", 0.0, 0.0, "")
    monkeypatch.setattr(stop_module, "living_node", lambda _path: gone)
    assert stop(here.place) is None
    monkeypatch.setattr(
        stop_module, "living_node", lambda _path: gone._replace(pid=os.getpid())
    )
    assert stop(here.place, force=True) is None


def test_a_pidfile_of_another_user(here: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> None:
        raise PermissionError

    monkeypatch.setattr(stop_module, "living_node", refuse)
    with pytest.raises(NodeError, match="by the user who has started it"):
        stop(here.place)


def test_a_wish_that_cannot_be_left(here: Box) -> None:
    with daemon(here, "calm") as process:
        os.mkdir(here.place.drain_file)
        with pytest.raises(NodeError, match=r"Leave --drain out, or make room there"):
            stop(here.place, drain=3)
        os.rmdir(here.place.drain_file)
        assert process.poll() is None
        assert living_node(here.place.pidfile)


def test_the_next_node_is_not_touched(
    here: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has begun where another was killed keeps its files."""
    monkeypatch.setattr(pidfile, "WRITTEN_WITHIN", 0.0)
    here.place.prepare()
    lock = PidfileLock.take(here.place)
    place: Place = here.place
    with open(place.drain_file, "w", encoding="ascii"):
        stop_module._clear(place)
    assert os.path.exists(place.drain_file)
    lock.release()
    stop_module._clear(place)
    assert here.files == []
