"""A process that has a Ray cluster of several nodes on this machine, as it is told.

Each line that comes is a command: `["add", {...}]` for a node with these resources,
`["kill", number]` for its sudden end. Each line that it says answers one. The cluster
ends with the lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def kill(node: Any) -> list[int]:
    """End all of it, its workers too, as when its machine goes."""
    started = [one.process for each in node.all_processes.values() for one in each]
    pids = [pid for one in started for pid in (one.pid, *children(one.pid))]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for one in started:
        one.wait()
    return pids


def children(pid: int) -> list[int]:
    """The processes that it has started."""
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
