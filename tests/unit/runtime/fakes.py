"""Fakes of the objects around a part of the runtime; each records its calls."""

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


def func(function_: Function | None = None) -> FunctionSpec:
    request = Request.of({"CPU": UNIT}, {})
    spec = TaskSpec("train", Shape(request))
    known = function_ or function()
    return FunctionSpec(new_func_id(), known, spec, request.as_numbers(), {}, False)


def call(site: FunctionSpec | None = None) -> Call:
    return Call(site or func(), b"arguments", None)


GIB = 1 << 30
SIZED_GPUS = DeviceSet(
    "GPU", [Device(0, memory=80 * GIB), Device("GPU-1", memory=40 * GIB), Device(2)]
)


def lease_of(
    *indices: int, share: int = UNIT, gpu_memory: int = 0, cpus: int = 1
) -> Lease:
    """A lease of the GPUs with these indices and of the same share of each."""
    gpus = {"GPU": share * len(indices)}
    request = Request.of({"CPU": cpus * UNIT}, gpus, gpu_memory=gpu_memory)
    shares = tuple((index, share) for index in indices)
    return Lease(LeaseId(1), request, (shares,) if request.devices else (), Ledger({}))


class Timer:
    """One scheduled call."""

    def __init__(self, when: float, call: Callable[[], object]) -> None:
        self.when, self.call = when, call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandLoop:
    """An event loop that has timers only and a clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> None:
        """No code under test awaits the future."""

    def call_at(self, when: float, call: Callable[..., object], *args: object) -> Timer:
        timer = Timer(when, lambda: call(*args))
        self._timers.append(timer)
        return timer

    def call_later(self, pause: float, *call: Any) -> Timer:
        return self.call_at(self.now + pause, *call)

    @property
    def due(self) -> float | None:
        """The time of the next call; None without a call."""
        self._timers = [timer for timer in self._timers if not timer.is_cancelled]
        return min((timer.when for timer in self._timers), default=None)

    def step(self) -> float:
        """Advance to the next call and make it; return the seconds that passed."""
        due = self.due
        assert due is not None
        assert due >= self.now
        before, self.now = self.now, due
        timer = next(timer for timer in self._timers if timer.when == due)
        self._timers.remove(timer)
        timer.call()
        return due - before


class PromptThread(DeviceThread):
    """Samples devices immediately, in the test's own thread."""

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
    """A socket that knows only the user id of its peer."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def fileno(self) -> int:
        return -1

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("iII", 1, self._uid, 0)[:size]


class FakeTransport(asyncio.Transport):
    """Records the bytes that are written and the methods that are called."""

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
    """The connection of a keeper or a worker."""

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
        """Remove and return the messages that were sent."""
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
    """A console that has written as many lines as the test sets in `written`."""

    def __init__(self) -> None:
        self.written = 0
        self.routes = None
        self.cell_of = None
        self.lines: list[tuple[int, str]] = []
        self._after: list[tuple[int, Callable[[], None]]] = []

    def write(
        self, stream: int, line: str, source: Source, worker: int = 0, cell: object = 0
    ) -> int:
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
    """The words of a control page, in dictionaries."""

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

    def note_import(self, _place: int, _module: str) -> None:
        """Nothing is imported."""

    def importing(self, _place: int) -> str:
        return ""


class FakeCgroup:
    """Records the slots whose processes were looked for; there is no cgroup."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def of_slot(self, slot: int) -> None:
        self.ended.append(slot)


class FakeZygote:
    """Records the slots for which keepers were requested."""

    def __init__(self, kept: list[int] | None = None) -> None:
        self.problem: Exception | None = None
        self.takes_work = True
        self.is_over = False
        self.can_report = False
        self.ready_at: float | None = 0.0
        self.kept: list[int] = [] if kept is None else kept
        self.released: list[int] = []

    def request_keeper(self, slot: int) -> None:
        self.kept.append(slot)

    def release(self, slot: int) -> None:
        self.released.append(slot)


class FakeZygotes:
    """One zygote at a time, for every environment."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page = FakePage()
        self.cgroup = FakeCgroup()
        self.kept: list[int] = []
        self.peers: list[object] = []
        self.current = FakeZygote(self.kept)
        self.heard: list[tuple[FakeZygote, Imported]] = []

    def choose(self, _environment: object, _function: object = None) -> FakeZygote:
        return self.current

    def on_hello(self, peer: object, _hello: Hello) -> None:
        self.peers.append(peer)

    def note_imports(self, zygote: FakeZygote, imported: Imported) -> None:
        self.heard.append((zygote, imported))

    def die(self) -> None:
        """End the zygote and put another one in its place."""
        old, self.current = self.current, FakeZygote(self.kept)
        old.is_over, old.takes_work = True, False
        self._pool.on_zygote_death(old)


class FakeStore:
    """A store without values."""

    def serve(self, *_: object) -> None: ...


class FakeWatch:
    """A driver that knows the devices with a UUID; `on` has the sample of each."""

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
    """An accelerator that has a watch and nothing else."""

    kind = "GPU"

    def __init__(self, watch: FakeWatch) -> None:
        self._watch = watch

    def watch(self) -> FakeWatch:
        return self._watch


class FakeSource:
    """A source of output that records when it is paused."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class SlowTerminal(io.StringIO):
    """A terminal that blocks every write until `is_free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait(20)
        return super().write(text)
