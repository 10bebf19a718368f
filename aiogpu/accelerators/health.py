"""What a driver says of a device's health: plain data, like a `Sample`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """What was learnt since a device was asked last.

    Attributes:
        errors: errors that make it unfit, each in a few words: "XID 79"; those that a
            program has brought upon itself are not among them.
        action: what has to be done before it can be relied on, such as "GPU reset";
            "" if nothing has to be, None where the driver cannot tell.
        is_lost: it does not answer and will not before a reset.
    """

    errors: tuple[str, ...] = ()
    action: str | None = None
    is_lost: bool = False
