"""Another user listens where this user's node would: nothing is sent, read or run.

Where no second user can be had, as this user is not root, only what needs none is
tested.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from aiogpu.cli.doctor import ask_node
from aiogpu.daemon.place import start_time
from tests.contract.forged_node import forged
from tests.support.program import environment

pytestmark = [pytest.mark.usefixtures("no_leaks")]

LIMIT: Final = 60
NOBODY: Final = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user")
COMMANDS: Final = [
    ["status"],
    ["status", "--json"],
    ["list", "tasks"],
    ["top"],
    ["why", "1"],
    ["timeline", "-"],
    ["logs"],
    ["run", "--", "true"],
    ["stop"],
    ["stop", "--force"],
]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory in which everybody may write, as /tmp is one."""
    # Not pytest's own, which lies in a directory that no other user can enter.
    directory = Path(tempfile.mkdtemp(prefix="agf-", dir="/tmp"))
    directory.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody is to signal."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def pidfile_of(victim: subprocess.Popen[bytes], socket: str) -> dict[str, Any]:
    return {
        "pid": victim.pid,
        "started": start_time(victim.pid),
        "socket": socket,
        "logs": "/tmp",
        "drain": 0.0,
        "ends_within": 0.0,
        "version": aiogpu.__version__,
    }


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiogpu", *arguments],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o700])
@pytest.mark.parametrize("is_named", [False, True])
async def test_no_program_joins_in_another_users_directory(
    mode: int, is_named: bool, place: Path
) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    with forged(path, uid=NOBODY, makes=mode, trap=trap) as forger:
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await aiogpu.init(address=path if is_named else "auto")
        assert f"{place}/aiogpu belongs to uid {NOBODY}" in str(error.value)
        assert f"and this is uid {os.geteuid()}" in str(error.value)
        assert "have that user remove it" in str(error.value).lower()
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@as_root
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_command_asks_in_another_users_directory(
    arguments: list[str], place: Path, victim: subprocess.Popen[bytes]
) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    pidfile = pidfile_of(victim, path)
    with forged(path, uid=NOBODY, makes=0o755, trap=trap, pidfile=pidfile) as forger:
        ran = command(*arguments)
        assert ran.returncode == (125 if arguments[0] == "run" else 1), ran
        assert f"{place}/aiogpu belongs to uid {NOBODY}" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert forger.sent() == 0
    assert not os.path.exists(trap)
    assert victim.poll() is None


@as_root
async def test_gpus_are_shown_without_asking_another_users_node(place: Path) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    with forged(path, uid=NOBODY, makes=0o755, trap=trap) as forger:
        ran = await asyncio.to_thread(command, "gpus")
        assert ran.returncode == 0, ran
        shares = await ask_node()
        assert f"{place}/aiogpu belongs to uid {NOBODY}" in shares.note
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@as_root
async def test_another_user_listens_at_a_socket_of_this_users(place: Path) -> None:
    """The directory is in order: only the kernel tells who listens."""
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    (place / "aiogpu").mkdir(0o700)
    with forged(path, uid=NOBODY, trap=trap) as forger:
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await aiogpu.init(address=path)
        told = f"listens at {path} (pid {forger.pid}) belongs to uid {NOBODY}"
        assert told in str(error.value)
        ran = await asyncio.to_thread(command, "status")
        assert ran.returncode == 1
        assert told in ran.stderr
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@pytest.mark.parametrize("kind", ["open", "linked", "socket linked"])
async def test_a_place_into_which_others_could_reach(kind: str, place: Path) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    (place / "real").mkdir(0o700)
    if kind == "linked":
        (place / "aiogpu").symlink_to("real")
    else:
        (place / "aiogpu").mkdir(0o770 if kind == "open" else 0o700)
        (place / "aiogpu").chmod(0o770 if kind == "open" else 0o700)
    at = path
    if kind == "socket linked":
        at = f"{place}/real/node.sock"
        os.symlink(at, path)
    with forged(at, trap=trap) as forger:
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await aiogpu.init(address="auto")
        told = "has mode 0770" if kind == "open" else "is a symbolic link"
        assert told in str(error.value)
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


async def test_what_a_node_has_is_never_unpickled(place: Path) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    (place / "aiogpu").mkdir(0o700)
    with (
        forged(path, trap=trap),
        pytest.raises(aiogpu.errors.NodeError, match="understood"),
    ):
        await aiogpu.init(address="auto")
    assert not os.path.exists(trap)


@pytest.mark.parametrize("what", ["status", "cluster_resources", "available_resources"])
async def test_what_a_node_says_of_itself_is_never_unpickled(
    what: str, place: Path
) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    (place / "aiogpu").mkdir(0o700)
    with forged(path, trap=trap, trapped="answer"):
        session = await aiogpu.init(address="auto")
        with pytest.raises(aiogpu.AiogpuError, match="cannot be read"):
            await getattr(aiogpu, what)()
        await session.shutdown(at_once=True)
    assert not os.path.exists(trap)


@pytest.mark.parametrize("arguments", [["stop"], ["stop", "--force"]], ids=" ".join)
def test_stop_signals_no_process_that_is_not_the_node(
    arguments: list[str], place: Path, victim: subprocess.Popen[bytes]
) -> None:
    """Also where the directory and the pidfile are this user's."""
    path = f"{place}/aiogpu/node.sock"
    (place / "aiogpu").mkdir(0o700)
    with forged(path, pidfile=pidfile_of(victim, path)):
        ran = command(*arguments)
    assert ran.returncode == 1, ran
    assert f"names process {victim.pid}, which is not the node of {path}" in ran.stderr
    assert victim.poll() is None


@as_root
def test_stop_believes_no_pidfile_of_another_user(
    place: Path, victim: subprocess.Popen[bytes]
) -> None:
    path = f"{place}/aiogpu/node.sock"
    (place / "aiogpu").mkdir(0o700)
    with forged(path, pidfile=pidfile_of(victim, path)):
        os.chown(f"{place}/aiogpu/node.pid", NOBODY, NOBODY)
        ran = command("stop")
    assert ran.returncode == 1, ran
    assert f"node.pid belongs to uid {NOBODY}" in ran.stderr
    assert victim.poll() is None


def test_stop_does_not_wait_for_a_pidfile_that_is_a_pipe(place: Path) -> None:
    (place / "aiogpu").mkdir(0o700)
    os.mkfifo(place / "aiogpu" / "node.pid")
    ran = command("stop")
    assert ran.returncode == 0, ran
