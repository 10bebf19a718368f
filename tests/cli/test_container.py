"""A node as the first process of a container that has no other init."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import psutil
import pytest

from tests.cli.sandbox import LIMIT, Sandbox

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
START = ("-m", "aiogpu", "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0")
PROGRAM = """
import asyncio, aiogpu, os
async def main():
    async with aiogpu.init(address="auto"):
        print(await asyncio.gather(*map(aiogpu.remote(abs).remote, range(-3, 0))))
asyncio.run(main())
"""


def can_make_a_container() -> bool:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("nsenter")):
        return False
    ran = subprocess.run([*CONTAINER, "true"], capture_output=True, check=False)
    return ran.returncode == 0


pytestmark = pytest.mark.skipif(
    not can_make_a_container(), reason="this user cannot make PID namespaces"
)


class Container:
    """A container whose first process is `aiogpu start --head --block`.

    Attributes:
        terminal: the output of the node.
        init: the first process, as seen from outside.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._variables = sandbox.variables
        self.terminal = pexpect.spawn(
            CONTAINER[0],
            [*CONTAINER[1:], sys.executable, *START],
            env=sandbox.variables,  # type: ignore[arg-type]
            encoding="utf-8",
            timeout=LIMIT,
        )
        self.terminal.expect("The node runs")
        (self.init,) = psutil.Process(self.terminal.pid).children()

    def run(self, *command: str) -> str:
        """Run a command in the container, from outside, like `docker exec`."""
        enter = ("nsenter", "--target", str(self.init.pid), "--pid", "--mount")
        ran = subprocess.run(
            [*enter, *command],
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def end(self) -> int | None:
        """Return the exit code."""
        self.terminal.expect(pexpect.EOF)
        self.terminal.close()
        return self.terminal.exitstatus


@pytest.fixture
def container(sandbox: Sandbox) -> Iterator[Container]:
    container = Container(sandbox)
    yield container
    container.terminal.close(force=True)


def test_orphans_are_reaped_and_workers_are_not_lost(container: Container) -> None:
    # The shell ends at once, so its child becomes one of the first process.
    container.run("sh", "-c", "sleep 600 >/dev/null 2>&1 &")
    (orphan,) = (each for each in container.init.children() if each.name() == "sleep")
    orphan.kill()
    _, left = psutil.wait_procs([orphan], timeout=LIMIT)
    assert left == []
    # The node has the wait status of its own children.
    for _ in range(2):
        assert container.run(sys.executable, "-c", PROGRAM) == "[3, 2, 1]\n"
    container.init.send_signal(signal.SIGTERM)
    assert container.end() == 0


def test_ctrl_c_reaches_the_node_once(container: Container, sandbox: Sandbox) -> None:
    container.terminal.sendintr()
    assert container.end() == 0
    log = Path(sandbox.place.logs, "node.log").read_text()
    assert "SIGINT: no new work from now on" in log
    assert "SIGINT again" not in log


def test_the_exit_code_is_the_nodes(container: Container) -> None:
    (node,) = container.init.children()
    node.kill()
    assert container.end() == 128 + signal.SIGKILL


def test_a_start_that_fails_exits_with_1(sandbox: Sandbox) -> None:
    ran = subprocess.run(
        [*CONTAINER, sys.executable, *START, "--log-dir=/no/such/place"],
        env=sandbox.variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ran.returncode == 1
    assert "/no/such/place cannot be made" in ran.stderr
    assert ran.stdout == ""
