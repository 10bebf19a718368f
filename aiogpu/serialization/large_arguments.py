"""Warnings about large functions and about repeatedly sent large arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from pickle import PickleBuffer
from typing import Any, Final
from weakref import ref

from aiogpu.serialization.diagnostics import advise, parts, walk
from aiogpu.serialization.pickler import measure
from aiogpu.serialization.serializer import WARNED_FROM, label_arguments

DOMINANT: Final = 0.6
"""Fraction of the whole; above a half, since a part alone pickles to more bytes."""

MIN_SIZE: Final = 4096
"""Bytes below which no part is sought. An object that is pickled by its name is small,
although its parts may be large."""


def find_heaviest(name: str, value: object) -> tuple[str, int]:
    """Return the path to the innermost part that makes up most of its parent.

    Each step pickles the parts of one object, without keeping the pickles, so this
    takes a few times as long as pickling.

    Args:
        name: the object's name, with which the path begins.
        value: the object.

    Returns:
        A path such as `f.__closure__.table`, and the pickled size of this part in
        bytes.
    """
    size = pickled_size(value)

    def is_dominant(step: str, part: object) -> bool:
        nonlocal size
        # Parts that only the reducer knows have no name that the user could look up.
        hidden = (".__reduce__", ".__getstate__", ".__class__")
        if size <= MIN_SIZE or step.startswith(hidden):
            return False
        part_size = pickled_size(part)
        if part_size <= DOMINANT * size:
            return False
        size = part_size
        return True

    path, _ = walk(name, value, is_dominant)
    return path, size


def pickled_size(value: object) -> int:
    """Return an object's size when pickled, in bytes; 0 if it cannot be pickled."""
    try:
        return measure(value)
    except Exception:  # noqa: BLE001 - a reducer of the user's may raise anything
        return 0


def format_size(size: int) -> str:
    """Format a size, as in `12.5 MiB`."""
    return f"{size / (1 << 20):.1f} MiB"


def advise_on_function(name: str, function: object, size: int) -> None:
    """Warn about a function or class that is large when pickled, and name the cause.

    Args:
        name: its name.
        function: the function or class.
        size: its pickled size in bytes, more than `WARNED_FROM`.

    Raises:
        AiogpuWarning: the filters make errors of warnings.
    """
    path, part = find_heaviest(name, function)
    much = f", of which {format_size(part)} are {path}" if path != name else ""
    advise(
        f"{name} is {format_size(size)} when pickled{much}; every worker that runs it "
        f"gets a copy. Put the large object once, `handle = aiogpu.put(x)`, and "
        f"pass the handle as an argument."
    )


REPEATS: Final = 8
"""Calls with the same object until a warning."""

REMEMBERED: Final = 256
"""Number of remembered objects, and of remembered warnings; the oldest are
forgotten."""

MAX_ITEMS: Final = 64
"""Arguments of one call that are examined."""

_SMALL: Final = frozenset({int, float, complex, bool, type(None)})
_SAMPLE: Final = 64
_MAX_DEPTH: Final = 3


class RepeatedArguments:
    """The latest large arguments, and how often each was passed.

    No object is kept alive. Objects are recognised by weak references. Lists,
    dictionaries, bytes and others do not allow these; they are recognised by identity
    and samples of their contents, since a new object often has the address of a deleted
    one.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, int], tuple[object, int]] = {}
        self._warned: dict[tuple[str, str], None] = {}

    def note(
        self, function: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Count a call with large arguments; warn at the eighth with the same object.

        Args:
            function: the function's name.
            args: positional arguments.
            kwargs: arguments by name.

        Raises:
            AiogpuWarning: the filters make errors of warnings.
        """
        for label, value in islice(label_arguments(args, kwargs), MAX_ITEMS):
            if type(value) in _SMALL or (function, label) in self._warned:
                continue
            if self._count(function, label, value) == REPEATS:
                self._warn(function, label, value)

    def _count(self, function: str, label: str, value: object) -> int:
        key = function, label, id(value)
        fingerprint = _fingerprint(value)
        # Reinserted at the end, so the first entry is the oldest.
        before, count = self._seen.pop(key, (None, 0))
        count = count + 1 if before == fingerprint else 1
        self._seen[key] = fingerprint, count
        _forget_oldest(self._seen)
        return count

    def _warn(self, function: str, label: str, value: object) -> None:
        size = pickled_size(value)
        if size < WARNED_FROM:
            return
        self._warned[function, label] = None
        _forget_oldest(self._warned)
        advise(
            f"{label} of {function} was the same {type(value).__name__} in {REPEATS} "
            f"calls, and its {format_size(size)} were copied for each. Put it once, "
            f"`handle = aiogpu.put(x)`, and pass the handle in its place."
        )


class _IdentityRef:
    """A weak reference that equals only references to the same living object.

    Plain weak references compare their objects: arrays would compare their elements.
    """

    __slots__ = ("_ref",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self._ref = ref(value)

    def __eq__(self, other: object) -> bool:
        # An object has one plain weak reference as long as it lives.
        return isinstance(other, _IdentityRef) and self._ref is other._ref


def _fingerprint(value: object, depth: int = 0) -> object:
    """Return a value that identifies an object, without keeping it alive.

    It differs for another object at the same address, and after the object's memory has
    changed: a buffer that is refilled for each call cannot be put once.
    """
    kind = type(value)
    if kind in _SMALL:
        return hash(value)
    content = _sample_content(value)
    try:
        return _IdentityRef(value), content
    except TypeError:
        if content is not None:
            return kind, content
    if depth == _MAX_DEPTH:
        return kind, id(value)
    return kind, [_fingerprint(part, depth + 1) for part in _sample_parts(value)]


def _sample_content(value: Any) -> object:
    """Return the size of a buffer or text, and copies of its ends and its middle."""
    copied: type[str | bytes] = str
    try:
        if not isinstance(value, str):
            value, copied = PickleBuffer(value).raw(), bytes
    except (TypeError, BufferError):
        return None
    middle = len(value) // 2
    samples = slice(_SAMPLE), slice(middle, middle + _SAMPLE), slice(-_SAMPLE, None)
    return len(value), *(copied(value[sample]) for sample in samples)


def _sample_parts(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        ends = (value[0], value[len(value) // 2], value[-1]) if value else ()
        return len(value), *ends
    if isinstance(value, dict):
        items = chain(islice(value.items(), 1), islice(reversed(value.items()), 1))
        return len(value), *chain.from_iterable(items)
    try:
        return [part for _, part in islice(parts(value), 3)]
    except Exception:  # noqa: BLE001 - a reducer of the user's may raise anything
        return (id(value),)


def _forget_oldest(kept: dict[Any, Any]) -> None:
    if len(kept) > REMEMBERED:
        del kept[next(iter(kept))]


repeated: Final = RepeatedArguments()
"""The large arguments of this process's calls."""
