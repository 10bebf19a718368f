"""Placements in the tables of the command line, and as JSON has them."""

from __future__ import annotations

import json

from rich.console import Group

from aiogpu.cli.status import KINDS, data_of, sections
from aiogpu.cli.tables import plain
from aiogpu.cli.top import render_body
from aiogpu.observe.snapshot import snapshot
from aiogpu.observe.status import NodeStatus
from tests.core.builders import GroupWorld


def shown() -> NodeStatus:
    """One that is held and used, one that waits, and one that ends."""
    w = GroupWorld(cpus=8, gpus=3)
    w.placement_group("held", {"GPU": 1, "CPU": 2}, {"GPU": 0.5})
    w.submit_in("held", "m", 0, num_gpus=0.25, num_cpus=1)
    w.placement_group("ends", {"GPU": 1})
    w.submit_in("ends", "n", num_gpus=1)
    w.placement_group("waits", {"GPU": 1}, strategy="SPREAD")
    w.cancel("ends")
    pids = {w.placement_groups["held"]: 4711}
    return snapshot(w.scheduler, pids, w.now)


def test_a_table_has_them_with_their_bundles() -> None:
    status = shown()
    kind = KINDS["placements"]
    entries = kind.entries(status)
    assert [(kind.names(one)[0], kind.state(one)) for one in entries] == [
        ("held", "ready"),
        ("ends", "removing"),
        ("waits", "waiting"),
    ]
    told = "\n".join(plain(kind.table(entries, status)))
    used = "{CPU: 2, GPU: 1} on GPU 0, used: {CPU: 1, GPU: 0.25}; {GPU: 0.5} on GPU 1"
    assert used in told
    assert "waits for GPU 1 (free by device: 0: 0, 1: 0.5, 2: 0)" in told


def test_the_picture_of_a_node_has_them() -> None:
    told = "\n".join(plain(Group(*sections(shown())), 200))
    assert "placements" in told
    lines = Group(*render_body(shown(), "free", 200))
    assert "placements: 3" in list(plain(lines))
    printed = str(shown())
    assert "  0  held  PACK  ready  pid 4711, 1 in it" in printed
    assert "    bundle 1: {GPU: 0.5} on GPU 1" in printed
    assert "leases" not in printed


def test_a_program_is_told_all_of_one() -> None:
    status = shown()
    told = json.loads(json.dumps(data_of(status.placements[0])))
    assert len(told.pop("id")) > 0
    assert told == {
        "task": 0,
        "name": "held",
        "state": "ready",
        "strategy": "PACK",
        "bundles": [
            {
                "request": {"CPU": 2.0, "GPU": 1.0},
                "free": {"CPU": 1.0, "GPU": 0.75},
                "devices": {"GPU": [0]},
            },
            {"request": {"GPU": 0.5}, "free": {"GPU": 0.5}, "devices": {"GPU": [1]}},
        ],
        "members": 1,
        "client": 0,
        "pid": 4711,
        "reason": None,
        "detached": False,
    }
    waits = data_of(status.placements[2])
    assert waits["pid"] is None
    assert waits["bundles"][0]["devices"] == {}
    assert waits["reason"].startswith("waits for GPU 1")
