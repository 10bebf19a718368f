"""`aiogpu` with a node of paper to look at, for tests that drive it in a terminal.

Arguments: the name of what is to be seen, then those of the command.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.main import cli
from aiogpu.cli.main import main as command
from aiogpu.observe.status import NodeStatus, TaskStatus
from tests.cli.pictures import BUSY, Paper

LONG = replace(
    BUSY,
    tasks=tuple(
        TaskStatus(number, f"job-{number}", "running", {"CPU": 1.0}, number, None)
        for number in range(100)
    ),
)


class Dying(Paper):
    """Has ended when it is asked for the second time."""

    async def status(self) -> NodeStatus:
        if not self.pictures:
            raise aiogpu.NodeDiedError("the node has ended.")
        return self.pictures.pop()


NODES = {
    "busy": Paper([BUSY]),
    "long": Paper([LONG]),
    "dying": Dying([BUSY]),
}


@asynccontextmanager
async def joined(
    _address: str, _patience: float | None = None
) -> AsyncIterator[connect.Node]:
    yield NODES[name]


if __name__ == "__main__":
    name = sys.argv.pop(1)
    connect.joined = joined
    assert cli is not None
    command()
