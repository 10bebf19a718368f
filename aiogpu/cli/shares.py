"""Who holds which share of the devices in the box, if a node runs that can be asked."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import click

import aiogpu
from aiogpu.cli import joining
from aiogpu.cli.data import holder_data
from aiogpu.cli.tables import held_by
from aiogpu.core.model.request import Device
from aiogpu.observe.status import DeviceStatus

PATIENCE: Final = 5.0
"""Seconds in which the node has to answer."""


class Shares(NamedTuple):
    """What the user's node says of its devices.

    Attributes:
        devices: those that it has.
        note: why nothing is known of them, though there may be a node; "" otherwise.
    """

    devices: tuple[DeviceStatus, ...] = ()
    note: str = ""

    def of(self, kind: str, device: Device) -> DeviceStatus | None:
        """Return what the node says of a device; None if it does not have it."""
        for one in self.devices:
            is_known = one.uuid is not None and device.uuid is not None
            is_it = one.uuid == device.uuid if is_known else one.id == device.id
            if one.kind == kind and is_it:
                return one
        return None

    def told(self, kind: str, device: Device) -> str:
        """Who holds what of a device, and how much is free, in words."""
        found = self.of(kind, device)
        if found is None:
            return ""
        if found.aside is not None:
            return f"set aside: {found.aside}"
        holders = ", ".join(held_by(found, with_others=False))
        free = f"{found.free:g} free"
        return f"{holders}; {free}" if holders else free

    def data(self, kind: str, device: Device) -> dict[str, Any]:
        """The same for programs; nothing if the node does not have it."""
        found = self.of(kind, device)
        if found is None:
            return {}
        holders = [holder_data(one) for one in found.holders]
        return {"free": found.free, "aside": found.aside, "holders": holders}


async def ask_shares() -> Shares:
    """Ask the user's node, if there may be one; no node is no failure."""
    address = joining.default_address()
    try:
        joining.check_there(address)
    except click.ClickException:
        return Shares()
    except aiogpu.NodeError as error:
        return _unknown(str(error))
    try:
        async with joining.joined(address, PATIENCE) as node:
            return Shares((await node.status()).devices)
    except (click.ClickException, aiogpu.AiogpuError) as error:
        told = error.message if isinstance(error, click.ClickException) else str(error)
        return _unknown(told)


def _unknown(told: str) -> Shares:
    """Nothing is known of the shares, for the reason that an error has told."""
    why = told.partition(". ")[0].rstrip(".")
    return Shares(note=f"Who holds what is not known: {why}.")
