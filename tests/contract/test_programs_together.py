"""Programs on one node: what they share, what they bring, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from operator import le
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks, value_tasks
from tests.contract.actor_classes import Counter
from tests.contract.node_here import Here, node_here
from tests.contract.raw_client import (
    LIMIT,
    Service,
    all_is_free,
    program,
    service,
    watching,
)
from tests.support.gate import Gate
from tests.support.program import environment
from tests.support.until import until

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

MIB = 1 << 20


@pytest.fixture
async def here(no_leaks: None, runtime_directory: Path) -> AsyncIterator[Here]:
    async with node_here(runtime_directory) as opened:
        yield opened


def begin(source: str, *flags: str, **variables: str) -> subprocess.Popen[str]:
    """A program that may be told to go on, by its stdin."""
    return subprocess.Popen(
        [sys.executable, *flags, "-c", source],
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def said(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return (await asyncio.to_thread(running.stdout.readline)).rstrip()


async def end(*running: subprocess.Popen[str]) -> None:
    for one in running:
        await asyncio.to_thread(one.communicate, "\n")
        assert one.returncode == 0


OWN_WORKER = """
print(await tasks.pid.remote(), flush=True)
await asyncio.to_thread(sys.stdin.readline)
"""


async def test_two_processes_of_one_program_share_workers(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another program, by a variable, it has others; none is known for long."""
    monkeypatch.setattr("aiogpu.runtime.zygote.generations.UNUSED", 0.05)
    source = program(here.path, OWN_WORKER)
    first = begin(source)
    worker = await said(first)
    second = begin(source)
    assert await said(second) == worker
    other = begin(source, OTHER_PROGRAM="1")
    assert await said(other) != worker
    zygotes = here.engine._supervisor.clients._zygotes
    known = zygotes.config.programs
    assert len(known) == 2
    await end(first, second, other)
    # Workers that stand idle keep it; see `WARM`.
    for idle in list(here.engine._driver.workers.values()):
        os.kill(idle.pid, signal.SIGKILL)
    await until(lambda: not known)


LEAVES = """
a = Counter.options(name="kept", lifetime="detached").remote()
print(await a.add.remote(), flush=True)
"""


async def test_what_a_program_has_left_is_started_again_as_it_was(here: Here) -> None:
    leaving = begin(program(here.path, LEAVES), OTHER_PROGRAM="1")
    assert await said(leaving) == "1"
    await end(leaving)
    zygotes = here.engine._supervisor.clients._zygotes
    (left,) = zygotes.config.programs
    clients = here.engine._supervisor.clients
    assert clients.wants(left)
    (seen,) = (await here.engine.status()).clients
    assert (seen.has_left, seen.name, seen.pid) == (True, "python", leaving.pid)
    await end(begin(program(here.path, 'aiogpu.kill(await aiogpu.get_actor("kept"))')))
    await until(lambda: not clients.wants(left))


MAKES = """
a = Counter.options(name="shared", num_gpus=1).remote()
print(await a.pid.remote(), flush=True)
await asyncio.to_thread(sys.stdin.readline)
"""
USES = """
a = await aiogpu.get_actor("shared")
print(await a.add.remote(), flush=True)
await asyncio.to_thread(sys.stdin.readline)
try:
    await a.add.remote()
except aiogpu.ActorDiedError as error:
    print(error, flush=True)
try:
    await aiogpu.get_actor("shared")
except aiogpu.errors.ActorNameError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_actor_ends_with_its_program_though_another_holds_it(
    is_killed: bool, here: Here
) -> None:
    maker = begin(program(here.path, MAKES))
    actor = await said(maker)
    user = begin(program(here.path, USES))
    assert await said(user) == "1"
    if is_killed:
        maker.kill()
    await asyncio.to_thread(maker.communicate, "\n")
    await until(lambda: not os.path.exists(f"/proc/{actor}"))
    async with here.join():
        await all_is_free()
    told, _ = await asyncio.to_thread(user.communicate, "\n")
    died, unnamed = told.splitlines()
    why = f"the program that had started it (python, pid {maker.pid}) ended. "
    advice = "An actor with lifetime='detached' outlives its program."
    assert died == f"Counter 'shared' is dead: {why}{advice}"
    assert unnamed.startswith("no actor named 'shared' lives on this node.")


FLAGS = """
@aiogpu.remote
def flags():
    import sys
    return sys.flags.dev_mode, "error::BytesWarning" in sys.warnoptions
print(*await flags.remote(), flush=True)
await asyncio.to_thread(sys.stdin.readline)
"""


async def test_workers_have_the_options_of_the_programs_interpreter(here: Here) -> None:
    given = ("-X", "dev", "-W", "error::BytesWarning")
    source = program(here.path, FLAGS)
    programs = [begin(source, *given), begin(source)]
    assert [await said(one) for one in programs] == ["True True", "False False"]
    await end(*programs)


STREAMS = """
async for number in stream_tasks.numbers.remote(10**9):
    if not number:
        print("here", flush=True)
"""


async def test_a_program_that_is_stopped_slows_only_itself(no_leaks: None) -> None:
    with service(num_cpus=3) as node:
        async with watching(node):
            stopped = begin(program(node.path, STREAMS))
            assert await said(stopped) == "here"
            os.kill(stopped.pid, signal.SIGSTOP)
            before = node.memory
            for number in range(300):
                assert await tasks.add.remote(number, 1) == number + 1
            assert node.memory < before + 20 * MIB
            os.kill(stopped.pid, signal.SIGCONT)
            stopped.kill()
            await asyncio.to_thread(stopped.communicate)


def footprint(node: Service) -> tuple[int, int, int]:
    """Descriptors, mappings of shared memory, and children of a node."""
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
                put = await aiogpu.put(large)
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
        # Once what has ended is cleared away; a worker more may stand idle.
        most = first[0] + 4, first[1], first[2] + 1
        await until(lambda: all(map(le, footprint(node), most)))


async def test_a_cancelled_handle_fails_who_was_given_it(
    no_leaks: None, gate: Gate
) -> None:
    """The node learns of the cancel by the program alone."""
    with service(num_cpus=3) as node:
        async with watching(node), asyncio.timeout(LIMIT):
            unwanted = tasks.gated.remote(gate.path, "unwanted")
            needs_it = [
                tasks.add.remote(unwanted),
                value_tasks.get_nested.remote({"handle": unwanted}),
                value_tasks.await_nested.remote({"handle": unwanted}),
            ]
            await gate.entered("unwanted")
            unwanted.cancel()
            for handle in needs_it:
                with pytest.raises(aiogpu.TaskCancelledError, match="was cancelled"):
                    await handle
