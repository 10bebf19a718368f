"""Gives a lease's devices back when its worker has ended and they are free of it.

Their drivers are asked by a `DeviceThread`; here it is decided which worker is waited
for, for how long, and what the core is told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.runtime.devices.probe_thread import (
    Cleared,
    DeviceThread,
    Key,
    Report,
    Stuck,
)

_log: Final = logging.getLogger(__name__)


LIMIT: Final = 10.0
"""Seconds after a worker's end until its devices are set aside."""


MUTE: Final = 5.0
"""Seconds beyond the limit until a driver counts as one that does not answer."""


class DeviceRelease:
    """The devices of one node that can be asked about, and who may still hold them.

    Attributes:
        on_settled: told of a worker whose devices are free, and whether their
            drivers have all agreed.
        on_set_aside: told of a worker whose devices are not to be used, and why.
        on_recovered: told of such a device that may be used again: kind and index.
        on_begun: told of a lease that a worker gets, if it reserves device memory.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: DeviceThread,
        limit: float | None = None,
    ) -> None:
        """Start the thread, if there is any device to ask about.

        Args:
            loop: calls what is told.
            thread: asks the drivers.
            limit: seconds to wait for a device before it is set aside; `LIMIT` if
                None.
        """
        self.on_settled: Callable[[WorkerId, bool], None]
        self.on_set_aside: Callable[[WorkerId, str], None]
        self.on_recovered: Callable[[str, int], None]
        self.on_begun: Callable[[Lease], None]
        self._loop = loop
        self._thread = thread
        self._limit = LIMIT if limit is None else limit
        self._devices = thread.devices
        self._waiting: dict[WorkerId, asyncio.TimerHandle] = {}
        self._keys: dict[WorkerId, tuple[Key, ...]] = {}
        self._begun: set[WorkerId] = set()
        self._aside: dict[Key, set[WorkerId]] = {}
        thread.on_report = self._hear
        thread.on_failed.append(self._give_up)
        thread.start(self._limit)

    def tell(self, feed: Feed) -> None:
        """Have the core told, by `feed`."""
        self.on_settled = lambda *told: feed(Scheduler.devices_free, *told)
        self.on_set_aside = lambda *told: feed(Scheduler.devices_stuck, *told)
        self.on_recovered = lambda *told: feed(Scheduler.device_recovered, *told)

    def __repr__(self) -> str:
        return (
            f"<DeviceRelease of {len(self._devices)} devices: {len(self._waiting)} "
            f"workers waited for, {len(self._aside)} devices set aside>"
        )

    def begin(self, worker: WorkerId, lease: Lease) -> None:
        """A worker is told its devices: see what is on those that it has all of."""
        shares = self._shares(lease)
        if shares and lease.request.gpu_memory:
            self.on_begun(lease)
        whole = [key for key, amount in shares.items() if amount == UNIT]
        if whole:
            asked = time.monotonic()
            self._begun.add(worker)
            self._thread.order(
                lambda desk: desk.inspection.begin(
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
        self._begun.discard(worker)
        keys = tuple(shares)
        whole = frozenset(key for key, amount in shares.items() if amount == UNIT)
        self._keys[worker] = keys
        self._waiting[worker] = self._loop.call_later(
            self._limit + MUTE, self._on_mute, worker
        )
        self._thread.order(
            lambda desk: desk.inspection.end(
                worker, keys, whole, pids, time.monotonic()
            )
        )
        return True

    def forget(self, worker: WorkerId) -> None:
        """A worker has ended that holds nothing any more, and is not asked about."""
        if worker in self._begun:
            self._begun.remove(worker)
            self._thread.order(lambda desk: desk.inspection.forget(worker))

    def _shares(self, lease: Lease) -> Mapping[Key, int]:
        """The parts of a lease that somebody can be asked about."""
        if not lease.shares or not self._thread.is_alive:
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
        """Wait for nobody; nothing is told any more."""
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        self._keys.clear()

    def _on_mute(self, worker: WorkerId) -> None:
        names = ", ".join(self._thread.name_of(key) for key in self._keys[worker])
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
            _log.warning("! %s has recovered", self._thread.name_of(key))
            self.on_recovered(*key)

    def _give_up(self) -> None:
        """The thread has failed, not a device: give back what it was asked about."""
        for worker, keys in list(self._keys.items()):
            self._hear(Cleared(worker, keys, is_verified=False))
