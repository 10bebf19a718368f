"""What a node that was killed leaves at its place: who believes it, who clears it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.box import LIMIT, Box
from tests.support.until import until


def test_a_reused_process_id_is_not_taken_for_the_node(here: Box) -> None:
    """Only the start time tells: this process even has the pidfile open."""
    here.run("start", "--head", "--num-cpus=1")
    node = here.node
    assert node is not None
    os.kill(node.pid, signal.SIGKILL)
    here.wait_for_the_end(5)
    pidfile = Path(here.place.pidfile)
    with (
        pidfile.open() as opened,
        subprocess.Popen(["sleep", "600"], stdin=opened) as victim,
    ):
        try:
            # As if the kernel had given the node's number to it.
            pidfile.write_text(json.dumps({**node._asdict(), "pid": victim.pid}))
            out, _ = here.run("stop", "--force")
            assert out == f"No node runs at {here.place.socket}.\n"
            assert victim.poll() is None
            here.run("start", "--head", "--num-cpus=1")
            assert victim.poll() is None
        finally:
            victim.kill()
    here.run("stop")
    assert here.files == []


@pytest.mark.either_loop
async def test_stop_by_force_clears_the_files_of_the_node(here: Box) -> None:
    """A drain request is among them that the node did not live to read."""
    here.run("start", "--head", "--num-cpus=1")
    node = here.node
    assert node is not None
    os.kill(node.pid, signal.SIGSTOP)
    asking = here.begin("stop", "--drain=0")
    await until(lambda: os.path.exists(here.place.drain_file))
    out, _ = here.run("stop", "--force")
    assert out.startswith(f"Killed the node at {here.place.socket}")
    asking.communicate(timeout=LIMIT)
    here.wait_for_the_end(5)
    assert here.files == []
