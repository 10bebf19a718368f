"""The thread that asks the drivers of a node's devices, and how the loop orders it.

Drivers block, so they have one daemon thread, which is there only if there is a
driver to ask; the loop gives it orders and never waits for it. A thread that hangs
in a driver harms the devices that it was asked about, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from aiogpu.accelerators.base import Accelerator
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.runtime.device_eyes import DeviceEyes, Key
from aiogpu.runtime.inspection import Inspection, Report
from aiogpu.runtime.rounds import Round, Rounds

_log: Final = logging.getLogger(__name__)

CLOSE_LIMIT: Final = 1.0
"""Seconds that a closing node waits for the thread; a driver may hang."""


class Desk(NamedTuple):
    """What the thread works with; nobody else touches it.

    Attributes:
        inspection: looks after the ends of workers.
        rounds: looks while they run.
    """

    inspection: Inspection
    rounds: Rounds


Order = Callable[[Desk], Sequence[Report] | None]
"""What the thread is to do; it says what it has found out."""


class DeviceThread:
    """The drivers of one node's devices, behind a queue of orders.

    Attributes:
        on_report: told what has become of the devices of a worker that has ended.
        on_round: told of each round to the devices.
        on_failed: told that nobody is asked any more, for a bug of ours.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device_sets: Iterable[DeviceSet],
        accelerators: Iterable[Accelerator],
    ) -> None:
        """Prepare; `start` starts the thread, if there is any device to ask about.

        Args:
            loop: calls what is told.
            device_sets: the node's devices. Those without a vendor's id are logical,
                and nobody is asked about them.
            accelerators: whose drivers to ask.
        """
        self.on_report: Callable[[Report], None]
        self.on_round: Callable[[Round], None] = _ignore
        self.on_failed: list[Callable[[], None]] = []
        self._loop = loop
        self._eyes = DeviceEyes.of(device_sets, accelerators)
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._ended = loop.create_future()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "on" if self.is_alive else "off"
        return f"<DeviceThread {state}, {len(self.devices)} devices>"

    @property
    def devices(self) -> Mapping[Key, Device]:
        """Those that can be asked about."""
        return self._eyes.devices

    @property
    def is_alive(self) -> bool:
        """Whether it can be given orders."""
        return self._thread is not None and self._thread.is_alive()

    def name_of(self, key: Key) -> str:
        """A device as people know it."""
        return self._eyes.name_of(key)

    def start(self, limit: float) -> None:
        """Start asking; `limit` is how long a device may be held after an end."""
        if self.devices:
            desk = Desk(Inspection(self._eyes, limit), Rounds(self._eyes))
            self._thread = threading.Thread(
                target=self._run, args=(desk,), name="aiogpu-devices", daemon=True
            )
            self._thread.start()

    def order(self, order: Order) -> None:
        """Have something done, after all that was ordered before."""
        self._orders.put(order)

    def mute_for(self) -> tuple[str, float] | None:
        """The kind whose driver is asked now, and for how many seconds it has been."""
        asking = self._eyes.asking if self.is_alive else None
        if asking is None:
            return None
        kind, since = asking
        return kind, time.monotonic() - since

    def quit(self) -> None:
        """Let the thread end by itself; rounds are told no more."""
        self.on_round = _ignore
        self._orders.put(None)

    async def close(self) -> None:
        """Let the drivers go; waits for them for a second at most."""
        self.quit()
        if self._thread is None:
            return
        await asyncio.wait([self._ended], timeout=CLOSE_LIMIT)
        if self._ended.done():
            self._thread.join()
        self._thread = None

    def _note_ended(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _hear(self, report: Report) -> None:
        self.on_report(report)

    def _see(self, seen: Round) -> None:
        self.on_round(seen)

    def _give_up(self) -> None:
        for told in self.on_failed:
            told()

    def _run(self, desk: Desk) -> None:
        """The thread: obey orders, and look again when it is time."""
        try:
            self._eyes.open()
            idle = {key: self._eyes.look(key) for key in self._eyes.devices}
            desk.inspection.open(idle)
            self._tell(self._see, desk.rounds.begin(idle))
            while self._work(desk):
                pass
        except Exception:  # noqa: BLE001 - a thread has nobody else to tell
            # A loop that was closed without its node is told no more.
            if not self._loop.is_closed():
                _log.exception("! devices are not watched any more")
                self._loop.call_soon_threadsafe(self._give_up)
        finally:
            self._eyes.close()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._note_ended)

    def _work(self, desk: Desk) -> bool:
        """Do what comes next; whether there is more to do."""
        dues = (desk.inspection.due, desk.rounds.due)
        due = min((each for each in dues if each is not None), default=None)
        pause = None if due is None else max(0.0, due - time.monotonic())
        try:
            order = self._orders.get(timeout=pause)
        except Empty:
            reports: Sequence[Report] | None = desk.inspection.turn(time.monotonic())
        else:
            if order is None:
                return False
            reports = order(desk)
        for report in reports or ():
            self._tell(self._hear, report)
        seen = desk.rounds.turn()
        if seen is not None:
            self._tell(self._see, seen)
        return True

    def _tell(self, told: Callable[..., None], what: object) -> None:
        self._loop.call_soon_threadsafe(told, what)


def _ignore(_seen: Round) -> None:
    """Nobody wants to know."""
