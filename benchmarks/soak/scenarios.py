"""The two scenarios of the soak: a node inside a program, and a node as a service.

Load and idle phases alternate. Under load, processes are killed and paused; when idle,
nothing may be held. Beside each runs another node that is ended in the middle of work.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aiogpu
from benchmarks.soak.claims import Record
from benchmarks.soak.client import Client
from benchmarks.soak.monitor import Faults, Monitor
from benchmarks.soak.program import public_state, settled
from benchmarks.soak.sandbox import Sandbox, open_sandbox

LEGAL: Final = "every handle ends once, in a legal way"
NONE_HANGS: Final = "no handle hangs"
NOTHING_HELD: Final = "an idle node holds nothing"
ENDS: Final = "each program ends by itself, and leaves nothing in its process"
NOTHING_LEFT: Final = "no process and no file is left"
NO_WARNING: Final = "no program prints a traceback or a warning of aiogpu"
WARNINGS: Final = (
    *("was not carried out", "never awaited", "Warning: "),
    "refused shared memory",
)
STDERR_SHOWN: Final = 2000
"""Lines of stderr that are printed where something has hung, the last ones."""
LOAD_SECONDS: Final = (5.0, 30.0)
"""The shortest and the longest load phase."""
PHASES: Final = 8
"""Load phases of a scenario, about, if it is short."""
CLIENTS: Final = 3
"""Programs that use the service at a time."""
LIVES: Final = (2.0, 8.0)
"""Seconds for which a program of the service works before it ends or is killed."""
KILLED: Final = 0.3
"""The part of these programs that is killed."""

Progress = Callable[[str], None]


def load_seconds(seconds: float) -> float:
    """Return the length of a load phase of a scenario of so many seconds."""
    least, most = LOAD_SECONDS
    return min(most, max(least, seconds / PHASES))


def add_account(record: Record, what: str, account: dict[str, Any]) -> None:
    """Check what a program reports of its whole life."""
    if account:
        record.check_none(LEGAL, [f"{what}: {each}" for each in account["wrong"]])
        record.check_none(NONE_HANGS, [f"{what}: {each}" for each in account["hung"]])
        record.add(f"{what}: operations", account["operations"])
        ends = {"begun": account["begun"], **account["ends"]}
        record.add(f"{what}: ends of handles", ends)


async def finish(record: Record, what: str, client: Client) -> None:
    """End a program in order, and check how it does."""
    client.send("end")
    found = await client.received("ended")
    status = await client.ended()
    record.check(ENDS, status == 0, f"{client.name} ended with {status}")
    record.check_none(ENDS, [f"{client.name}: {each}" for each in found["left"]])
    add_account(record, what, found)


def check_stderr(record: Record, sandbox: Sandbox) -> None:
    """Check that programs have printed nothing that nobody has caused."""
    lines = sandbox.all_stderr().splitlines()
    found = [
        "\n".join(lines[max(0, index - 3) : index + 40])
        for index, line in enumerate(lines)
        if line.startswith("Traceback") or any(word in line for word in WARNINGS)
    ]
    record.check_none(NO_WARNING, found)
    if (claim := record.claims.get(NONE_HANGS)) and claim.failures:
        print("\n".join(lines[-STDERR_SHOWN:]), flush=True)


@asynccontextmanager
async def under_faults(faults: Faults, monitor: Monitor) -> AsyncIterator[None]:
    """Inject faults and monitor all processes, for the time of the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in (faults.run(), monitor.run())]
        yield
        for task in tasks:
            task.cancel()


async def embedded(
    record: Record, seed: str, seconds: float, progress: Progress
) -> None:
    """One program that lasts, and beside it others that are killed with their nodes."""
    what, loop = "embedded", asyncio.get_running_loop()
    ends = loop.time() + seconds
    with open_sandbox() as sandbox:
        faults = Faults(sandbox, f"{seed}/faults")
        monitor = Monitor(sandbox, what, record)
        client = await Client.start(sandbox, what, "local", seed, in_flight=20)
        await client.received("ready")
        drawn = random.Random(f"{seed}/brief")
        try:
            while loop.time() < ends:
                client.send("load")
                brief = asyncio.create_task(_killed_program(record, seed, drawn))
                async with under_faults(faults, monitor):
                    for _ in range(round(load_seconds(seconds))):
                        await asyncio.sleep(1)
                        begun = client.account.get("begun", 0)
                        progress(f"{begun} handles, {monitor.latest}")
                await brief
                client.send("idle")
                held = (await client.received("idled"))["held"]
                record.check_none(NOTHING_HELD, [f"{what}: {each}" for each in held])
                monitor.measure(client.pid)
        except BaseException:
            add_account(record, what, client.account)
            raise
        await finish(record, what, client)
        record.check_none(NOTHING_LEFT, await sandbox.left())
        check_stderr(record, sandbox)
        record.add(f"{what}: faults", faults.counts)
        monitor.judge()


