"""The two scenarios of the soak: a node inside a program, and a node as a service.

Load and idle phases alternate. Under load, processes are killed and paused; when idle,
nothing may be held. Beside each runs another node that is ended in the middle of work.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
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

PROGRESS_EVERY: Final = 10.0
"""Seconds between two lines that tell of the progress."""


class Scenario:
    """One scenario: its node, what is done to it, and what is checked of it.

    Attributes:
        what: its name, "embedded" or "service".
        record: where it says what it has found.
        seed: draws all of it.
        random: draws the lives of its programs.
        sandbox: of the node that lasts.
    """

    sandbox: Sandbox

    def __init__(self, what: str, record: Record, seed: str) -> None:
        self.what = what
        self.record = record
        self.seed = seed
        self.random = random.Random(f"{seed}/{what}")
        self._started = self._begun = 0
        self._programs: set[Client] = set()
        self._told = -PROGRESS_EVERY

    async def open(self) -> None:
        """Start the node that lasts."""
        raise NotImplementedError

    async def load(self, seconds: float) -> None:
        """Have programs work for so long."""
        raise NotImplementedError

    async def idle(self) -> tuple[int, list[str]]:
        """Return the node's process, and what it holds though it is idle."""
        raise NotImplementedError

    async def close(self) -> list[str]:
        """End the node in order; return what is left of it."""
        raise NotImplementedError

    async def brief(self, sandbox: Sandbox) -> None:
        """Run another node, which is ended in the middle of work."""
        raise NotImplementedError

    async def run(self, seconds: float) -> None:
        """Run for so long, load and idle phases in turn."""
        loop, (least, most) = asyncio.get_running_loop(), LOAD_SECONDS
        length = min(most, max(least, seconds / PHASES))
        with open_sandbox() as self.sandbox:
            await self.open()
            faults = Faults(self.sandbox, self.seed)
            monitor = Monitor(self.sandbox, self.what, self.record)
            ends = loop.time() + seconds
            try:
                while loop.time() < ends:
                    await self._alternate(faults, monitor, length)
            except BaseException:  # they report no more than they have so far
                for client in list(self._programs):
                    self.account(self.what, client)
                raise
            self.check_left(self.sandbox, await self.close())
            self.record.figures[f"{self.what}: faults"].update(faults.counts)
            monitor.judge()

    async def _alternate(
        self, faults: Faults, monitor: Monitor, seconds: float
    ) -> None:
        """Work for so long under faults, beside a node that is ended; then be idle."""
        beside = asyncio.create_task(self._beside())
        async with asyncio.TaskGroup() as group:
            faulty = [group.create_task(each.run()) for each in (faults, monitor)]
            loading = group.create_task(self.load(seconds))
            while not loading.done():
                await asyncio.wait([loading], timeout=1)
                self._tell(monitor.latest)
            for task in faulty:
                task.cancel()
        await beside
        pid, held = await self.idle()
        self.record.check(NOTHING_HELD, [f"{self.what}: {each}" for each in held])
        monitor.measure(pid)

    async def _beside(self) -> None:
        with open_sandbox() as sandbox:
            await self.brief(sandbox)

    def _tell(self, text: str) -> None:
        """Print how far it has come, but not each time."""
        if (seconds := self.record.seconds) >= self._told + PROGRESS_EVERY:
            self._told = seconds
            begun = sum(each.account.get("begun", 0) for each in self._programs)
            text = f"{self._begun + begun} handles, {text}"
            print(f"{seconds:6.0f} s  {self.what}: {text}", flush=True)

    async def start(self, sandbox: Sandbox, kind: str, *how: Any) -> Client:
        """Start a program on a service of the sandbox, or on a node of its own."""
        self._started += 1
        name = f"{kind}-{self._started}"
        client = await Client.start(sandbox, name, self.seed, *how)
        if sandbox is self.sandbox:
            self._programs.add(client)
        return client

    def account(self, what: str, client: Client) -> None:
        """Check what a program has reported of its whole life."""
        if client in self._programs:
            self._programs.remove(client)
            self._begun += client.account.get("begun", 0)
        if account := client.account:
            for claim, key in ((LEGAL, "wrong"), (NONE_HANGS, "hung")):
                self.record.check(claim, [f"{what}: {each}" for each in account[key]])
            self.record.figures[f"{what}: operations"].update(account["operations"])
            ends = {"begun": account["begun"], **account["ends"]}
            self.record.figures[f"{what}: ends of handles"].update(ends)

    async def kill(self, client: Client) -> None:
        """Kill a program in the middle of work."""
        await client.kill()
        self.record.figures[f"{self.what}: faults"]["kill programs"] += 1
        self.account(f"{self.what}, programs killed", client)

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
        if NONE_HANGS in self.record.failures:
            print("\n".join(lines[-STDERR_SHOWN:]), flush=True)


class Embedded(Scenario):
    """One program that lasts, and beside it others that are killed with their nodes."""

    async def open(self) -> None:
        self._client = await self.start(self.sandbox, self.what, "local", 20)

    async def load(self, seconds: float) -> None:
        await self._client.work(seconds)

    async def idle(self) -> tuple[int, list[str]]:
        self._client.send("idle")
        return self._client.pid, (await self._client.received("idled"))["held"]

    async def close(self) -> list[str]:
        await self.finish(self.what, self._client)
        return await self.sandbox.left()

    async def brief(self, sandbox: Sandbox) -> None:
        """A program that is killed in the middle of work; its node ends with it."""
        client = await self.start(sandbox, "brief", "local")
        await client.work(self.random.uniform(1.0, 6.0))
        await self.kill(client)
        left = await sandbox.left()
        wrong = [f"killed {client.name}: {each}" for each in left]
        self.record.check(NOTHING_LEFT, wrong)


class Service(Scenario):
    """A service that lasts, with its programs, and beside it others that are ended."""

    async def open(self) -> None:
        await self.sandbox.start_service()
        self._pid = self.sandbox.node().pid

    async def load(self, seconds: float) -> None:
        ends = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._one_after_the_other(ends))

    async def _one_after_the_other(self, ends: float) -> None:
        """Programs that use the service, each for a while."""
        loop = asyncio.get_running_loop()
        while loop.time() < ends:
            life = min(self.random.uniform(*LIVES), max(1.0, ends - loop.time()))
            is_killed = self.random.random() < KILLED
            client = await self.start(self.sandbox, "client", self.sandbox.address)
            await client.work(life)
            if is_killed:
                await self.kill(client)
            else:
                await self.finish(self.what, client)

    async def idle(self) -> tuple[int, list[str]]:
        async with aiogpu.init(address=self.sandbox.address, log_to_driver=False):
            return self._pid, await settled(public_state)

    async def close(self) -> list[str]:
        await self.sandbox.stop_service(drain=5)
        return await self.sandbox.left(except_logs=True)

    async def brief(self, sandbox: Sandbox) -> None:
        """A service that is killed or stopped under a program, which is told so."""
        is_killed = self.random.random() < 0.5
        await sandbox.start_service()
        client = await self.start(sandbox, "brief", sandbox.address, 8, True)
        await client.work(self.random.uniform(*LIVES))
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
        self.record.figures["service: faults"][fault] += 1


SCENARIOS: Final = {"embedded": Embedded, "service": Service}
