"""Programs on one node: what they share, how they end, and what they leave.

A program or the node ends, stops or is cut off at any step; others do not notice.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from operator import le
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from aiogpu.errors import ActorNameError
from aiogpu.serialization.serializer import NO_ARGUMENTS
from aiogpu.wire.messages import (
    NUMBER_BITS,
    ChildDemand,
    ChildDone,
    Depart,
    Inquire,
    Make,
    Message,
    Put,
    Submit,
    TakeLease,
)
from tests.contract import served, stream_tasks, tasks, value_tasks
from tests.contract.actor_classes import Counter
from tests.contract.node_here import Here
from tests.contract.raw_client import (
    LIMIT,
    RawClient,
    Service,
    all_is_free,
    declared,
    func_of,
    program,
    service,
    watching,
)
from tests.support.gate import Gate
from tests.support.program import environment, start
from tests.support.waits import no_complaints, turns, until

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

MIB: Final = 1 << 20
STEPS: Final = (
    *("connected", "greeted", "joining", "joined", "flooding", "waiting", "acting"),
    *("leasing", "having", "streaming", "receiving", "asking", "departing"),
)
"""The steps at which a client ends."""
ROUNDS: Final = 4


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


def begin(
    *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Start a Python program that reads stdin."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(**variables),
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def read_line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return (await asyncio.to_thread(running.stdout.readline)).rstrip()


async def end(*running: subprocess.Popen[str]) -> None:
    for process in running:
        await asyncio.to_thread(process.communicate, "\n")
        assert process.returncode == 0


def doing(step: str, client: int) -> list[Message]:
    """Return what a client that has joined sends up to a step."""
    plain = declared(1, func_of(tasks.echo))
    deaf = declared(1, func_of(tasks.swallow))
    counters = declared(1, func_of(Counter.options(num_gpus=0.5)))
    whole = func_of(tasks.echo.options(num_gpus=1))
    lease = declared(1, whole, is_lease=True, is_endless=True)
    numbers = declared(1, func_of(stream_tasks.numbers))
    no: Any = ("", "", False)
    many = pickle.dumps(((10**9,), {}))
    nowhere = pickle.dumps((("/nowhere", "x"), {}))
    much = pickle.dumps(((b"x" * 50_000_000,), {}))
    names = [-((client << NUMBER_BITS) + number) for number in range(1, 5)]
    steps: dict[str, list[Message]] = {
        "flooding": [plain, *(Submit(0, n, 1, NO_ARGUMENTS) for n in range(1, 3000))],
        "waiting": [deaf, *(Submit(0, n, 1, nowhere) for n in range(1, 20))],
        "acting": [counters, *(Make(name, 1, NO_ARGUMENTS, *no) for name in names)],
        "leasing": [lease, TakeLease(1, 1), TakeLease(2, 1)],
        "having": [Put(name, much[:1_000_000]) for name in names],
        "streaming": [numbers, Submit(0, 1, 1, many), ChildDemand(1, 10**6)],
        "receiving": [plain, Submit(0, 1, 1, much)],
        "asking": [Inquire(number, "status", 0) for number in range(1, 50)],
        "departing": [plain, Submit(0, 1, 1, NO_ARGUMENTS), Depart()],
    }
    return steps.get(step, [])


async def hang_up_at_each_step(node: Service) -> None:
    """Hang up after each step, while this program's tasks run."""

    def hang_up(step: str) -> None:
        with RawClient(node, greets=step != "connected") as client:
            if step not in ("connected", "greeted"):
                client.join()
                client.say(*doing(step, client.number))

    for step in STEPS:
        served = tasks.add.remote(1, 2)
        await asyncio.to_thread(hang_up, step)
        assert await served == 3
    await all_is_free()


