"""A node of another process, and programs that end, stop or are cut off at any step."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import aiogpu
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
from tests.contract import served, stream_tasks, tasks
from tests.contract.actor_classes import Counter
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
from tests.support.turns import no_complaints, turns
from tests.support.until import until

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

STEPS: Final = (
    *("connected", "greeted", "joining", "joined", "flooding", "waiting", "acting"),
    *("leasing", "having", "streaming", "receiving", "asking", "departing"),
)
"""How far a client comes before it ends."""
ROUNDS: Final = 4


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


def doing(step: str, client: int) -> list[Message]:
    """What a client has said when it comes to a step, after it has joined."""
    plain = declared(1, func_of(tasks.echo))
    deaf = declared(1, func_of(tasks.swallow))
    counters = declared(1, func_of(Counter.options(num_gpus=0.5)))
    whole = func_of(tasks.echo.options(num_gpus=1))
    lease = declared(1, whole, is_lease=True, is_endless=True)
    numbers = declared(1, func_of(stream_tasks.numbers))
    nowhere = pickle.dumps((("/nowhere", "x"), {}))
    much = pickle.dumps(((b"x" * 50_000_000,), {}))
    names = [-((client << NUMBER_BITS) + number) for number in range(1, 5)]
    steps: dict[str, list[Message]] = {
        "flooding": [plain, *(Submit(0, n, 1, NO_ARGUMENTS) for n in range(1, 3000))],
        "waiting": [deaf, *(Submit(0, n, 1, nowhere) for n in range(1, 20))],
        "acting": [
            counters,
            *(Make(name, 1, NO_ARGUMENTS, "", "", False) for name in names),
        ],
        "leasing": [lease, TakeLease(1, 1), TakeLease(2, 1)],
        "having": [Put(name, much[:1_000_000]) for name in names],
        "streaming": [
            numbers,
            Submit(0, 1, 1, pickle.dumps(((10**9,), {}))),
            ChildDemand(1, 10**6),
        ],
        "receiving": [plain, Submit(0, 1, 1, much)],
        "asking": [Inquire(number, "status", 0) for number in range(1, 50)],
        "departing": [plain, Submit(0, 1, 1, NO_ARGUMENTS), Depart()],
    }
    return steps.get(step, [])


def go_until(step: str, client: RawClient) -> None:
    """Do what comes up to a step, and leave the rest undone."""
    if step in ("connected", "greeted"):
        return
    client.join()
    client.say(*doing(step, client.number))


@pytest.mark.slow
async def test_one_that_hangs_up_at_any_step_leaves_nothing(node: Service) -> None:
    def hang_up(step: str) -> None:
        with RawClient(node, greets=step != "connected") as client:
            go_until(step, client)

    async with watching(node):
        for step in STEPS:
            served = tasks.add.remote(1, 2)
            await asyncio.to_thread(hang_up, step)
            assert await served == 3
        await all_is_free()


@pytest.mark.slow
async def test_many_that_hang_up_leave_no_descriptor(node: Service) -> None:
    async with watching(node):
        before: list[str] = []
        for turn in range(ROUNDS):
            for step in STEPS:
                with RawClient(node, greets=step != "connected") as client:
                    await asyncio.to_thread(go_until, step, client)
            await all_is_free()
            if turn == 1:
                before = node.descriptors
                children = node.children
        async with asyncio.timeout(LIMIT):
            while len(node.descriptors) > len(before) + 8:
                await asyncio.sleep(0)
        assert node.children <= children + 1


KILLED: Final = {
    "actor": "a = Counter.options(num_gpus=1).remote()\nawait a.add.remote()\nsay()",
    "lease": "gpu = await aiogpu.lease(num_gpus=1)\nsay()",
    "stream": "async for _ in stream_tasks.numbers.remote(10**9):\n    say()",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KILLED))
async def test_a_program_that_is_killed_leaves_nothing(
    node: Service, kind: str
) -> None:
    source = f"def say(): print('here', flush=True)\n{KILLED[kind]}\n"
    source += "await asyncio.Event().wait()"
    async with watching(node):
        running = start(program(node.path, source))
        assert running.stdout is not None
        assert await asyncio.to_thread(running.stdout.readline) == "here\n"
        running.kill()
        await asyncio.to_thread(running.communicate)


@pytest.mark.slow
async def test_a_detached_actor_is_found_by_another_program(node: Service) -> None:
    source = (
        "a = Counter.options(name='kept', lifetime='detached', num_gpus=1).remote()\n"
        "print(await a.add.remote(5), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    running = start(program(node.path, source))
    out, err = await asyncio.to_thread(running.communicate)
    assert out == "5\n", err
    async with aiogpu.init(address=node.path, log_to_driver=False):
        found = aiogpu.get_actor("kept")
        assert await found.add.remote(1) == 6
        assert (await aiogpu.available_resources())["GPU"] == 0
        aiogpu.kill(found)
        await all_is_free()
        with pytest.raises(aiogpu.errors.ActorNameError):
            await aiogpu.get_actor("kept")


async def test_a_name_that_is_taken(node: Service) -> None:
    async with aiogpu.init(address=node.path):
        first = await Counter.options(name="one").remote()
        second = Counter.options(name="one").remote()
        for refused in (second, second.add.remote(1)):
            with pytest.raises(
                aiogpu.errors.ActorNameError, match="'one' lives already"
            ):
                await refused
        assert await first.add.remote(1) == 1


@pytest.mark.slow
async def test_a_fork_that_outlives_a_program_keeps_nothing(node: Service) -> None:
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
        running = subprocess.Popen(
            [sys.executable, "-c", program(node.path, source)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert running.stdout is not None
        assert await asyncio.to_thread(running.stdout.readline) == "here\n"
        await all_is_free()
        await asyncio.to_thread(running.communicate, "x")


async def test_one_that_does_not_read_slows_only_itself(node: Service) -> None:
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            client.say(declared(1, func_of(tasks.echo)))
            much = pickle.dumps(((b"x" * 100_000,), {}))
            asked = [Submit(0, number, 1, much) for number in range(1, 200)]
            before = node.memory
            saying = asyncio.create_task(asyncio.to_thread(client.say, *asked))
            for number in range(50):
                assert await tasks.add.remote(number, 1) == number + 1
            assert node.memory < before + 200 * 100_000 * 3
            # It may read on.
            told = [await asyncio.to_thread(client.hear, ChildDone) for _ in range(199)]
            assert {one.child for one in told} == set(range(1, 200))
            await saying


async def test_a_stopped_one_that_floods_can_be_killed(node: Service) -> None:
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            client.say(declared(1, func_of(stream_tasks.numbers)))
            many = pickle.dumps(((10**9,), {}))
            client.say(Submit(0, 1, 1, many), ChildDemand(1, 1 << 40))
            for number in range(50):
                assert await tasks.add.remote(number, 1) == number + 1


async def test_all_that_waits_hears_of_the_death_of_a_node(
    node: Service, gate: Gate
) -> None:
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
        for one in (running, waiting):
            with pytest.raises(aiogpu.NodeDiedError, match="aiogpu start --head"):
                await one
        with pytest.raises(aiogpu.NodeDiedError):
            async for _ in stream:
                pass
        for ask in (actor.add.remote, lambda: tasks.add.remote(1), aiogpu.status):
            with pytest.raises(aiogpu.NodeDiedError):
                await ask(1) if ask is tasks.add.remote else await ask()
    await until(lambda: not lease.is_held)
    await session.shutdown()
    with pytest.raises(aiogpu.NodeDiedError, match="aiogpu start --head"):
        await aiogpu.init(address=node.path)
    # [B7] Its zygote has seen its end, and clears up after it.
    await until(lambda: not os.listdir(os.environ["XDG_RUNTIME_DIR"]))


async def test_a_program_joins_again_after_the_death_of_its_node(
    node: Service,
) -> None:
    async with aiogpu.init(address=node.path, log_to_driver=False):
        first = Counter.remote()
        assert await first.add.remote() == 1
        with pytest.raises(aiogpu.errors.NodeRunningError):
            await aiogpu.init(address=node.path)
        node.end(signal.SIGKILL)
        with pytest.raises(
            aiogpu.NodeDiedError, match=r"aiogpu\.init\(address=.*joins it"
        ):
            await asyncio.gather(*(tasks.add.remote(number) for number in range(100)))
        os.unlink(node.path)
        again = served.forker.fork(node.path, {"num_cpus": 2, "log_to_driver": False})
        second = Service(node.path, again)
        try:
            async with aiogpu.init(address=node.path, log_to_driver=False):
                assert await tasks.add.remote(1, 2) == 3
                with pytest.raises(aiogpu.errors.NodeError):
                    await first.add.remote()
        finally:
            second.end()
    await until(lambda: not os.listdir(os.environ["XDG_RUNTIME_DIR"]))


async def test_an_orderly_end_of_a_node_is_told_as_such(
    node: Service, gate: Gate
) -> None:
    async with aiogpu.init(address=node.path, log_to_driver=False):
        running = tasks.gated_coroutine.remote(gate.path, "a")
        await gate.entered("a")
        os.kill(node.pid, signal.SIGTERM)
        with pytest.raises(aiogpu.errors.NodeError) as told:
            await running
        assert not isinstance(told.value, aiogpu.NodeDiedError)
        with pytest.raises(aiogpu.errors.NodeClosedError, match="stopped"):
            await tasks.add.remote(1)


TWINS: Final = """
import asyncio, os, sys, aiogpu, twin

