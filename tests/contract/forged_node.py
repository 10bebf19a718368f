"""`python -m tests.contract.forged_node JSON`: listens where a node would, as any user.

It answers a greeting with a `Welcome`, and a question as a test wants, until its stdin
is closed. Then it prints how many bytes it was sent in all.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.server_info import pack_capacity
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import Connection
from aiogpu.wire.messages import ChildDone, Inquire, Join, Welcome
from tests.support.program import environment

LIMIT: Final = 60.0


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


class Forger:
    """A process that listens in place of a node.

    Attributes:
        pid: its process id.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def sent(self) -> int:
        """End the process; return how many bytes it was sent."""
        out, _ = self._process.communicate(timeout=LIMIT)
        assert self._process.returncode == 0
        return int(out)


@contextmanager
def forged(socket_path: str, **options: Any) -> Iterator[Forger]:
    """Run a forged node at a path, with the options of `_Node`."""
    arguments = json.dumps({"path": socket_path, **options})
    with subprocess.Popen(
        [sys.executable, "-m", "tests.contract.forged_node", arguments],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Forger(process)
        finally:
            process.kill()


class _Node:
    def __init__(
        self,
        path: str,
        uid: int = 0,
        makes: int = 0,
        pidfile: dict[str, Any] | None = None,
        trap: str = "",
        trapped: str = "ledger",
    ) -> None:
        """Listen.

        Args:
            path: of the socket.
            uid: the user to become; 0 to stay this user.
            makes: the mode of the socket's directory, which that user makes; 0 if the
                directory exists, and the process becomes that user after binding.
            pidfile: the content of a pidfile to write, if any.
            trap: the directory that is made when a program unpickles an answer.
            trapped: which answer carries the trap: "ledger" or "answer".
        """
        self._path, self._trap, self._trapped = path, trap, trapped
        self._received: list[int] = []
        self._changing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._listening = socket.socket(socket.AF_UNIX)
        directory = os.path.dirname(path)
        if makes:
            self._be(uid)
            os.mkdir(directory)
            os.mkdir(f"{directory}/logs")
            os.chmod(directory, makes)
        self._listening.bind(path)
        self._be(uid)
        self._listening.listen(64)
        if pidfile is not None:
            with open(f"{path.removesuffix('.sock')}.pid", "w") as file:
                json.dump(pidfile, file)

    def _be(self, uid: int) -> None:
        if uid and os.geteuid() != uid:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)

    def accept(self) -> None:
        """Serve each connection in a thread."""
        while True:
            connected, _ = self._listening.accept()
            thread = threading.Thread(target=self._serve, args=[connected], daemon=True)
            with self._changing:
                self._threads.append(thread)
                thread.start()

    def count(self) -> int:
        """Return how many bytes came, once all connections have ended."""
        with self._changing:
            threads = list(self._threads)
        for thread in threads:
            thread.join(LIMIT)
        return sum(self._received)

    def _serve(self, connected: socket.socket) -> None:
        talk = Connection()
        while data := connected.recv(1 << 16):
            self._received.append(len(data))
            if len(data) == 8:
                continue  # a program that wants shared memory sends its id
            for message in talk.receive(data):
                if isinstance(message, Join):
                    connected.sendall(encode(self._welcome()))
                elif isinstance(message, Inquire):
                    answer = pickle.dumps(Trap(self._trap))
                    connected.sendall(encode(ChildDone(message.child, answer)))

    def _welcome(self) -> Welcome:
        ledger = pack_capacity(Ledger({"CPU": 10_000}), {})
        if self._trapped == "ledger":
            ledger = pickle.dumps(Trap(self._trap))
        return Welcome("forged", self._path, "", "", ledger)


def main() -> None:
    """Serve until stdin is closed."""
    node = _Node(**json.loads(sys.argv[1]))
    threading.Thread(target=node.accept, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    print(node.count())


if __name__ == "__main__":
    main()
