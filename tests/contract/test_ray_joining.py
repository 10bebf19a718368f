"""Joining and leaving Ray clusters: errors, and what is left behind."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import aiogpu
from aiogpu.engines.base import NodeOptions
from tests.contract.clusters import Cluster
from tests.support import program

pytestmark = [
    pytest.mark.ray,
    pytest.mark.either_loop,
    pytest.mark.usefixtures("in_no_cluster"),
    pytest.mark.slow,
]

ENDED_WITHIN = 90.0
"""Seconds from a program's sudden end to the end of the cluster that it started.

The servers end at once and the workers in some seconds; Ray's agents look for their
parent every few seconds, but while they start they wait a minute for the head.
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make a directory for the files of clusters that the test starts."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with TemporaryDirectory(
        prefix="agr-", dir="/tmp", ignore_cleanup_errors=True
    ) as it:
        monkeypatch.setenv("RAY_TMPDIR", it)
        yield it


def processes(place: str) -> set[int]:
    """Return other processes with a path in their environment or arguments."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            told = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            is_there = "\nState:\tZ" not in (path / "status").read_text()
        except OSError:
            continue
        if is_there and place.encode() in told and int(path.name) != os.getpid():
            found.add(int(path.name))
    return found


GIVEN = {
    "accelerator_type": "A100",
    "gpu_memory_enforce": True,
    "foreign": "wait",
    "mps": "auto",
    "cpu_affinity": "off",
    "preload": ("json",),
    "spare_workers": 0,
    "memory": "1GiB",
    "memory_guard": False,
    "spill_directory": "/tmp",
    "dashboard": True,
}
"""Options that a cluster does not know, with values that are not the defaults."""
OF_STARTS = {
    "num_cpus": 2,
    "num_gpus": 1,
    "resources": {"license": 1},
    "object_memory": "100MiB",
}


@pytest.mark.parametrize("option", GIVEN)
async def test_options_that_a_cluster_does_not_know_are_refused(option):
    with pytest.raises(aiogpu.OptionError, match=option):
        await aiogpu.init(address="ray", **{option: GIVEN[option]})


def test_every_option_is_known_or_refused():
    known = {*GIVEN, *OF_STARTS, "log_to_driver", "cancel_grace"}
    known |= {"gpu_memory", "runtime_env"}
    # `learns` belongs to `preload`; only commands set `only_looks`.
    assert known | {"learns", "only_looks"} == set(NodeOptions._fields)


async def test_a_node_of_ray_has_whole_quantities():
    with pytest.raises(aiogpu.OptionError, match="whole"):
        await aiogpu.init(address="ray", num_cpus=0.5)


async def test_an_old_release_of_ray_is_refused(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "__version__", "2.9.3")
    with pytest.raises(aiogpu.errors.NodeError, match=r"Ray 2\.9\.3 is installed"):
        await aiogpu.init(address="ray")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (":6379", "names no host"),
        ("h:many", "names no host"),
        ("127.0.0.1:1", r"answers at 127\.0\.0\.1:1: .*`ray start --head --port=1`"),
    ],
)
async def test_a_cluster_that_the_environment_names_is_not_replaced(
    monkeypatch, named, told
):
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(aiogpu.errors.NodeError, match=told):
        await aiogpu.init(address="ray")


async def test_ray_client_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with pytest.raises(aiogpu.OptionError, match=r"^RAY_ADDRESS=.*`ray job submit"):
        await aiogpu.init(address="ray")
    monkeypatch.delenv("RAY_ADDRESS")
    from aiogpu.engines.ray import cluster

    # This program has called ray.init("ray://...") itself.
    monkeypatch.setattr(cluster, "is_connected", lambda: True)
    monkeypatch.setattr(cluster, "is_client", lambda: True)
    with pytest.raises(aiogpu.OptionError, match=r"^ray\.init.*`ray job submit"):
        await aiogpu.init(address="ray")


SHARED = """
    import asyncio, os, sys
    import aiogpu
    from tests.contract.tasks import add

    async def of_loop(**options):
        async with aiogpu.init(address="ray", **options):
            return await add.remote(2)

    def in_another_loop(**options):
        return asyncio.run(of_loop(**options))

    async def refused(awaitable):
        try:
            await awaitable
        except aiogpu.errors.NodeError as error:
            return f"{type(error).__name__}: {error}"

    def of_fork():
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            asyncio._set_running_loop(None)
            told = asyncio.run(refused(of_loop()))
            os.write(writing, told.encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as told:
            return told.read()

    async def main():
        os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
        try:
            await aiogpu.init(address="ray")
        except aiogpu.errors.NodeError:
            print("nobody there")
        del os.environ["RAY_ADDRESS"]
        async with aiogpu.init(address="ray", num_cpus=1, num_gpus=1):
            print(await refused(aiogpu.init(address="ray")))
            print(await add.remote(1), await asyncio.to_thread(in_another_loop))
            other = asyncio.to_thread(in_another_loop, num_gpus=2)
            print(await refused(other))
            print(await add.remote(2))
            print(of_fork())
            print(await add.remote(3), flush=True)
            sys.stdin.readline()

    asyncio.run(main())
"""


def test_a_started_cluster_is_shared_by_loops_and_leaves_no_process(place):
    out = program.run(SHARED)
    lines = [line for line in out.splitlines() if "raylet" not in line]
    assert lines[0] == "nobody there"
    assert lines[1].startswith("NodeRunningError")
    assert lines[2] == "2 3"
    assert lines[3].startswith("NodeError")
    assert "in a Ray cluster already" in lines[3]
    assert lines[4] == "3"
    assert lines[5].startswith("NodeError")
    assert "is a fork of one" in lines[5]
    assert lines[6:] == ["4"]
    assert not processes(place)


JOINING_BESIDE = """
import asyncio, aiogpu

async def main():
    async with aiogpu.init(address="ray"):
        print("CPUs beside:", (await aiogpu.cluster_resources())["CPU"] != 61)

asyncio.run(main())
"""


def test_a_cluster_that_runs_by_itself_is_joined_without_a_name(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with Cluster(num_cpus=61) as cluster:
        out = program.run(JOINING_BESIDE, **cluster.variables)
    assert "CPUs beside: False" in out.splitlines()


def test_a_program_that_is_killed_takes_its_cluster_with_it(place):
    source = """
        import asyncio, aiogpu
        from tests.contract.device_tasks import wait_for_ever
        from tests.contract.tasks import add

        async def main():
            await aiogpu.init(address="ray", num_cpus=2)
            running = wait_for_ever.remote()
            await add.remote(1)
            print("ready", flush=True)
            await running

        asyncio.run(main())
    """
    running = program.start(source)
    assert running.stdout.readline() == "ready\n"
    assert processes(place) > {running.pid}
    running.send_signal(signal.SIGKILL)
    running.communicate()
    until_then = time.monotonic() + ENDED_WITHIN
    while left := processes(place):
        assert time.monotonic() < until_then, left
        select.select([], [], [], 0.2)


GIVEN_UP = """
    import asyncio
    import aiogpu
    from tests.contract.tasks import add

    async def main():
        try:
            async with asyncio.timeout(0.5):
                await aiogpu.init(address="ray", num_cpus=1)
        except TimeoutError:
            print("given up", flush=True)
        async with aiogpu.init(address="ray", num_cpus=2):
            print(await add.remote(1), (await aiogpu.cluster_resources())["CPU"])

    asyncio.run(main())
"""


def test_a_cancelled_start_does_not_block_the_next(place):
    out = program.run(GIVEN_UP)
    assert out.splitlines()[0] == "given up"
    assert out.splitlines()[-1] == "2 2.0"
    assert not processes(place)


HANGING = """
    import asyncio, sys, time
    import aiogpu
    from aiogpu.engines.ray import cluster

    cluster.JOIN_LIMIT = 1.0

    async def main():
        before = time.monotonic()
        try:
            await aiogpu.init(address="ray")
        except aiogpu.errors.NodeError as error:
            print(error, time.monotonic() - before < 20, flush=True)

    asyncio.run(main())
"""


def greet_only(server: socket.socket) -> None:
    """Send the first bytes of a gRPC server, and nothing more."""
    with ExitStack() as taken, suppress(OSError):  # which is the end of the test
        while True:
            one = taken.enter_context(server.accept()[0])
            one.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))


def test_a_program_gives_up_a_join_that_hangs(place):
    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = threading.Thread(target=greet_only, args=[server])
        greeting.start()
        where = "{}:{}".format(*server.getsockname())
        out = program.run(HANGING, RAY_ADDRESS=where)
        server.shutdown(socket.SHUT_RDWR)
        greeting.join()
    assert f"what answers at {where} was not joined within 1 s" in out
    assert out.endswith("True\n")


LOSING = """
    import asyncio, sys, time
    import aiogpu
    from aiogpu.engines.ray import engine
    from tests.contract.device_tasks import wait_for_ever
    from tests.contract.actor_classes import Counter
    from tests.contract.tasks import add

    engine.LOST_AFTER = 12.0

    async def main():
        await aiogpu.init()
        assert await add.remote(1) == 2
        actor = Counter.remote()
        await actor
        running = [wait_for_ever.remote() for _ in range(4)]
        print("ready", flush=True)
        found = await asyncio.gather(*running, return_exceptions=True)
        print([type(one).__name__ for one in found], flush=True)
        try:
            add.remote(1)
        except aiogpu.NodeDiedError as error:
            print("has not answered" in str(error), flush=True)
        try:
            await aiogpu.status()
        except aiogpu.NodeDiedError as error:
            print("has not answered" in str(error), flush=True)
        try:
            await actor.add.remote(1)
        except aiogpu.NodeDiedError as error:
            print("has not answered" in str(error), flush=True)
        aiogpu.kill(actor)
        before = time.monotonic()
        await aiogpu.shutdown()
        print(time.monotonic() - before < 5, flush=True)

    asyncio.run(main())
    print("end", flush=True)
"""


def test_every_handle_fails_when_the_head_is_killed():
    with Cluster(num_cpus=2) as cluster:
        address = {"AIOGPU_ADDRESS": "ray", "RAY_ADDRESS": cluster.address}
        running = program.start(LOSING, **address, **cluster.variables)
        line = running.stdout.readline()
        assert line == "ready\n", running.communicate()
        threading.Timer(0.5, cluster.kill, [cluster.nodes[0]]).start()
        try:
            out, err = running.communicate(timeout=200)
        finally:
            running.kill()
        assert out.splitlines() == [
            str(["NodeDiedError"] * 4),
            *("True", "True", "True", "True", "end"),
        ], err
        assert running.returncode == 0, err
