"""Ray clusters of several nodes for tests; see `cluster_host`."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Final

from tests.support.program import environment

LIMIT: Final = 180.0
"""Seconds for an answer, on a machine that may be busy with much else."""


class Cluster:
    """See above; ends with its block.

    Attributes:
        address: of its head, as RAY_ADDRESS names it.
        nodes: the ids of its nodes, the head's first.
        variables: of programs that join it.
    """

    def __init__(self, **head: Any) -> None:
        self._place = tempfile.TemporaryDirectory(
            prefix="agr-", dir="/tmp", ignore_cleanup_errors=True
        )
        self.variables = {
            "RAY_TMPDIR": self._place.name,
            "RAY_AUTH_MODE": "disabled",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.cluster_host"],
            env=environment(**self.variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.nodes: list[str] = []
        self.address = ""
        try:
            self.add(**head)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, **given: Any) -> str:
        """One node more; gives its id."""
        self.address, node = self._ask("add", given)
        self.nodes.append(node)
        return node

    def kill(self, node: str) -> None:
        """End all processes of a node at once."""
        self._ask("kill", self.nodes.index(node))

    def _ask(self, command: str, given: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, given]) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(LIMIT), f"no answer to {command}"
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        try:
            self._process.communicate(timeout=LIMIT)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._place.cleanup()