async def _killed_program(record: Record, seed: str, drawn: random.Random) -> None:
    """A program that is killed in the middle of work; its node ends with it."""
    name, life = f"brief-{drawn.randrange(1 << 30)}", drawn.uniform(1.0, 6.0)
    with open_sandbox() as sandbox:
        client = await Client.start(sandbox, name, "local", seed, in_flight=8)
        await client.received("ready")
        client.send("load")
        await asyncio.sleep(life)
        await client.kill()
        add_account(record, "embedded, programs killed", client.account)
        left = await sandbox.left()
        record.check_none(NOTHING_LEFT, [f"killed {name}: {each}" for each in left])
        record.add("embedded: faults", {"kill programs": 1})


async def service(
    record: Record, seed: str, seconds: float, progress: Progress
) -> None:
    """A service that lasts, with its programs, and beside it others that are ended."""
    what, loop = "service", asyncio.get_running_loop()
    ends = loop.time() + seconds
    with open_sandbox() as sandbox:
        await sandbox.start_service()
        node = next(each for each in sandbox.processes() if each.part == "nodes")
        faults = Faults(sandbox, f"{seed}/faults")
        monitor = Monitor(sandbox, what, record)
        clients = Clients(sandbox, record, seed)
        drawn = random.Random(f"{seed}/brief")
        while loop.time() < ends:
            brief = asyncio.create_task(_ended_service(record, seed, drawn))
            async with under_faults(faults, monitor):
                load = asyncio.create_task(clients.run(load_seconds(seconds)))
                while not load.done():
                    await asyncio.wait([load], timeout=1)
                    progress(f"{clients.begun} handles, {monitor.latest}")
                await load
            await brief
            async with aiogpu.init(address=sandbox.address, log_to_driver=False):
                held = await settled(public_state)
            record.check_none(NOTHING_HELD, [f"{what}: {each}" for each in held])
            monitor.measure(node.pid)
        await sandbox.stop_service(drain=5)
        record.check_none(NOTHING_LEFT, await sandbox.left(except_logs=True))
        check_stderr(record, sandbox)
        record.add(f"{what}: faults", faults.counts)
        monitor.judge()


class Clients:
    """Programs that share a node: so many at a time, each for a while."""

    def __init__(self, sandbox: Sandbox, record: Record, seed: str) -> None:
        self._sandbox = sandbox
        self._record = record
        self._seed = seed
        self._random = random.Random(f"{seed}/clients")
        self._started = 0
        self.begun = 0

    async def run(self, seconds: float) -> None:
        """Run for so long; then until the last program has ended."""
        ends = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._one_after_the_other(ends))

    async def _one_after_the_other(self, ends: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < ends:
            self._started += 1
            life = min(self._random.uniform(*LIVES), max(1.0, ends - loop.time()))
            is_killed = self._random.random() < KILLED
            await self._run_one(f"client-{self._started}", life, is_killed)

    async def _run_one(self, name: str, life: float, is_killed: bool) -> None:
        sandbox, record = self._sandbox, self._record
        client = await Client.start(sandbox, name, sandbox.address, self._seed, 8)
        await client.received("ready")
        client.send("load")
        try:
            await asyncio.sleep(life)
        except asyncio.CancelledError:
            add_account(record, "service", client.account)
            raise
        if is_killed:
            await client.kill()
            record.add("service: faults", {"kill programs": 1})
            add_account(record, "service, programs killed", client.account)
        else:
            await finish(record, "service", client)
        self.begun += client.account.get("begun", 0)


async def _ended_service(record: Record, seed: str, drawn: random.Random) -> None:
    """A service that is killed or stopped under a program, which is told so."""
    with open_sandbox() as sandbox:
        name = f"brief-{drawn.randrange(1 << 30)}"
        await sandbox.start_service()
        client = await Client.start(
            sandbox, name, sandbox.address, seed, 8, is_mortal=True
        )
        await client.received("ready")
        client.send("load")
        await asyncio.sleep(drawn.uniform(*LIVES))
        is_killed = drawn.random() < 0.5
        if is_killed:
            node = next(each for each in sandbox.processes() if each.part == "nodes")
            with suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGKILL)
        else:
            await sandbox.stop_service(drain=0)
        await finish(record, "service that is ended", client)
        left = await sandbox.left(except_logs=True)
        if is_killed:  # its socket stays, until the next start
            left = [each for each in left if "node." not in each]
        record.check_none(NOTHING_LEFT, [f"{name}: {each}" for each in left])
        check_stderr(record, sandbox)
        fault = "kill nodes" if is_killed else "stop nodes"
        record.add("service: faults", {fault: 1})
