"""Which quantities of devices may be asked for, where a share of one cannot be."""

from __future__ import annotations

from aiogpu.core.resources import UNIT, quantity
from aiogpu.errors import OptionError


def whole_devices(option: str, value: object, singular: str) -> int:
    """Turn a number of whole devices into parts of 1/10 000.

    Args:
        option: the option's name, for the message.
        value: a whole number, at least 0; 2.0 is one too.
        singular: what one of them is called, "NeuronCore".

    Raises:
        OptionError: the value is no such number.
    """
    parts = quantity(option, value)
    if isinstance(value, float) and not value.is_integer():
        raise OptionError(
            f"{option}={value!r}: a {singular} cannot be shared; give a whole number "
            f"of them, such as {max(1, -(-parts // UNIT))}."
        )
    return parts