@pytest.mark.slow
async def test_programs_that_hang_up_at_any_step_leave_nothing(node: Service) -> None:
    async with watching(node):
        for _ in range(ROUNDS // 2):
            await hang_up_at_each_step(node)
        before, children = len(node.descriptors), node.children
        for _ in range(ROUNDS // 2):
            await hang_up_at_each_step(node)
        await until(lambda: len(node.descriptors) <= before + 8)
        assert node.children <= children + 1


KILLED: Final = {
    "actor": "a = Counter.options(num_gpus=1).remote()\nawait a.add.remote()\nsay()",
    "lease": "gpu = await aiogpu.lease(num_gpus=1)\nsay()",
    "stream": "async for _ in stream_tasks.numbers.remote(10**9):\n    say()",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KILLED))
async def test_a_killed_program_leaves_nothing(node: Service, kind: str) -> None:
    source = f"def say(): print('here', flush=True)\n{KILLED[kind]}\n"
    source += "await asyncio.Event().wait()"
    async with watching(node):
        running = start(program(node.path, source))
        assert await read_line(running) == "here"
        running.kill()
        await asyncio.to_thread(running.communicate)


@pytest.mark.slow
async def test_a_fork_that_outlives_its_program_holds_nothing(node: Service) -> None:
    source = (
        "a = Counter.options(num_gpus=1).remote()\n"
        "await a.add.remote()\n"
        "if os.fork() == 0:\n"
        "    os.read(0, 1)\n"
        "    os._exit(0)\n"
        "print('here', flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    async with watching(node):
        running = begin("-c", program(node.path, source))
        assert await read_line(running) == "here"
        await all_is_free()
        await asyncio.to_thread(running.communicate, "x")


async def test_a_program_that_does_not_read_slows_only_itself(node: Service) -> None:
    """Its tasks wait until it reads on: it may be stopped by Ctrl-Z."""
    calls, size = 1000, 100_000

    @aiogpu.remote
    def make(size: int) -> bytes:
        return bytes(size)

    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            much = pickle.dumps(((size,), {}))
            client.say(declared(1, func_of(make)))
            before = node.memory
            client.say(*(Submit(0, number, 1, much) for number in range(1, calls + 1)))
            async with asyncio.timeout(LIMIT):
                while True:
                    status = await aiogpu.status()
                    clients = {client.id: client for client in status.clients}
                    seen = clients[client.number]
                    if seen.waiting and not seen.running:
                        break
            assert "to read its results" in status.waiting[0].reason
            for number in range(50):
                assert await tasks.add.remote(number, 1) == number + 1
            assert node.memory < before + calls * size
            # The client reads on.
            answers = [
                await asyncio.to_thread(client.hear, ChildDone) for _ in range(calls)
            ]
            assert {answer.child for answer in answers} == {*range(1, calls + 1)}


async def test_a_flooded_program_can_hang_up(node: Service) -> None:
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            client.say(declared(1, func_of(stream_tasks.numbers)))
            many = pickle.dumps(((10**9,), {}))
            before = node.memory
            client.say(Submit(0, 1, 1, many), ChildDemand(1, 1 << 40))
            for number in range(100):
                assert await tasks.add.remote(number, 1) == number + 1
            assert node.memory < before + 20 * MIB


async def test_every_call_raises_when_the_node_dies(node: Service, gate: Gate) -> None:
    session = await aiogpu.init(address=node.path, log_to_driver=False)
    actor = Counter.remote()
    await actor.add.remote()
    stream = stream_tasks.numbers.remote(10**9)
    assert await anext(stream) == 0
    lease = await aiogpu.lease(num_gpus=1)
    running = tasks.gated.remote(gate.path, "a")
    await gate.entered("a")
    waiting = tasks.add.options(num_gpus=1).remote(1)
    called = actor.add.remote()
    await called
    node.end(signal.SIGKILL)
    async with asyncio.timeout(5):
        for handle in (running, waiting):
            with pytest.raises(aiogpu.NodeDiedError, match="aiogpu start --head"):
                await handle
        with pytest.raises(aiogpu.NodeDiedError):
            async for _ in stream:
                pass
        for ask in (actor.add.remote, lambda: tasks.add.remote(1), aiogpu.status):
            with pytest.raises(aiogpu.NodeDiedError):
                await ask()
    await until(lambda: not lease.is_held)
    await session.shutdown()
    with pytest.raises(aiogpu.NodeDiedError, match="aiogpu start --head"):
        await aiogpu.init(address=node.path)
    # The zygote sees the node's end, and removes the node's directory.
    await until(lambda: not os.listdir(os.environ["XDG_RUNTIME_DIR"]))


TWINS: Final = """
import asyncio, os, sys, aiogpu, twin

@aiogpu.remote
def surroundings():
    import twin
    return twin.NAME, os.getcwd(), os.environ["OF_TWIN"]

async def main():
    async with aiogpu.init(address=sys.argv[1]):
        print(*await surroundings.remote(), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_each_program_has_its_modules_and_cwd(
    node: Service, tmp_path: Path
) -> None:
    running = []
    for name in ("one", "two"):
        place = tmp_path / name
        place.mkdir()
        (place / "twin.py").write_text(f"NAME = {name!r}\n")
        (place / "script.py").write_text(TWINS)
        script = str(place / "script.py")
        running.append(begin(script, node.path, cwd=place, OF_TWIN=name))
    for name, process in zip(("one", "two"), running, strict=True):
        out, _ = await asyncio.to_thread(process.communicate, "")
        assert out == f"{name} {tmp_path / name} {name}\n"


async def test_a_value_can_be_dropped_after_its_node(node: Service) -> None:
    """The connection for descriptors may end before the other one."""

    @aiogpu.remote
    def make() -> memoryview:
        return memoryview(bytes(1 << 20))

    async with no_complaints():
        session = await aiogpu.init(address=node.path, log_to_driver=False)
        view = await make.remote()
        connection = session._session._engine.loans.descriptors._socket  # type: ignore[attr-defined]
        assert connection is not None
        connection.shutdown(socket.SHUT_RD)  # as when the node ends
        del view
        await turns()
        await aiogpu.shutdown()


SHOWS_OPTIONS = """
@aiogpu.remote
def options():
    import sys
    return os.getpid(), sys.flags.dev_mode, "error::BytesWarning" in sys.warnoptions
print(*await options.remote(), flush=True)
await asyncio.to_thread(sys.stdin.readline)
"""


async def test_processes_of_one_program_share_workers(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have the interpreter options of their program, and are ended with it."""
    monkeypatch.setattr("aiogpu.runtime.zygote.zygotes.UNUSED", 0.05)
    source = program(here.path, SHOWS_OPTIONS)
    first = begin("-c", source)
    worker, *options = (await read_line(first)).split()
    assert options == ["False", "False"]
    second = begin("-c", source)
    assert await read_line(second) == f"{worker} False False"
    flags = ("-X", "dev", "-W", "error::BytesWarning")
    other = begin(*flags, "-c", source, OTHER_PROGRAM="1")
    different, *options = (await read_line(other)).split()
    assert (different != worker, *options) == (True, "True", "True")
    known = here.engine._supervisor.clients._zygotes.config.programs
    assert len(known) == 2
    await end(first, second, other)
    # Idle workers keep their program known; see `WARM`.
    for idle in list(here.engine._driver.workers.values()):
        os.kill(idle.pid, signal.SIGKILL)
    await until(lambda: not known)


LEAVES = """
a = Counter.options(name="kept", lifetime="detached", num_gpus=1).remote()
print(await a.add.remote(5), flush=True)
os.kill(os.getpid(), 9)
"""


async def test_a_detached_actor_outlives_its_program(here: Here) -> None:
    """The node keeps the program's environment: the actor may have to be restarted."""
    leaving = begin("-c", program(here.path, LEAVES), OTHER_PROGRAM="1")
    assert await read_line(leaving) == "5"
    await asyncio.to_thread(leaving.communicate)
    clients = here.engine._supervisor.clients
    (environ,) = clients._zygotes.config.programs
    await until(lambda: clients.by_id == {})
    assert clients.wants(environ)
    (seen,) = (await here.engine.status()).clients
    name = Path(sys.executable).name
    assert (seen.has_left, seen.name, seen.pid) == (True, name, leaving.pid)
    async with here.join():
        actor = aiogpu.get_actor("kept")
        assert await actor.add.remote(1) == 6
        assert (await aiogpu.available_resources())["GPU"] == 0
        aiogpu.kill(actor)
        await all_is_free()
        with pytest.raises(ActorNameError):
            await aiogpu.get_actor("kept")
    await until(lambda: not clients.wants(environ))


MAKES = """
a = Counter.options(name="shared", num_gpus=1).remote()
print(await a.pid.remote(), flush=True)
await asyncio.to_thread(sys.stdin.readline)
"""


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_actor_ends_with_its_program(is_killed: bool, here: Here) -> None:
    """It ends although another program holds a handle."""
    maker = begin("-c", program(here.path, MAKES))
    pid = await read_line(maker)
    async with here.join():
        actor = await aiogpu.get_actor("shared")
        assert await actor.add.remote() == 1
        if is_killed:
            maker.kill()
        await asyncio.to_thread(maker.communicate, "\n")
        await until(lambda: not os.path.exists(f"/proc/{pid}"))
        await all_is_free()
        python = Path(sys.executable).name
        why = f"the program that had started it ({python}, pid {maker.pid}) ended. "
        advice = "An actor with lifetime='detached' outlives its program."
        with pytest.raises(aiogpu.ActorDiedError) as died:
            await actor.add.remote()
        assert str(died.value) == f"Counter 'shared' is dead: {why}{advice}"
        with pytest.raises(ActorNameError, match="no actor named 'sha"):
            await aiogpu.get_actor("shared")


def footprint(node: Service) -> tuple[int, int, int]:
    """Count a node's descriptors, mappings of shared memory, and children."""
    maps = Path(f"/proc/{node.pid}/maps").read_text().splitlines()
    mapped = sum("memfd:" in line for line in maps)
    return len(node.descriptors), mapped, node.children


@pytest.mark.parametrize(
    "rounds", [4, pytest.param(20, marks=pytest.mark.slow)], ids=str
)
async def test_joining_and_leaving_leaves_nothing(rounds: int, no_leaks: None) -> None:
    large: Any = b"x" * MIB
    with service() as node:
        first = (0, 0, 0)
        for turn in range(rounds):
            async with aiogpu.init(address=node.path, log_to_driver=False):
                put = aiogpu.put(large)
                assert await value_tasks.give.remote(put) == large
                actor = Counter.remote()
                assert await actor.add.remote() == 1
                async with aiogpu.lease(num_gpus=0.5):
                    assert await tasks.add.options(num_gpus=0.5).remote(1, 2) == 3
                del put, actor
            async with aiogpu.init(address=node.path, log_to_driver=False):
                total = await aiogpu.cluster_resources()
                while await aiogpu.available_resources() != total:
                    await asyncio.sleep(0)
            first = max(first, footprint(node)) if turn < 2 else first
        # The node clears up first; one more worker may be idle.
        most = first[0] + 4, first[1], first[2] + 1
        await until(lambda: all(map(le, footprint(node), most)))


async def test_a_cancelled_handle_fails_dependents(no_leaks: None, gate: Gate) -> None:
    """Only the program tells the node of the cancel."""
    with service(num_cpus=3) as node:
        async with watching(node), asyncio.timeout(LIMIT):
            unwanted = tasks.gated.remote(gate.path, "unwanted")
            dependents = [
                tasks.add.remote(unwanted),
                value_tasks.get_nested.remote({"handle": unwanted}),
                value_tasks.await_nested.remote({"handle": unwanted}),
            ]
            await gate.entered("unwanted")
            unwanted.cancel()
            for handle in dependents:
                with pytest.raises(aiogpu.TaskCancelledError, match="was cancelled"):
                    await handle


FORKED = """
import os, signal, sys
from tests.contract import served
served.forker = served.Forker()
given = {"num_cpus": 1, "num_gpus": 0, "log_to_driver": False}
pid = served.forker.fork(sys.argv[1], given)
fork = os.fork()
if not fork:
    signal.pause()  # this fork keeps the forker's stdin open
print(pid, fork, flush=True)
signal.pause()
"""


def test_a_forked_service_ends_with_its_test(runtime_directory: Path) -> None:
    """The test's process is killed, and a fork of it lives on."""
    place = runtime_directory / "s"
    killed = start(FORKED, str(place))
    assert killed.stdout is not None
    service, fork = map(int, killed.stdout.readline().split())
    ended = os.pidfd_open(service)
    killed.kill()
    try:
        served.wait_for_end(ended)
    finally:
        os.kill(fork, signal.SIGKILL)
        killed.communicate()
        place.unlink(missing_ok=True)
