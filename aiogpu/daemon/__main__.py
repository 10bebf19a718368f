"""`python -m aiogpu.daemon SOCKET PIPE`: the process that `aiogpu start` detaches.

The plan comes on stdin. The socket is an argument only to show it in process lists.
"""

from __future__ import annotations

import sys

from aiogpu.daemon.process import Plan, run_detached


def main() -> int:
    """Run the node of the plan on stdin; return the exit code."""
    if len(sys.argv) != 3:
        print("A node is started by: aiogpu start --head", file=sys.stderr)  # noqa: T201
        return 2
    plan = Plan.unpacked(sys.stdin.buffer.read())
    sys.path[:] = plan.sys_path
    return run_detached(plan, int(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
