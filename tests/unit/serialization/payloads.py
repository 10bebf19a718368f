"""Helpers that pickle and unpickle, and classes that the tests pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.pickler import dump
from aiogpu.serialization.references import PickledValue


def carried(dumped: bytes | PickledValue) -> bytes:
    """Turn a pickled value into a payload that contains its buffers."""
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
    """Undo `pickler.dump`, with read-only buffers as from shared memory."""
    return pickle.loads(stream, buffers=[buffer.toreadonly() for buffer in buffers])


def round_trip(value: object) -> Any:
    stream, buffers = dump(value)
    return load(stream, buffers)


def local(function: Any) -> Any:
    """Make a function look as if it were defined where it cannot be imported."""
    function.__module__ = "__main__"
    function.__qualname__ = "local.<locals>." + function.__name__
    return function


class Holder:
    """An object with the attributes that its constructor gets."""

    def __init__(self, **parts: object) -> None:
        vars(self).update(parts)


class Mute(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise SystemExit(3)


class InterruptingRepr(Mute):
    """An exception whose text and repr cannot be had."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt
