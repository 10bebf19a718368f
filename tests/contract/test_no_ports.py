"""[B41] Nothing of a node, and nobody who joins it, is on a network.

What is looked at is the kernel's own list of sockets, as the soak does all the time.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

import aiogpu
from benchmarks.soak.processes import belonging, counted
from benchmarks.soak.sockets import listening, of_the_internet
from tests.cli.service.box import box
from tests.contract import tasks
from tests.contract.actor_classes import Async, Counter
from tests.support.gate import Gate

pytestmark = pytest.mark.either_loop
HERE = os.getpid()
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


async def be_busy(gate: Gate) -> list[object]:
    """Workers that run tasks, and actors; to be kept."""
    actors = [Counter.remote(), Async.remote()]
    handles = [actor.gated.remote(gate.path, "actor") for actor in actors[:1]]
    handles += [
        tasks.gated.options(num_gpus=share, num_cpus=0).remote(gate.path, "task")
        for share in (0.5, 0)
    ]
    assert await actors[1].add.remote() == 1
    await gate.entered("actor", "task", "task")
    return [*actors, *handles]


@pytest.mark.fresh  # what it has is found by what it was started with
async def test_a_node_in_a_program(
    no_leaks: None, runtime_directory: Path, gate: Gate
) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        kept = await be_busy(gate)
        found = list(belonging(str(runtime_directory)))
        pids = [HERE, *(process.pid for process in found)]
        assert counted(found).keys() >= {"workers", "keepers", "zygotes"}
        assert of_the_internet(pids) == []
        places = listening(pids) - {gate.path}
        assert places
        assert all(path.startswith(f"{runtime_directory}/") for path in places), places
        gate.release("actor", "task")
        del kept


async def test_a_node_as_a_service_and_its_programs(gate: Gate) -> None:
    with box() as here:
        options = ("--num-cpus=2", "--num-gpus=1")
        await asyncio.to_thread(here.run, "start", "--head", *options)
        async with aiogpu.init(address=here.place.socket):
            kept = await be_busy(gate)
            found = list(belonging(here.directory))
            pids = [HERE, *(process.pid for process in found)]
            parts = {"nodes", "workers", "keepers", "zygotes"}
            assert counted(found).keys() >= parts
            assert of_the_internet(pids) == []
            places = listening(pids) - {gate.path}
            assert here.place.socket in places
            assert all(path.startswith(f"{here.directory}/") for path in places)
            gate.release("actor", "task")
            del kept


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=str)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=str)
def test_one_on_the_loopback_would_be_seen(
    family: socket.AddressFamily, kind: socket.SocketKind
) -> None:
    try:
        opened = socket.socket(family, kind)
        with opened:
            opened.bind((LOOPBACK[family], 0))
            if kind is socket.SOCK_STREAM:
                opened.listen()
            (told,) = of_the_internet([HERE])
            assert str(HERE) in told
    except OSError:
        pytest.skip("this machine has no such addresses")
    assert of_the_internet([HERE]) == []


def test_one_without_a_file_would_be_seen() -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(f"\0aiogpu-test-{HERE}")
        opened.listen()
        assert f"@aiogpu-test-{HERE}" in listening([HERE])
