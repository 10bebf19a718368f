"""Fakes of what surrounds the parts of the runtime: each notes what is asked of it."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from aiogpu.accelerators.base import Health, Sample
from aiogpu.client.function_spec import (
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.core.model.ids import LeaseId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.runtime.devices.probe_thread import DeviceThread, Key, Look
from aiogpu.runtime.output import Source
from aiogpu.runtime.pending_tasks import Call
from aiogpu.wire.messages import Hello, Imported, Message


def function() -> Function:
    return Function(new_function_id(), b"pickled")


def func(
    function_: Function | None = None,
) -> FunctionSpec:
    request = Request.of({"CPU": UNIT}, {})
    spec = TaskSpec("train", Shape(request))
    known = function_ or function()
    return FunctionSpec(new_func_id(), known, spec, request.as_numbers(), {}, False)


def call(site: FunctionSpec | None = None) -> Call:
    return Call(site or func(), b"arguments", None)


GIB = 1 << 30
SIZED_GPUS = DeviceSet(
    "GPU",
    [Device(0, memory=80 * GIB), Device("GPU-1", memory=40 * GIB), Device(2)],
)


def lease_of(
    *indices: int, share: int = UNIT, gpu_memory: int = 0, also: bool = False
) -> Lease:
    """A lease of these GPUs, each of that share; also of another kind of device."""
    amounts = {"GPU": share * len(indices)} if share else {}
    if also:
        amounts["AAA"] = UNIT
    request = Request.of({}, amounts, gpu_memory=gpu_memory)
    shares = tuple((index, share) for index in indices)
    others = (((0, UNIT),),) if also else ()
    return Lease(
        LeaseId(1), request, (*others, shares) if request.devices else (), Ledger({})
    )


class Timer:
    """One call to come."""

    def __init__(self, when: float, call: Callable[[], object]) -> None:
        self.when, self.call = when, call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandLoop:
    """Timers in order of their time; nothing else happens."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> None:
        """Nobody waits here."""

    def call_at(self, when: float, call: Callable[..., object], *args: object) -> Timer:
        timer = Timer(when, lambda: call(*args))
        self._timers.append(timer)
        return timer

    def call_later(self, pause: float, *call: Any) -> Timer:
        return self.call_at(self.now + pause, *call)

    @property
    def due(self) -> float | None:
        """When the next call comes, None if none does."""
        self._timers = [each for each in self._timers if not each.is_cancelled]
        return min((each.when for each in self._timers), default=None)

    def step(self) -> float:
        """Go to the next call, and make it; gives how long that was."""
        due = self.due
        assert due is not None
        assert due >= self.now
        before, self.now = self.now, due
        timer = next(each for each in self._timers if each.when == due)
        self._timers.remove(timer)
        timer.call()
        return due - before


class PromptThread(DeviceThread):
    """Looks at devices at once, in the test's own thread."""

    is_alive = True

    def look(
        self,
        keys: Sequence[Key],
        then: Callable[[Look], None],
        *,
        is_checked: bool = False,
    ) -> None:
        then(self._look(keys, is_checked))


class FakeSocket:
    """A socket's credentials."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def fileno(self) -> int:
        return -1

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("iII", 1, self._uid, 0)[:size]


class FakeTransport(asyncio.Transport):
    """Keeps what is written and done."""

    def __init__(self, uid: int | None = None) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.calls: list[str] = []
        self._socket = FakeSocket(os.geteuid() if uid is None else uid)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._socket if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return "abort" in self.calls

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


class FakePeer:
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


class FakeConsole:
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

    @property
    def texts(self) -> Sequence[str]:
        return [text for _, text in self.lines]


class FakePage:
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


class FakeCgroup:
    """Notes which slots' groups were ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def end_slot(self, slot: int, then: Callable[[], None]) -> None:
        self.ended.append(slot)
        then()


class FakeZygote:
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


class FakeZygotes:
    """One zygote at a time, for whatever environment."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page = FakePage()
        self.cgroup = FakeCgroup()
        self.kept: list[int] = []
        self.peers: list[object] = []
        self.current = FakeZygote(self.kept)
        self.heard: list[tuple[FakeZygote, Imported]] = []

    def serving(self, _environment: object) -> FakeZygote:
        return self.current

    def greeted(self, peer: object, _hello: Hello) -> None:
        self.peers.append(peer)

    def hear(self, zygote: FakeZygote, imported: Imported) -> None:
        self.heard.append((zygote, imported))

    def die(self) -> None:
        """The zygote ends, and another takes its place."""
        old, self.current = self.current, FakeZygote(self.kept)
        old.is_over, old.takes_work = True, False
        self._pool.on_zygote_death(old)


class FakeStore:
    """Keeps nothing."""

    def serve(self, *_: object) -> None: ...


class FakeWatch:
    """Devices with a UUID are known; each has the sample that was put there."""

    def __init__(self, *on: Sample) -> None:
        self.on = list(on)
        self.looks: Counter[int | str] = Counter()
        self.calls: list[str] = []
        self.health: dict[int | str, Health] = {}

    def knows(self, device: Device) -> bool:
        return device.uuid is not None

    def open(self) -> None:
        self.calls.append("open")

    def look(self, device: Device) -> Sample:
        self.looks[device.id] += 1
        assert isinstance(device.id, int)
        return self.on[device.id]

    def check(self, device: Device) -> Health:
        return self.health.get(device.id, Health())

    def close(self) -> None:
        self.calls.append("close")


class FakeVendor:
    """An accelerator of which only the watch is asked for."""

    kind = "GPU"

    def __init__(self, watch: FakeWatch) -> None:
        self._watch = watch

    def watch(self) -> FakeWatch:
        return self._watch


class FakeSource:
    """Says whether it is paused."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class SlowTerminal(io.StringIO):
    """Blocks every write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait(20)
        return super().write(text)
