"""From what was pickled to a payload, for whichever code sends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.worker.context import current

if TYPE_CHECKING:
    from aiogpu.wire.outgoing import Outgoing


def packed(outgoing: Outgoing) -> bytes:
    """The payload of arguments that are more than a pickle.

    Raises:
        MisuseError: a handle among them belongs to another event loop.
        ObjectMemoryError: there is no room for them.
        SerializationError: they are too large.
        NoLoopError: no event loop is running here.
    """
    if current.loans is not None:
        return current.loans.pack(outgoing)
    from aiogpu.api.caller import session_of_caller

    return session_of_caller().pack(outgoing)
