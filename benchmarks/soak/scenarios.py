"""The two scenarios of the soak: a node inside a program, and a node as a service.

Load and idle phases alternate. Under load, processes are killed and paused; an idle
node may hold nothing. Another node runs beside each and is ended in the middle of work.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import aiogpu
from aiogpu.linux import syscalls as kernel
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
"""The number of stderr's last lines that are printed if an operation hangs."""
LOAD_SECONDS: Final = (5.0, 30.0)
"""The shortest and the longest load phase."""
PHASES: Final = 8
"""About the number of load phases in a short scenario."""
CLIENTS: Final = 3
"""Programs that use the service at a time."""
LIVES: Final = (2.0, 8.0)
"""Seconds for which a program of the service works before it ends or is killed."""
KILLED: Final = 0.3
"""The share of these programs that is killed."""
PROGRESS_EVERY: Final = 10.0
"""Seconds between two lines about the progress."""


class Scenario:
    """One scenario: a long-lived node, the faults, and the checks.

    Attributes:
        name: "embedded" or "service".
        record: gets the figures and the checks.
        seed: seed of all random choices.
        random: chooses the lives of the programs.
        sandbox: the sandbox of the long-lived node.
    """

    sandbox: Sandbox

    def __init__(self, name: str, record: Record, seed: str) -> None:
        self.name = name
        self.record = record
        self.seed = seed
        self.random = random.Random(f"{seed}/{name}")
        self._started = self._handles = 0
        self._programs: set[Client] = set()
        self._printed = -PROGRESS_EVERY

    async def open(self) -> None:
        """Start the long-lived node."""
        raise NotImplementedError

    async def load(self, seconds: float) -> None:
        """Run programs that work for this time."""
        raise NotImplementedError

    async def idle(self) -> tuple[int, list[str]]:
        """Return the idle node's process id, and what the node still holds."""
        raise NotImplementedError

    async def close(self) -> list[str]:
        """Stop the node in order; return the processes and files that are left."""
        raise NotImplementedError

    async def brief(self, sandbox: Sandbox) -> None:
        """Run another node, and end it in the middle of work."""
        raise NotImplementedError

    async def run(self, seconds: float) -> None:
        """Run load and idle phases in turn for this time."""
        loop, (least, most) = asyncio.get_running_loop(), LOAD_SECONDS
        length = min(most, max(least, seconds / PHASES))
        with open_sandbox() as self.sandbox:
            await self.open()
            faults = Faults(self.sandbox, self.seed)
            monitor = Monitor(self.sandbox, self.name, self.record)
            ends = loop.time() + seconds
            try:
                while loop.time() < ends:
                    await self._alternate(faults, monitor, length)
            except BaseException:  # the programs will report no more than so far
                for client in list(self._programs):
                    self.account(self.name, client)
                raise
            self.check_left(self.sandbox, await self.close())
            self.record.figures[f"{self.name}: faults"].update(faults.counts)
            monitor.judge()

    async def _alternate(
        self, faults: Faults, monitor: Monitor, seconds: float
    ) -> None:
        """Work under faults, beside a node that is ended; then be idle."""
        with open_sandbox() as other:
            brief = asyncio.create_task(self.brief(other))
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(each.run()) for each in (faults, monitor)]
                loading = group.create_task(self.load(seconds))
                while not loading.done():
                    await asyncio.wait([loading], timeout=1)
                    self._print_progress(monitor.latest)
                for task in watching:
                    task.cancel()
            await brief
        pid, held = await self.idle()
        self.record.check(NOTHING_HELD, [f"{self.name}: {each}" for each in held])
        monitor.measure(pid)

    def _print_progress(self, processes: str) -> None:
        """Print the number of handles and processes, but not every time."""
        if (seconds := self.record.seconds) >= self._printed + PROGRESS_EVERY:
            self._printed = seconds
            begun = sum(each.account.get("begun", 0) for each in self._programs)
            text = f"{self._handles + begun} handles, {processes}"
            print(f"{seconds:6.0f} s  {self.name}: {text}", flush=True)

    async def start(self, sandbox: Sandbox, kind: str, *options: Any) -> Client:
        """Start a program on the sandbox's service, or on a node of its own."""
        self._started += 1
        name = f"{kind}-{self._started}"
        client = await Client.start(sandbox, name, self.seed, *options)
        if sandbox is self.sandbox:
            self._programs.add(client)
        return client

    def account(self, title: str, client: Client) -> None:
        """Check the last report of a program."""
        if client in self._programs:
            self._programs.remove(client)
            self._handles += client.account.get("begun", 0)
        if account := client.account:
            for claim, key in ((LEGAL, "wrong"), (NONE_HANGS, "hung")):
                self.record.check(claim, [f"{title}: {each}" for each in account[key]])
            self.record.figures[f"{title}: operations"].update(account["operations"])
            ends = {"begun": account["begun"], **account["ends"]}
            self.record.figures[f"{title}: ends of handles"].update(ends)

    async def kill(self, client: Client) -> None:
        """Kill a program in the middle of work."""
        await client.kill()
        self.record.figures[f"{self.name}: faults"]["kill programs"] += 1
        self.account(f"{self.name}, programs killed", client)

    async def finish(self, title: str, client: Client) -> None:
        """End a program in order; check its exit status and what is left of it."""
        client.send("end")
        left = (await client.received("ended"))["left"]
        if status := await client.ended():
            left = [f"exit status {status}", *left]
        self.record.check(ENDS, [f"{client.name}: {each}" for each in left])
        self.account(title, client)

    def check_left(self, sandbox: Sandbox, left: list[str]) -> None:
        """Check that nothing is left, and that no program has printed a warning."""
        self.record.check(NOTHING_LEFT, [f"{self.name}: {each}" for each in left])
        lines = sandbox.all_stderr().splitlines()
        warnings = [
            "\n".join(lines[max(0, index - 3) : index + 40])
            for index, line in enumerate(lines)
            if line.startswith("Traceback") or any(word in line for word in WARNINGS)
        ]
        self.record.check(NO_WARNING, warnings)
        if NONE_HANGS in self.record.failures:
            print("\n".join(lines[-STDERR_SHOWN:]), flush=True)


