"""One system as a program that is asked: `python -m benchmarks.field.contestant`.

It is told one order a line, as JSON, and answers each with a line, on a socket whose
descriptor it is given; the standard streams are left to what it runs.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

import uvloop

from benchmarks.environments import ENVIRONMENTS
from benchmarks.field.question import FLOOR, Amount, Ask, Stage
from benchmarks.field.questions import QUESTIONS
from benchmarks.port import UnsupportedError


class Contestant:
    """A system, and the question that it is asked now."""

    def __init__(self, name: str) -> None:
        self._environment = None if name == FLOOR else ENVIRONMENTS[name]()
        self._has_preloaded = True
        self._is_open = False
        self._stage: Stage | None = None
        self._ask: Ask | None = None

    async def open(
        self, num_cpus: int, num_gpus: int, preload: list[str] | None
    ) -> object:
        """Start the system; without the modules, if it imports none beforehand.

        Gives the versions of what it is made of.
        """
        if self._environment is None:
            return {}
        self._is_open = True
        try:
            await self._environment.open(num_cpus, num_gpus, preload)
        except UnsupportedError:
            if not preload:
                raise
            self._has_preloaded = False
            await self._environment.open(num_cpus, num_gpus)
        return {name: version(name) for name in self._environment.libraries}

    async def prepare(self, question: str) -> object:
        """End the question before, and get ready for this one."""
        await self._leave()
        asked = QUESTIONS[question]
        self._stage = Stage(AsyncExitStack(), self._has_preloaded)
        if self._environment is None:
            self._ask = await asked.floor(self._stage)
        else:
            self._ask = await asked.prepare(self._environment, self._stage)
        return None

    async def block(self, amount: list[Any]) -> object:
        """Run one block; gives its figures, and notes."""
        assert self._ask is not None
        assert self._stage is not None
        figures = await self._ask(Amount(*amount))
        return {"figures": figures, "notes": list(self._stage.notes.values())}

    async def close(self) -> object:
        """End the question and the system."""
        await self._leave()
        if self._environment is not None and self._is_open:
            await self._environment.close()
        return None

    async def _leave(self) -> None:
        if self._stage is not None:
            stage, self._stage, self._ask = self._stage, None, None
            await stage.stack.aclose()


async def serve(name: str, connection: socket.socket) -> None:
    """Answer until the other side is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    contestant = Contestant(name)
    while line := await reader.readline():
        verb, arguments = json.loads(line)
        try:
            answer = {"answer": await getattr(contestant, verb)(*arguments)}
        except UnsupportedError as reason:
            answer = {"unsupported": str(reason)}
        except Exception as error:  # noqa: BLE001 - it is told, and the run goes on
            answer = {"failed": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


def main(name: str, descriptor: str) -> None:
    """Serve on that descriptor, which nothing that is started here shall have."""
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(name, connection))


if __name__ == "__main__":
    main(*sys.argv[1:])
