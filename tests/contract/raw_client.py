"""A client that sends any message that a test wants, and a service to send it to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import aiogpu
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.spec_codec import dump_spec
from aiogpu.core.model.request import Shape, TaskSpec
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.remote import join_of
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import CLIENT, Connection, greeting
from aiogpu.wire.messages import FIRST_CLIENT, Declare, Join, Message, Welcome
from tests.contract import served, tasks

LIMIT: Final = 20.0
AMOUNTS: Final = ("scalars", "devices", "gpu_memory")
M = TypeVar("M", bound=tuple[Any, ...])
_numbers = count(FIRST_CLIENT + 1)


class Service:
    """A node in another process.

    Attributes:
        path: of its socket.
        pid: its process.
    """

    def __init__(self, path: str, pid: int) -> None:
        self.path = path
        self.pid = pid

    @property
    def descriptors(self) -> list[str]:
        """Names of what the descriptors lead to, without inode numbers."""
        links = served.descriptors(self.pid)
        return sorted(link.partition(":[")[0] for link in links)

    @property
    def children(self) -> int:
        """The number of the process's own children."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return len(listed.split())

    @property
    def memory(self) -> int:
        """The resident memory in bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def lives(self) -> bool:
        """True until the process has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal that ends the process, and wait until it has ended."""
        if not self.lives:
            return
        ended = os.pidfd_open(self.pid)
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.pid, number)
        served.wait_for_end(ended)


@contextmanager
def service(**options: Any) -> Iterator[Service]:
    """Run a service with these options, and end it."""
    given = {"num_cpus": 2, "num_gpus": 1, "log_to_driver": False, **options}
    with tempfile.TemporaryDirectory(prefix="ags-", dir="/tmp") as place:
        assert served.forker is not None
        running = Service(f"{place}/s", served.forker.fork(f"{place}/s", given))
        try:
            yield running
        finally:
            running.end()


class RawClient:
    """A blocking client of a node's socket.

    Attributes:
        number: the client's id.
    """

    def __init__(self, service: Service, number: int = 0, greets: bool = True) -> None:
        self.number = number or next(_numbers)
        self._connection = Connection(CLIENT)
        self._heard: list[Message] = []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(LIMIT)
        self.socket.connect(service.path)
        if greets:
            self.socket.sendall(greeting(CLIENT, self.number, os.getpid()))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def join(self, **changes: Any) -> None:
        """Send this program's `Join`, with other values for these fields."""
        self.say(joining()._replace(**changes))

    def joined(self, **changes: Any) -> Welcome:
        """Join, and wait for the node's welcome."""
        self.join(**changes)
        return self.hear(Welcome)

    def say(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def hear(self, kind: type[M]) -> M:
        """Return the next message of a kind; drop messages before it."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
            data = self.socket.recv(1 << 16)
            assert data, f"the node has hung up, and said no {kind.__name__}"
            self._heard += self._connection.receive(data)

    def hear_all(self) -> list[Message]:
        """Return all messages until the node hangs up."""
        try:
            while data := self.socket.recv(1 << 16):
                self._heard += self._connection.receive(data)
        except ConnectionError:
            pass
        return self._heard


def joining() -> Join:
    """Make the message with which this program joins."""
    return join_of(NodeOptions(log_to_driver=False))


def func_of(remote: Any) -> FunctionSpec:
    """Return the spec of a remote function or class."""
    func: FunctionSpec = remote._func or remote._prepare()
    return func


def declared(number: int, func: FunctionSpec, **changes: Any) -> Declare:
    """Make the message that declares a function, with changes to its spec."""
    spec = dump_spec(replace(func, spec=changed(func.spec, changes)))
    return Declare(number, func.spec.name, spec, func.function.payload)


def changed(spec: TaskSpec, changes: dict[str, Any]) -> TaskSpec:
    """Return a spec with other fields, or with other amounts in its request."""
    of_request = {name: changes[name] for name in changes if name in AMOUNTS}
    others = {name: changes[name] for name in changes if name not in AMOUNTS}
    request = replace(spec.shape.request, **of_request)
    return replace(spec, shape=Shape(request, spec.shape.environment), **others)


def program(path: str, source: str) -> str:
    """Return a program that joins the service at a path and runs this in `main()`."""
    lines = "\n".join(f"    {line}" for line in source.strip().splitlines())
    return (
        "import asyncio, os, sys, aiogpu\n"
        "from tests.contract import tasks, stream_tasks\n"
        "from tests.contract.actor_classes import Counter\n"
        "async def main():\n"
        f"    await aiogpu.init(address={path!r}, log_to_driver=False)\n"
        f"{lines}\n"
        "asyncio.run(main())\n"
    )


async def all_is_free() -> None:
    """Wait until no task or actor is left on the node that this program has joined."""
    total = await aiogpu.cluster_resources()
    async with asyncio.timeout(LIMIT):
        while await aiogpu.available_resources() != total:
            await asyncio.sleep(0)
        while (status := await aiogpu.status()).tasks or status.actors:
            await asyncio.sleep(0)


@asynccontextmanager
async def watching(node: Service) -> AsyncIterator[None]:
    """Join a node; check at the end that other programs' resources are free again."""
    async with aiogpu.init(address=node.path, log_to_driver=False):
        assert await tasks.add.remote(1, 2) == 3
        yield
        await all_is_free()
        assert await tasks.add.remote(1, 2) == 3
        assert node.lives
