"""Real nodes: started by the command, ended by it, killed, and started anew."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.cli.box import LIMIT, Box
from tests.faults.remains import living


def test_from_start_to_stop(here: Box) -> None:
    out, err = here.run("start", "--head", "--num-cpus=2", "--num-gpus=3")
    node = here.node
    assert node is not None
    assert err == ""
    told = re.sub(r"memory: [\w.]+", "memory: M", out)
    assert told == (
        f"The node runs: pid {node.pid}, {{CPU: 2, memory: M, GPU: 3}}.\n"
        f"  address  {here.place.socket}\n"
        f"  logs     {here.place.logs}\n"
        f'  join     aiogpu.init(address="auto"), or AIOGPU_ADDRESS=auto\n'
        f"  stop     aiogpu stop\n"
    )
    assert os.getsid(node.pid) == node.pid, "no terminal's, and no shell's"
    assert os.readlink(f"/proc/{node.pid}/cwd") == "/"
    assert Path(f"/proc/{node.pid}/comm").read_text() == "aiogpu-node\n"
    command = Path(f"/proc/{node.pid}/cmdline").read_bytes().split(b"\0")
    assert {b"aiogpu.daemon", here.place.socket.encode()} <= set(command)

    out, err = here.run("stop", "--drain=5")

    said = f"the node at {here.place.socket} (pid {node.pid})"
    assert err == f"Stopping {said}; what runs has 5.0 s to end.\n"
    assert re.fullmatch(rf"Stopped {re.escape(said)} in [\d.]+ s\.\n", out)
    assert living(here.directory) == []
    assert here.files == []
    log = Path(f"{here.place.logs}/node.log").read_text()
    assert f"ready at {here.place.socket}" in log
    assert "what runs has 5.0 s to end" in log

    out, _ = here.run("stop")
    assert out == f"No node runs at {here.place.socket}.\n"


def test_of_two_starts_at_once_one_wins(here: Box) -> None:
    both = [here.begin("start", "--head", "--num-gpus=1") for _ in range(2)]
    heard = [command.communicate(timeout=LIMIT) for command in both]
    assert sorted(command.returncode for command in both) == [0, 1]
    node = here.node
    assert node is not None
    winner = next(out for out, err in heard if not err)
    loser = next(err for _, err in heard if err)
    assert f"pid {node.pid}" in winner
    assert f"a node runs at {here.place.socket} already (pid {node.pid})" in loser

    os.kill(node.pid, signal.SIGKILL)
    here.wait_for_the_end(5)
    # Its own directory goes with it; what is met at the place stays, and is stale.
    assert here.files == ["aiogpu/node.pid", "aiogpu/node.sock"]

    here.run("start", "--head", "--num-gpus=1")
    node = here.node
    assert node is not None
    out, err = here.run("stop", "--force")
    assert (out[:6], err) == ("Killed", "")
    here.wait_for_the_end(5)
    assert here.files == []


def test_a_start_that_fails_says_why(here: Box) -> None:
    _, err = here.run("start", "--head", "--preload=nosuchmodule", code=1)
    assert "'nosuchmodule', which cannot be imported" in err
    _, err = here.run(
        "start", "--head", "--num-gpus=3", CUDA_VISIBLE_DEVICES="7", code=2
    )
    assert "num_gpus=3, but CUDA_VISIBLE_DEVICES='7' names 1 device" in err
    os.chmod(f"{here.directory}/aiogpu", 0o755)
    _, err = here.run("start", "--head", code=1)
    assert "has mode 0755" in err
    os.chmod(f"{here.directory}/aiogpu", 0o700)
    assert living(here.directory) == []
    assert here.files == []
