"""Outgoing things made parcels without any shared memory."""

from __future__ import annotations

from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.references import PickledValue


def carried(dumped: bytes | PickledValue) -> bytes:
    """The payload of what was pickled, with all its buffers within it."""
    if not isinstance(dumped, PickledValue):
        return dumped
    return Payload.of(
        Contents(
            stream=dumped.stream,
            buffers=tuple(map(bytes, dumped.buffers)),
            places=dumped.places,
            parts=tuple(map(carried, dumped.parts)),
            returns=dumped.returns,
        )
    )
