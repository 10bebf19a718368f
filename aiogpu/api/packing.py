"""From what was pickled to a payload, for whichever code sends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.client.current import services
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.serializer import WARNED_FROM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiogpu.serialization.large_arguments import RepeatedArguments
    from aiogpu.serialization.references import PickledValue


_repeats: RepeatedArguments | None = None


def packed_call(
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    outgoing: PickledValue,
) -> bytes:
    """The payload of a call's arguments that are more than a pickle.

    Who passes the same large object again and again is told of `put`.

    Args:
        name: what is called.
        args: positional arguments.
        kwargs: arguments by name.
        outgoing: the same, pickled.

    Raises:
        Exception: see `packed`.
    """
    payload = packed(outgoing)
    size = len(outgoing.stream) + sum(one.nbytes for one in outgoing.buffers)
    if size >= WARNED_FROM and not (type(payload) is Payload and payload.is_shown):
        global _repeats  # noqa: PLW0603 - most programs never need it
        if _repeats is None:
            from aiogpu.serialization.large_arguments import RepeatedArguments

            _repeats = RepeatedArguments()
        _repeats.note(name, args, kwargs)
    return payload


def packed(outgoing: PickledValue) -> bytes:
    """The payload of what is more than a pickle.

    Raises:
        MisuseError: a handle among them belongs to another event loop.
        ObjectMemoryError: there is no room for them.
        SerializationError: they are too large.
        NoLoopError: no event loop is running here.
    """
    if services.client is not None:
        from aiogpu.worker.nested import task_client

        return task_client().loans.pack(outgoing)
    from aiogpu.api.submission import session_of_caller

    return session_of_caller().pack(outgoing)
