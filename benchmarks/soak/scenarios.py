"""The two scenarios of the soak: a node inside a program, and a node as a service.

Load and idle phases alternate. Under load, processes are killed and paused; when idle,
nothing may be held. Beside each runs another node that is ended in the middle of work.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aiogpu
from benchmarks.soak.monitor import Faults, Monitor, Record
from benchmarks.soak.program import Client, public_state, settled
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


class Scenario:
    """One scenario: its node, what is done to it, and what is checked of it.

    Attributes:
        what: its name, "embedded" or "service".
        record: where it says what it has found.
        seed: draws all of it.
        random: draws the lives of its programs.
    """

    def __init__(self, what: str, record: Record, seed: str) -> None:
        self.what = what
        self.record = record
        self.seed = seed
        self.random = random.Random(f"{seed}/{what}")
        self.begun = 0
        self._started = 0

    def name(self, kind: str) -> str:
        """Name one more program."""
        self._started += 1
        return f"{kind}-{self._started}"

    async def run(self, seconds: float, progress: Progress) -> None:
        """Run for so long, load and idle phases in turn."""
        raise NotImplementedError

    async def phases(
        self,
        sandbox: Sandbox,
        seconds: float,
        progress: Progress,
        load: Callable[[float], Coroutine[Any, Any, None]],
        idle: Callable[[], Coroutine[Any, Any, tuple[int, list[str]]]],
        brief: Callable[[], Coroutine[Any, Any, None]],
    ) -> Monitor:
        """Alternate phases; `idle` gives the node's process and what it holds."""
        loop = asyncio.get_running_loop()
        ends, (least, most) = loop.time() + seconds, LOAD_SECONDS
        faults = Faults(sandbox, self.seed)
        monitor = Monitor(sandbox, self.what, self.record)
        while loop.time() < ends:
            beside = asyncio.create_task(brief())
            async with _under_faults(faults, monitor):
                loading = asyncio.create_task(
                    load(min(most, max(least, seconds / PHASES)))
                )
                while not loading.done():
                    await asyncio.wait([loading], timeout=1)
                    progress(f"{self.begun} handles, {monitor.latest}")
                await loading
            await beside
            pid, held = await idle()
            wrong = [f"{self.what}: {each}" for each in held]
            self.record.check(NOTHING_HELD, wrong)
            monitor.measure(pid)
        self.record.add(f"{self.what}: faults", faults.counts)
        return monitor

    def account(self, what: str, client: Client) -> None:
        """Check what a program has reported of its whole life."""
        if account := client.account:
            for claim, key in ((LEGAL, "wrong"), (NONE_HANGS, "hung")):
                self.record.check(claim, [f"{what}: {each}" for each in account[key]])
            self.record.add(f"{what}: operations", account["operations"])
            ends = {"begun": account["begun"], **account["ends"]}
            self.record.add(f"{what}: ends of handles", ends)

    async def kill(self, what: str, client: Client) -> None:
        """Kill a program in the middle of work."""
        await client.kill()
        self.record.add(f"{self.what}: faults", {"kill programs": 1})
        self.account(what, client)

    async def finish(self, what: str, client: Client) -> None:
        """End a program in order, and check how it does."""
        client.send("end")
        left = (await client.received("ended"))["left"]
        if status := await client.ended():
            left = [f"it ended with {status}", *left]
        self.record.check(ENDS, [f"{client.name}: {each}" for each in left])
        self.account(what, client)

    def check_left(self, sandbox: Sandbox, left: list[str]) -> None:
        """Check that nothing is left, and that programs have printed no warnings."""
        self.record.check(NOTHING_LEFT, [f"{self.what}: {each}" for each in left])
        lines = sandbox.all_stderr().splitlines()
        found = [
            "\n".join(lines[max(0, index - 3) : index + 40])
            for index, line in enumerate(lines)
            if line.startswith("Traceback") or any(word in line for word in WARNINGS)
        ]
        self.record.check(NO_WARNING, found)
        if (claim := self.record.claims.get(NONE_HANGS)) and claim.failures:
            print("\n".join(lines[-STDERR_SHOWN:]), flush=True)


