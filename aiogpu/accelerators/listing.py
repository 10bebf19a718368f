"""The devices that a variable lists by their indices, of those that there are.

What most vendors' variables have in common: entries divided by commas, unset for all
and empty for none. Entries that are ill-formed, repeated or not there are errors here,
where the vendors' runtimes hide them, or fail late. CUDA's has rules of its own, in
`visible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, islice

from aiogpu.core.devices import Device
from aiogpu.errors import DeviceError

Id = int | str
Listed = tuple[str, str, Sequence[Id]]
"""A variable, its value, and the ids that it names."""
NOSET = "AIOGPU_NOSET_"
"""Before a variable's name: the switch that leaves it to the user."""
NONE = ("", "NoDevFiles")
"""Values that name no device; Slurm writes the second."""
ON = frozenset({"1", "true", "yes", "on"})
MOST_DIGITS = 9
"""More digits than any box has devices, and always an `int` at once."""


def is_left_alone(variable: str, environ: Mapping[str, str]) -> bool:
    """Whether the user has said that aiogpu is not to set a variable."""
    return environ.get(NOSET + variable, "").strip().lower() in ON


def index(entry: str) -> Sequence[Id]:
    """What an entry names: "3" the device 3; nothing where it is ill-formed."""
    is_number = entry.isascii() and entry.isdigit() and len(entry) <= MOST_DIGITS
    return (int(entry),) if is_number else ()


def entries(
    variable: str, text: str, parse: Callable[[str], Sequence[Id]] = index
) -> tuple[Id, ...]:
    """Read a variable's value; -1 and what follows it are left out.

    Raises:
        DeviceError: an entry is ill-formed, or names what one before it has named.
    """
    if text.strip() in NONE:
        return ()
    found: dict[Id, None] = {}
    for raw in text.split(","):
        entry = raw.strip()
        if entry == "-1":
            break
        named = parse(entry)
        if not named:
            raise DeviceError(
                f"{variable}={text!r}: {entry!r} names no device. Correct the entry, "
                f"or take it out."
            )
        for id_ in named:
            if id_ in found:
                raise DeviceError(
                    f"{variable}={text!r}: {entry!r} names the device {id_} for the "
                    f"second time. Name each device once."
                )
            found[id_] = None
    return tuple(found)


def listed_in(
    environ: Mapping[str, str],
    variable: str,
    parse: Callable[[str], Sequence[Id]] = index,
) -> Listed | None:
    """What a variable lists, None where it is not set; see `entries`."""
    text = environ.get(variable)
    return None if text is None else (variable, text, entries(variable, text, parse))


def choose(
    option: str,
    wanted: int | None,
    there: Sequence[Device],
    listed: Listed | None,
    logical: Callable[[Id], Device] = Device,
) -> tuple[Device, ...]:
    """Say which devices a node may share out.

    Args:
        option: that asks for them, for the messages.
        wanted: how many the user gave; None for those that are there.
        there: those that were detected.
        listed: the variable that restricts them, its value and the ids that it names;
            None where it is not set.
        logical: makes a device that was not detected.

    Raises:
        DeviceError: the variable names what is not there, or fewer than are wanted.
    """
    if listed is None:
        if wanted is None:
            return tuple(there)
        taken = {device.id for device in there}
        others = (logical(number) for number in count() if number not in taken)
        more = islice(others, max(0, wanted - len(there)))
        return (*there, *more)[:wanted]
    variable, text, ids = listed
    if wanted is not None and wanted > len(ids):
        raise DeviceError(
            f"{option}={wanted}, but {variable}={text!r} names {len(ids)}; ask for at "
            f"most {len(ids)}, or name more."
        )
    if wanted is None and not there:
        return ()
    known = {device.id: device for device in there}
    for id_ in ids:
        if known and id_ not in known:
            raise DeviceError(
                f"{variable}={text!r}: there is no device {str(id_)!r}. This machine "
                f"has {_enumerated(known)}. Name one that is there."
            )
    return tuple(known.get(id_) or logical(id_) for id_ in ids)[:wanted]


def _enumerated(ids: Iterable[Id]) -> str:
    return ", ".join(map(str, ids))


def joined(ids: Iterable[Id]) -> str:
    """A variable's value that names these."""
    return ",".join(map(str, ids))
