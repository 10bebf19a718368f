"""The pipe on which a node says to whoever has started it that it is ready, or why not.

One line of JSON. A pipe that ends without one tells of a process that has died.
"""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import suppress
from typing import Final, NamedTuple

from aiogpu import errors

CHUNK: Final = 1 << 16


class Ready(NamedTuple):
    """What a node says when it serves.

    Attributes:
        pid: its process.
        resources: what it has, by name.
        socket: where it listens.
        logs: the directory of its logs.
    """

    pid: int
    resources: dict[str, float]
    socket: str
    logs: str


def tell_ready(pipe: int, ready: Ready) -> None:
    """Say that it serves; nobody may be listening any more."""
    _tell(pipe, {"ready": ready._asdict()})


def tell_failure(pipe: int, error: errors.AiogpuError) -> None:
    """Say why it never will."""
    _tell(pipe, {"failed": type(error).__name__, "text": str(error)})


def _tell(pipe: int, fields: dict[str, object]) -> None:
    with suppress(OSError):
        os.write(pipe, json.dumps(fields).encode() + b"\n")


def hear(pipe: int, seconds: float) -> Ready | None:
    """Wait for what it says; None if it has ended without a word.

    Raises:
        AiogpuError: what it has failed of.
        TimeoutError: it has said nothing for so long.
    """
    ends, said = time.monotonic() + seconds, b""
    while not said.endswith(b"\n"):
        left = max(0.0, ends - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise TimeoutError
        part = os.read(pipe, CHUNK)
        if not part:
            return None
        said += part
    fields = json.loads(said)
    if "ready" in fields:
        return Ready(**fields["ready"])
    raise _error(fields["failed"])(fields["text"])


def _error(name: str) -> type[errors.AiogpuError]:
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, errors.AiogpuError):
        return found
    return errors.NodeStartError
