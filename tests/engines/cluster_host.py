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
from typing import Any


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
            for started in nodes[given].all_processes.values():
                for one in started:
                    os.kill(one.process.pid, signal.SIGKILL)
                    one.process.wait()
            said = []
        else:
            raise AssertionError(command)
        print(json.dumps(said), file=answers, flush=True)
    if cluster is not None:
        cluster.shutdown()


if __name__ == "__main__":
    main()
