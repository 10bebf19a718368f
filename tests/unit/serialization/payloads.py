"""Pickled values made payloads without shared memory, and loaded from pickles."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

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


def load(stream: bytes | memoryview, buffers: Iterable[memoryview] = ()) -> Any:
    """Undo `pickler.dump`, with buffers that are as read-only as shared ones."""
    return pickle.loads(stream, buffers=[buffer.toreadonly() for buffer in buffers])
