"""Outgoing things made parcels without any shared memory."""

from __future__ import annotations

from aiogpu.wire.outgoing import Outgoing
from aiogpu.wire.parcel import Contents, Parcel


def carried(dumped: bytes | Outgoing) -> bytes:
    """The payload of what was pickled, with all its buffers within it."""
    if not isinstance(dumped, Outgoing):
        return dumped
    return Parcel.of(
        Contents(
            stream=dumped.stream,
            buffers=tuple(map(bytes, dumped.buffers)),
            places=dumped.places,
            parts=tuple(map(carried, dumped.parts)),
            returns=dumped.returns,
        )
    )
