"""The leases that this program has of a node which it has joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.wire.messages import Failed, TakeLease, Withdraw

if TYPE_CHECKING:
    from aiogpu.engines.remote import RemoteEngine
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.runtime.calls import Site
    from aiogpu.wire.messages import ChildFailed


class RemoteLeases:
    """Those that were granted and not given back; others wait as tasks do."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._held: dict[int, LeaseReceiver] = {}

    def __repr__(self) -> str:
        return f"<RemoteLeases {len(self._held)} held>"

    def take(self, site: Site, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        engine = self._engine
        if site.checked_by is not engine.mark:
            engine.admit(site)
        asking = _Asking(self._held, receiver)
        asking.number = engine.expect(asking)
        engine.send(TakeLease(asking.number, site.id))
        return asking.number

    def give_back(self, number: int) -> None:
        """Give back one that was granted; nothing happens for others."""
        if self._held.pop(number, None) is not None:
            self._engine.send(Withdraw(0, number))

    def lose(self, failed: ChildFailed) -> None:
        """Somebody else has removed what was granted; nothing happens for others."""
        receiver = self._held.pop(failed.child, None)
        if receiver is not None:
            receiver.reject(Failed(*failed))

    def end(self, error: Exception) -> None:
        """The node has gone, and all leases with it."""
        held, self._held = list(self._held.values()), {}
        for receiver in held:
            receiver.fail(error)


class _Asking:
    """Waits for one lease."""

    def __init__(self, held: dict[int, LeaseReceiver], receiver: LeaseReceiver) -> None:
        self.number = 0
        self._held = held
        self._receiver = receiver

    def receive(self, payload: bytes) -> None:
        """It is granted."""
        self._held[self.number] = self._receiver
        self._receiver.receive(payload)

    def reject(self, failed: Failed) -> None:
        """It is refused."""
        self._receiver.reject(failed)

    def fail(self, error: Exception) -> None:
        """It will not come."""
        self._receiver.fail(error)
