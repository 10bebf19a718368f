"""A runtime directory for a node and for `aiogpu` commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from aiogpu.daemon.place import Place, Record, living_node
from aiogpu.daemon.stop import stop
from tests.faults.leftovers import wait_until_gone
from tests.support.program import environment

LIMIT = 60


class Sandbox:
    """A runtime directory for a node, as each user of a machine has one.

    Attributes:
        directory: the path.
        place: the socket and the files of its node.
        variables: the environment of all commands.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.place = Place.at(f"{directory}/aiogpu/node.sock")
        self.variables = {
            name: value
            for name, value in environment(XDG_RUNTIME_DIR=directory).items()
            if not name.startswith(("CUDA_", "AIOGPU_"))
        }

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start an `aiogpu` command."""
        return subprocess.Popen(
            [sys.executable, "-m", "aiogpu", *arguments],
            env={**self.variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0, **variables: str) -> tuple[str, str]:
        """Run an `aiogpu` command; return its stdout and stderr."""
        command = self.start(*arguments, **variables)
        out, err = command.communicate(timeout=LIMIT)
        assert command.returncode == code, (out, err)
        return out, err

    @property
    def node(self) -> Record | None:
        """The living node of this directory."""
        return living_node(self.place.pidfile)

    @property
    def files(self) -> list[str]:
        """All files except logs, sorted."""
        paths = (
            os.path.relpath(os.path.join(at, name), self.directory)
            for at, _, names in os.walk(self.directory)
            for name in names
            if at != self.place.logs
        )
        return sorted(paths)

    def wait_until_ended(self, within: float) -> None:
        """Wait until no process is left; `AssertionError` after this many seconds."""
        wait_until_gone(within, self.directory, but_files=True)

    def clear(self) -> None:
        """End the node, if there is one."""
        stop(self.place, force=True)
        self.wait_until_ended(10)


@contextmanager
def open_sandbox() -> Iterator[Sandbox]:
    """A sandbox without a node, before and after."""
    # A short path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="agt-", dir="/tmp") as directory:
        sandbox = Sandbox(directory)
        try:
            yield sandbox
        finally:
            sandbox.clear()