class Embedded(Scenario):
    """One long-lived program, and beside it others that are killed with their nodes."""

    async def open(self) -> None:
        self._client = await self.start(self.sandbox, self.name, "local", 20)

    async def load(self, seconds: float) -> None:
        await self._client.work(seconds)

    async def idle(self) -> tuple[int, list[str]]:
        self._client.send("idle")
        return self._client.pid, (await self._client.received("idled"))["held"]

    async def close(self) -> list[str]:
        await self.finish(self.name, self._client)
        return await self.sandbox.left()

    async def brief(self, sandbox: Sandbox) -> None:
        """Kill a program in the middle of work; its node must end as well."""
        client = await self.start(sandbox, "brief", "local")
        await client.work(self.random.uniform(1.0, 6.0))
        await self.kill(client)
        left = await sandbox.left()
        wrong = [f"killed {client.name}: {each}" for each in left]
        self.record.check(NOTHING_LEFT, wrong)


class Service(Scenario):
    """A long-lived service with its programs, and beside it others that are ended."""

    async def open(self) -> None:
        await self.sandbox.start_service()
        self._pid = self.sandbox.node().pid

    async def load(self, seconds: float) -> None:
        ends = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._run_programs(ends))

    async def _run_programs(self, ends: float) -> None:
        """Run programs that use the service, one after the other."""
        loop = asyncio.get_running_loop()
        while loop.time() < ends:
            life = min(self.random.uniform(*LIVES), max(1.0, ends - loop.time()))
            is_killed = self.random.random() < KILLED
            client = await self.start(self.sandbox, "client", self.sandbox.address)
            await client.work(life)
            if is_killed:
                await self.kill(client)
            else:
                await self.finish(self.name, client)

    async def idle(self) -> tuple[int, list[str]]:
        async with aiogpu.init(address=self.sandbox.address, log_to_driver=False):
            return self._pid, await settled(public_state)

    async def close(self) -> list[str]:
        await self.sandbox.stop_service(drain=5)
        return await self.sandbox.left(except_logs=True)

    async def brief(self, sandbox: Sandbox) -> None:
        """Kill or stop a service under a program, whose handles must say so."""
        is_killed = self.random.random() < 0.5
        await sandbox.start_service()
        client = await self.start(sandbox, "brief", sandbox.address, 8, True)
        await client.work(self.random.uniform(*LIVES))
        if is_killed:
            kernel.kill(sandbox.node().pid)
        else:
            await sandbox.stop_service(drain=0)
        await self.finish("service that is ended", client)
        left = await sandbox.left(except_logs=True)
        if is_killed:  # the socket stays until the next start
            left = [each for each in left if "node." not in each]
        self.check_left(sandbox, left)
        fault = "kill nodes" if is_killed else "stop nodes"
        self.record.figures["service: faults"][fault] += 1


SCENARIOS: Final = {"embedded": Embedded, "service": Service}
