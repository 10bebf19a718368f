"""What a client may number and name: what is new, and what is its own.

A number that it gives twice would take the place of the one before, and what went by
that would be nobody's when the client goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.errors import ProtocolError
from aiogpu.wire.messages import (
    NUMBER_BITS,
    Ask,
    Fetch,
    Find,
    FindPlacement,
    Inquire,
    Make,
    Message,
    Put,
    PutFailed,
    Share,
    Submit,
    TakeLease,
)

if TYPE_CHECKING:
    from aiogpu.runtime.client import Client

_ASKING: Final = frozenset(
    {Submit, Ask, Find, Fetch, TakeLease, FindPlacement, Inquire}
)
_OF_VALUES: Final = frozenset({Put, PutFailed, Share})


def check_claims(client: Client, message: Message) -> None:
    """Check the numbers and ids that a message gives to what it begins.

    Raises:
        ProtocolError: one was given before, or is another's.
    """
    kind = type(message)
    if kind in _ASKING:
        _count(client, message.child)  # type: ignore[union-attr]
    elif kind in _OF_VALUES:
        _number(client, message.value)  # type: ignore[union-attr]
    elif kind is Make:
        _count(client, _number(client, message.actor))  # type: ignore[union-attr]


def count_fresh(client: Client, submits: Sequence[Submit]) -> int:
    """How many of the first of these have numbers of their own; they are given now."""
    last = client.last
    for place, submit in enumerate(submits):
        if submit.child <= last:
            client.last = last
            return place
        last = submit.child
    client.last = last
    return len(submits)


def _count(client: Client, number: int) -> None:
    """Numbers go up, so that none comes twice."""
    if number <= client.last:
        raise ProtocolError(f"the number {number} after {client.last}")
    client.last = number


def _number(client: Client, identity: int) -> int:
    """By which a client knows what it has given an id."""
    number = -identity - (client.id << NUMBER_BITS)
    if not 0 < number < 1 << NUMBER_BITS:
        raise ProtocolError(f"the id {identity}, which is not one of its own")
    return number