@asynccontextmanager
async def _under_faults(faults: Faults, monitor: Monitor) -> AsyncIterator[None]:
    """Inject faults and monitor all processes, for the time of the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in (faults.run(), monitor.run())]
        yield
        for task in tasks:
            task.cancel()


class Embedded(Scenario):
    """One program that lasts, and beside it others that are killed with their nodes."""

    async def run(self, seconds: float, progress: Progress) -> None:
        with open_sandbox() as sandbox:
            client = await Client.start(sandbox, self.what, "local", self.seed, 20)

            async def load(duration: float) -> None:
                client.send("load")
                for _ in range(round(duration)):
                    await asyncio.sleep(1)
                    self.begun = client.account.get("begun", 0)

            async def idle() -> tuple[int, list[str]]:
                client.send("idle")
                return client.pid, (await client.received("idled"))["held"]

            try:
                monitor = await self.phases(
                    sandbox, seconds, progress, load, idle, self._brief
                )
            except BaseException:
                self.account(self.what, client)
                raise
            await self.finish(self.what, client)
            self.check_left(sandbox, await sandbox.left())
            monitor.judge()

    async def _brief(self) -> None:
        """A program that is killed in the middle of work; its node ends with it."""
        life = self.random.uniform(1.0, 6.0)
        with open_sandbox() as sandbox:
            client = await Client.start(sandbox, self.name("brief"), "local", self.seed)
            client.send("load")
            await asyncio.sleep(life)
            await self.kill("embedded, programs killed", client)
            left = await sandbox.left()
            wrong = [f"killed {client.name}: {each}" for each in left]
            self.record.check(NOTHING_LEFT, wrong)


class Service(Scenario):
    """A service that lasts, with its programs, and beside it others that are ended."""

    async def run(self, seconds: float, progress: Progress) -> None:
        with open_sandbox() as sandbox:
            await sandbox.start_service()
            node = sandbox.node()

            async def load(duration: float) -> None:
                ends = asyncio.get_running_loop().time() + duration
                async with asyncio.TaskGroup() as group:
                    for _ in range(CLIENTS):
                        group.create_task(self._one_after_the_other(sandbox, ends))

            async def idle() -> tuple[int, list[str]]:
                async with aiogpu.init(address=sandbox.address, log_to_driver=False):
                    return node.pid, await settled(public_state)

            monitor = await self.phases(
                sandbox, seconds, progress, load, idle, self._brief
            )
            await sandbox.stop_service(drain=5)
            self.check_left(sandbox, await sandbox.left(except_logs=True))
            monitor.judge()

    async def _one_after_the_other(self, sandbox: Sandbox, ends: float) -> None:
        """Programs that use the service, each for a while."""
        loop, what = asyncio.get_running_loop(), self.what
        while loop.time() < ends:
            life = min(self.random.uniform(*LIVES), max(1.0, ends - loop.time()))
            is_killed, name = self.random.random() < KILLED, self.name("client")
            client = await Client.start(sandbox, name, sandbox.address, self.seed)
            client.send("load")
            try:
                await asyncio.sleep(life)
            except asyncio.CancelledError:
                self.account(what, client)
                raise
            if is_killed:
                await self.kill(f"{what}, programs killed", client)
            else:
                await self.finish(what, client)
            self.begun += client.account.get("begun", 0)

    async def _brief(self) -> None:
        """A service that is killed or stopped under a program, which is told so."""
        life, is_killed = self.random.uniform(*LIVES), self.random.random() < 0.5
        with open_sandbox() as sandbox:
            await sandbox.start_service()
            client = await Client.start(
                *(sandbox, self.name("brief"), sandbox.address, self.seed),
                is_mortal=True,
            )
            client.send("load")
            await asyncio.sleep(life)
            if is_killed:
                with suppress(ProcessLookupError):
                    os.kill(sandbox.node().pid, signal.SIGKILL)
            else:
                await sandbox.stop_service(drain=0)
            await self.finish("service that is ended", client)
            left = await sandbox.left(except_logs=True)
            if is_killed:  # its socket stays, until the next start
                left = [each for each in left if "node." not in each]
            self.check_left(sandbox, left)
            fault = "kill nodes" if is_killed else "stop nodes"
            self.record.add("service: faults", {fault: 1})


SCENARIOS: Final = {"embedded": Embedded, "service": Service}