@aiogpu.remote
def told():
    import twin
    return twin.NAME, os.getcwd(), os.environ["OF_TWIN"]

@aiogpu.remote
def pid():
    return os.getpid()

async def main():
    async with aiogpu.init(address=sys.argv[1]):
        print(*await told.remote(), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_each_program_has_its_own_modules_and_place(
    node: Service, tmp_path: Path
) -> None:
    running = []
    for name in ("one", "two"):
        place = tmp_path / name
        place.mkdir()
        (place / "twin.py").write_text(f"NAME = {name!r}\n")
        (place / "script.py").write_text(TWINS)
        running.append(
            subprocess.Popen(
                [sys.executable, str(place / "script.py"), node.path],
                env=environment(OF_TWIN=name),
                cwd=place,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for name, one in zip(("one", "two"), running, strict=True):
        out, _ = await asyncio.to_thread(one.communicate, "")
        assert out == f"{name} {tmp_path / name} {name}\n"


async def test_a_value_is_dropped_when_the_node_has_just_gone(node: Service) -> None:
    """Of its two connections that for descriptors may be the first to end."""

    @aiogpu.remote
    def make() -> memoryview:
        return memoryview(bytes(1 << 20))

    async with no_complaints():
        session = await aiogpu.init(address=node.path, log_to_driver=False)
        view = await make.remote()
        connection = session._session._engine.loans.descriptors._socket  # type: ignore[attr-defined]
        assert connection is not None
        connection.shutdown(socket.SHUT_RD)  # as the node's end of it does
        del view
        await turns()
        await aiogpu.shutdown()
