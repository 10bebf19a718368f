"""What a worker's code is given, and what it gives: payloads opened and made."""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING, Any

from aiogpu.errors import NodeClosedError
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.serializer import load_arguments
from aiogpu.worker.context import current

if TYPE_CHECKING:
    from aiogpu.serialization.references import PickledValue


def arguments_in(payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a call is given; what of it is kept keeps alive what it needs itself."""
    current.loader = get_ident()
    try:
        return load_arguments(payload)
    finally:
        current.loader = 0
        if type(payload) is Payload:
            payload.release()


def packed(outgoing: PickledValue) -> bytes:
    """The payload of what this worker sends; see `Loans.pack`."""
    loans = current.loans
    if loans is None:
        raise NodeClosedError("this process is a fork of a worker, and sends nothing.")
    return loans.pack(outgoing)
