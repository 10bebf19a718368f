"""`docs/service.md` says what the commands say, and its figures are the code's."""

import os
import re
from pathlib import Path

import pytest

from aiogpu.cli import start as start_command
from aiogpu.cli.start import ready_lines, start, stop
from aiogpu.daemon import journal
from aiogpu.daemon import process as plan
from aiogpu.daemon.place import MAX_SOCKET_PATH, Place
from aiogpu.daemon.readiness import Ready
from aiogpu.daemon.start import CARRIED, NAME
from aiogpu.runtime import output as task_log

PAGE = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
WORDS = " ".join(PAGE.split())
CONSOLE = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_start_prints_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    place = Place.at()
    resources = {"CPU": 16.0, "memory": float(60 << 30), "GPU": 2.0}
    lines = ready_lines(Ready(4711, resources, place.socket, place.logs))
    assert "\n".join(["$ aiogpu start --head --num-gpus=2", *lines, ""]) == CONSOLE[0]


def test_the_stop_prints_what_the_page_shows() -> None:
    at = "the node at /run/user/1000/aiogpu/node.sock (pid 4711)"
    first, second = CONSOLE[1].splitlines()[1:]
    assert first == f"Stopping {at}; what runs has {plan.DRAIN:.0f} s to end."
    assert re.fullmatch(rf"Stopped {re.escape(at)} in [\d.]+ s\.", second)


def test_its_options_are_there() -> None:
    known = {
        name
        for command in (start, stop)
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    named = set(re.findall(r"(?<=[ `])--[a-z-]+", PAGE)) - {"--user", "--now"}
    assert named
    assert named <= known


@pytest.mark.parametrize(
    "words",
    [
        f"in {plan.DRAIN:.0f} seconds unless `--drain`",
        f"{journal.SIZE >> 20} MiB, then `node.log.1` to `node.log.{journal.KEPT}`",
        f"Linux allows {MAX_SOCKET_PATH}",
        f"`logs/{plan.CRASH_LOG}`",
        f"{task_log.SIZE >> 20} MiB, then `tasks.log.1` to `tasks.log."
        f"{task_log.LOGS_KEPT}`",
        f"`logs/{journal.FILE}`",
        f"/systemd/user/{NAME}",
        *(f"`{name}`" for name in ("CUDA_VISIBLE_DEVICES", *CARRIED[1:4])),
    ],
)
def test_its_figures_are_those_of_the_code(words: str) -> None:
    assert words in WORDS


def test_files_are_called_what_it_says() -> None:
    place = Place.at()
    for path in (place.socket, place.pidfile):
        assert f"| `{os.path.basename(path)}` |" in PAGE
    assert start_command.NO_HEAD.startswith("say --head")
