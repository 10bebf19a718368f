"""Ray clusters of several nodes on this machine, for tests.

Another process runs each cluster. It reads commands, one a line: `["add", {...}]` adds
a node with these resources, `["kill", number]` kills a node. It writes an answer, one
line, to each command. The cluster ends with the process's stdin.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.support.program import environment

FEW_WORKERS: Final = {"RAY_prestart_worker_first_driver": "0"}
"""Variables of a cluster that starts a worker when a task needs it, not one per CPU."""
USUAL: Final[dict[str, Any]] = {
    "num_cpus": 4,
    "num_gpus": 2,
    "resources": {"license": 2},
    "accelerator_type": "A100",
}
"""Options of `init`; one Ray cluster serves all tests that use these."""
LIMIT: Final = 180.0
"""Seconds to wait for an answer, on a machine that may be busy."""


class Cluster:
    """A cluster that ends with its block.

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
            **FEW_WORKERS,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.clusters"],
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
        """Add a node; return its id."""
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
        """End the cluster."""
        try:
            self._process.communicate(timeout=LIMIT)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._place.cleanup()


def kill(node: Any) -> list[int]:
    """Kill a node with its workers, as if its machine failed."""
    started = [one.process for each in node.all_processes.values() for one in each]
    pids = [pid for one in started for pid in (one.pid, *children(one.pid))]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for one in started:
        one.wait()
    return pids


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in tasks for child in each.read_text().split()]


def main() -> None:
    from ray.cluster_utils import Cluster

    answers, sys.stdout = sys.stdout, sys.stderr
    cluster: Any = None
    nodes: list[Any] = []
    for line in sys.stdin:
        command, given = json.loads(line)
        if command == "add":
            if cluster is None:
                head = {"include_dashboard": False, **given}
                cluster = Cluster(initialize_head=True, head_node_args=head)
                nodes.append(cluster.head_node)
            else:
                nodes.append(cluster.add_node(**given))
            said = [cluster.address, nodes[-1].node_id]
        elif command == "kill":
            said = kill(nodes[given])
        else:
            raise AssertionError(command)
        print(json.dumps(said), file=answers, flush=True)
    if cluster is not None:
        cluster.shutdown()


if __name__ == "__main__":
    main()
