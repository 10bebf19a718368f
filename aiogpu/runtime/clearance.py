"""Whether the devices of a worker that has ended are free: asked of their drivers.

The loop's side. Drivers block, so they have one daemon thread, which is there only
if there is a driver to ask; the loop gives it orders and never waits for it. A
thread that hangs in a driver harms the devices it was asked about, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from aiogpu.accelerators.base import Accelerator
from aiogpu.core.devices import DeviceSet
from aiogpu.core.ids import WorkerId
from aiogpu.core.ledger import Lease
from aiogpu.core.resources import UNIT
from aiogpu.runtime.inspection import Cleared, Inspection, Key, Report, Stuck

_log: Final = logging.getLogger(__name__)

LIMIT: Final = 10.0
"""Seconds after a worker's end until its devices are set aside."""
MUTE: Final = 5.0
"""Seconds beyond the limit until a driver counts as one that does not answer."""
CLOSE_LIMIT: Final = 1.0
"""Seconds that a closing node waits for the thread; a driver may hang."""

Order = Callable[[Inspection], Sequence[Report] | None]
"""What the thread is to do; it says what it has found out."""


class Clearance:
    """The devices of one node that can be asked about, and who may still hold them.

    Attributes:
        on_settled: told of a worker whose devices are free, and whether their
            drivers have all agreed.
        on_set_aside: told of a worker whose devices are not to be used, and why.
        on_recovered: told of such a device that may be used again: kind and index.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device_sets: Iterable[DeviceSet],
        accelerators: Iterable[Accelerator],
        limit: float | None = None,
    ) -> None:
        """Start the thread, if there is any device to ask about.

        Args:
            loop: calls what is told.
            device_sets: the node's devices. Those without a vendor's id are logical,
                and nobody is asked about them.
            accelerators: whose drivers to ask.
            limit: seconds to wait for a device before it is set aside; `LIMIT` if
                None.
        """
        self.on_settled: Callable[[WorkerId, bool], None]
        self.on_set_aside: Callable[[WorkerId, str], None]
        self.on_recovered: Callable[[str, int], None]
        self._loop = loop
        self._limit = LIMIT if limit is None else limit
        watches = {vendor.kind: vendor.watch() for vendor in accelerators}
        self._devices = {
            (devices.kind, index): device
            for devices in device_sets
            for index, device in enumerate(devices.devices)
            if devices.kind in watches and watches[devices.kind].knows(device)
        }
        kinds = {kind for kind, _ in self._devices}
        asked = {kind: watch for kind, watch in watches.items() if kind in kinds}
        self._waiting: dict[WorkerId, asyncio.TimerHandle] = {}
        self._keys: dict[WorkerId, tuple[Key, ...]] = {}
        self._aside: dict[Key, set[WorkerId]] = {}
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._ended = loop.create_future()
        self._thread: threading.Thread | None = None
        if self._devices:
            inspection = Inspection(asked, self._devices, self._limit)
            self._thread = threading.Thread(
                target=self._run,
                args=(inspection,),
                name="aiogpu-devices",
                daemon=True,
            )
            self._thread.start()

    def __repr__(self) -> str:
        return (
            f"<Clearance of {len(self._devices)} devices: {len(self._waiting)} workers "
            f"waited for, {len(self._aside)} devices set aside>"
        )

    def begin(self, worker: WorkerId, lease: Lease) -> None:
        """A worker is told its devices: see what is on those that it has all of."""
        shares = self._shares(lease)
        whole = [key for key, amount in shares.items() if amount == UNIT]
        if whole:
            asked = time.monotonic()
            self._orders.put(
                lambda inspection: inspection.begin(
                    worker, whole, time.monotonic() - asked
                )
            )

    def end(self, worker: WorkerId, lease: Lease, pids: Collection[int]) -> bool:
        """A worker and all that it started have ended: ask for its devices.

        Args:
            worker: its id.
            lease: what it had.
            pids: its processes, as far as they are known.

        Returns:
            Whether anybody is asked. If so, `on_settled` or `on_set_aside` is told of
            the worker, once; if not, its devices are free as far as anybody knows.
        """
        shares = self._shares(lease)
        if not shares:
            return False
        keys = tuple(shares)
        whole = frozenset(key for key, amount in shares.items() if amount == UNIT)
        self._keys[worker] = keys
        self._waiting[worker] = self._loop.call_later(
            self._limit + MUTE, self._on_mute, worker
        )
        self._orders.put(
            lambda inspection: inspection.end(
                worker, keys, whole, pids, time.monotonic()
            )
        )
        return True

    def _shares(self, lease: Lease) -> Mapping[Key, int]:
        """The parts of a lease that somebody can be asked about."""
        if self._thread is None or not lease.shares or not self._thread.is_alive():
            return {}
        return {
            (kind, index): amount
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=True
            )
            for index, amount in shares
            if (kind, index) in self._devices
        }

    def quit(self) -> None:
        """Let the thread end by itself; nothing is told any more."""
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        self._keys.clear()
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

    def _on_mute(self, worker: WorkerId) -> None:
        devices = self._devices
        names = ", ".join(f"{key[0]} {devices[key].id}" for key in self._keys[worker])
        seconds = self._limit + MUTE
        self._hear(
            Stuck(worker, f"{names}: the driver has not answered for {seconds:g} s")
        )

    def _hear(self, report: Report) -> None:
        """Tell the core what the thread has found out; a worker is told of once."""
        worker = WorkerId(report.worker)
        if worker not in self._keys:
            return
        timer = self._waiting.pop(worker, None)
        if timer is not None:
            timer.cancel()
        match report:
            case Stuck(_, reason) if timer is not None:
                for key in self._keys[worker]:
                    self._aside.setdefault(key, set()).add(worker)
                _log.warning("! set aside until it recovers: %s", reason)
                self.on_set_aside(worker, reason)
            case Cleared(_, _, is_verified) if timer is not None:
                del self._keys[worker]
                self.on_settled(worker, is_verified)
            case Cleared(_, keys):
                for key in keys:
                    self._recover(worker, key)

    def _recover(self, worker: WorkerId, key: Key) -> None:
        """A device that was set aside is free of one worker, perhaps the last."""
        self._keys[worker] = tuple(k for k in self._keys[worker] if k != key)
        if not self._keys[worker]:
            del self._keys[worker]
        holders = self._aside[key]
        holders.discard(worker)
        if not holders:
            del self._aside[key]
            _log.warning("! %s %s has recovered", key[0], self._devices[key].id)
            self.on_recovered(*key)

    def _give_up(self) -> None:
        """The thread has failed, not a device: give back what it was asked about."""
        for worker, keys in list(self._keys.items()):
            self._hear(Cleared(worker, keys, is_verified=False))

    def _run(self, inspection: Inspection) -> None:
        """The thread: obey orders, and look again when it is time."""
        try:
            inspection.open()
            while (order := self._next_order(inspection.due)) is not None:
                for report in order(inspection) or ():
                    self._loop.call_soon_threadsafe(self._hear, report)
        except Exception:  # noqa: BLE001 - a thread has nobody else to tell
            # A loop that was closed without its node is told no more.
            if not self._loop.is_closed():
                _log.exception("! devices are not watched any more")
                self._loop.call_soon_threadsafe(self._give_up)
        finally:
            inspection.close()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._note_ended)

    def _next_order(self, due: float | None) -> Order | None:
        """What to do next; None to end."""
        pause = None if due is None else max(0.0, due - time.monotonic())
        try:
            return self._orders.get(timeout=pause)
        except Empty:
            return lambda inspection: inspection.turn(time.monotonic())
