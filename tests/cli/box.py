"""A place for nodes of their own, commands given there, and what is left of them."""

from __future__ import annotations

import os
import shutil
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


class Box:
    """A runtime directory, as a user of a machine has one.

    Attributes:
        directory: the runtime directory.
        place: where its node is met.
        variables: of all that runs here.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.place = Place.at(f"{directory}/aiogpu/node.sock")
        left_out = ("CUDA_", "AIOGPU_")
        self.variables = {
            name: value
            for name, value in environment(XDG_RUNTIME_DIR=directory).items()
            if not name.startswith(left_out)
        }

    def begin(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Begin an `aiogpu` command."""
        return subprocess.Popen(
            [sys.executable, "-m", "aiogpu", *arguments],
            env={**self.variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0, **variables: str) -> tuple[str, str]:
        """Run an `aiogpu` command; gives what it prints, and complains."""
        command = self.begin(*arguments, **variables)
        out, err = command.communicate(timeout=LIMIT)
        assert command.returncode == code, (out, err)
        return out, err

    @property
    def node(self) -> Record | None:
        """The node that lives here."""
        return living_node(self.place.pidfile)

    @property
    def files(self) -> list[str]:
        """All that lies here but for logs, in order."""
        found = (
            os.path.relpath(os.path.join(at, name), self.directory)
            for at, _, names in os.walk(self.directory)
            for name in names
            if at != self.place.logs
        )
        return sorted(found)

    def wait_for_the_end(self, within: float) -> None:
        """Wait until no process is left; `AssertionError` after this many seconds."""
        wait_until_gone(within, self.directory, but_files=True)

    def clear(self) -> None:
        """End whoever is left."""
        stop(self.place, force=True)
        self.wait_for_the_end(10)


@contextmanager
def box() -> Iterator[Box]:
    """A box without a node, before and after."""
    # A short path: a socket's has 107 bytes.
    directory = tempfile.mkdtemp(prefix="agt-", dir="/tmp")
    opened = Box(directory)
    try:
        yield opened
    finally:
        opened.clear()
        shutil.rmtree(directory)
