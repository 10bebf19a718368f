"""Paper doubles of what surrounds the runtime's parts: they note what is asked."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from aiogpu.runtime.output import Source
from aiogpu.wire.messages import Hello, Imported, Message


class PaperSocket:
    """A socket's credentials."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def fileno(self) -> int:
        return -1

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("iII", 1, self._uid, 0)[:size]


class PaperTransport(asyncio.Transport):
    """Keeps what is written and done."""

    def __init__(self, uid: int | None = None) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.calls: list[str] = []
        self._socket = PaperSocket(os.geteuid() if uid is None else uid)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._socket if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def cut_off(self) -> None:
        self.calls.append("cut off")
        self.on_messages = lambda _messages: None
        self.on_lost = lambda: None

    def is_closing(self) -> bool:
        return "abort" in self.calls

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


class PaperPeer:
    """Stands for a keeper's or a worker's connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.calls: list[str] = []
        self.on_messages: Callable[[list[Message]], None]
        self.on_lost: Callable[[], None]

    def send(self, *messages: Message) -> None:
        self.sent += messages

    def send_one(self, message: Message) -> None:
        self.sent.append(message)

    def post(self, message: Message) -> None:
        self.sent.append(message)

    def post_all(self, messages: Sequence[Message]) -> None:
        self.sent += messages

    def taken(self) -> list[Message]:
        """What was sent since the last look."""
        taken, self.sent = self.sent, []
        return taken

    def abort(self) -> None:
        self.calls.append("abort")

    def cut_off(self) -> None:
        self.calls.append("cut off")
        self.on_messages = lambda _messages: None
        self.on_lost = lambda: None

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class PaperConsole:
    """Lines are out when the test says so."""

    def __init__(self) -> None:
        self.written = 0
        self.routes = None
        self.lines: list[tuple[int, str]] = []
        self._after: list[tuple[int, Callable[[], None]]] = []

    def write(self, stream: int, line: str, source: Source, worker: int = 0) -> int:
        self.lines.append((stream, line))
        return len(self.lines)

    def after(self, number: int, action: Callable[[], None]) -> None:
        if number <= self.written:
            action()
        else:
            self._after.append((number, action))

    def show_all(self) -> None:
        self.written = len(self.lines)
        waiting, self._after = self._after, []
        for _, action in waiting:
            action()

    @property
    def texts(self) -> Sequence[str]:
        return [text for _, text in self.lines]


class PaperPage:
    """The words of a control page."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}
        self.heard_of: dict[int, int] = {}
        self.begun_of: dict[int, int] = {}
        self.revoked: dict[int, int] = {}

    def ask(self, slot: int, task: int) -> None:
        self.asked[slot] = task

    def heard(self, slot: int) -> int:
        return self.heard_of.get(slot, 0)

    def begun(self, slot: int) -> int:
        return self.begun_of.get(slot, 0)

    def revoke(self, slot: int, below: int) -> None:
        self.revoked[slot] = below


class PaperCgroup:
    """Notes which slots' groups were ended; calls back when told to."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.holds_back = False
        self._waiting: list[Callable[[], None]] = []

    def end_slot(self, slot: int, then: Callable[[], None]) -> None:
        self.ended.append(slot)
        if self.holds_back:
            self._waiting.append(then)
        else:
            then()

    def let_go(self) -> None:
        """Say that all groups are empty."""
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()


class PaperZygote:
    """Notes for which slots keepers are wanted of it."""

    def __init__(self, kept: list[int] | None = None) -> None:
        self.problem: Exception | None = None
        self.takes_work = True
        self.is_over = False
        self.ready_at: float | None = 0.0
        self.kept: list[int] = [] if kept is None else kept
        self.released: list[int] = []

    def keep(self, slot: int) -> None:
        self.kept.append(slot)

    def release(self, slot: int) -> None:
        self.released.append(slot)


class PaperZygotes:
    """One zygote at a time, for whatever environment."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page = PaperPage()
        self.cgroup = PaperCgroup()
        self.kept: list[int] = []
        self.peers: list[object] = []
        self.current = PaperZygote(self.kept)
        self.others: dict[object, PaperZygote] = {}
        self.heard: list[tuple[PaperZygote, Imported]] = []

    def serving(self, environment: object) -> PaperZygote:
        zygote = self.others.get(environment, self.current)
        if zygote.problem is not None:
            raise zygote.problem
        return zygote

    def greeted(self, peer: object, _hello: Hello) -> None:
        self.peers.append(peer)

    def hear(self, zygote: PaperZygote, imported: Imported) -> None:
        self.heard.append((zygote, imported))

    def die(self) -> None:
        """The zygote ends, and another takes its place."""
        old, self.current = self.current, PaperZygote(self.kept)
        old.is_over, old.takes_work = True, False
        self._pool.on_zygote_death(old)

    def supersede(self) -> PaperZygote:
        """Another serves in its place; gives the old one."""
        old, self.current = self.current, PaperZygote(self.kept)
        old.takes_work = False
        self._pool.on_superseded(old)
        return old

    def break_for_good(self, problem: Exception) -> None:
        old = self.current
        old.is_over, old.takes_work, old.problem = True, False, problem
        self._pool.on_zygote_death(old)


class PaperStore:
    """Keeps nothing."""

    def serve(self, *_: object) -> None: ...
