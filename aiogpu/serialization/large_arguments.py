"""Advice about large arguments: what makes one large, and which is sent repeatedly."""

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
"""Share of the whole; a little above a half, since a part alone is pickled worse."""

MIN_SIZE: Final = 4096
"""Bytes below which no part is sought: what is pickled by name only has heavy parts."""


def find_heaviest(name: str, value: object) -> tuple[str, int]:
    """Return the path to the innermost part that is most of what holds it.

    Goes inwards as long as one part stands out. Each step pickles what lies within
    once, without keeping it; so it takes a few times as long as pickling did.

    Args:
        name: the object's name, with which the path begins.
        value: the object.

    Returns:
        A path such as `f.__closure__.table`, and the bytes that this part takes when
        pickled.
    """
    size = pickled_size(value)

    def is_dominant(step: str, part: object) -> bool:
        nonlocal size
        # What only its reducer knows has no name that a reader could look up.
        hidden = (".__reduce__", ".__getstate__", ".__class__")
        if size <= MIN_SIZE or step.startswith(hidden):
            return False
        found = pickled_size(part)
        if found <= DOMINANT * size:
            return False
        size = found
        return True

    path, _ = walk(name, value, is_dominant)
    return path, size


def pickled_size(value: object) -> int:
    """Return the bytes that an object takes when pickled; 0 if it cannot be."""
    try:
        return measure(value)
    except Exception:  # noqa: BLE001 - a reducer of the user's may raise anything
        return 0


def format_size(size: int) -> str:
    """Return a size for people: `12.5 MiB`."""
    return f"{size / (1 << 20):.1f} MiB"


def advise_on_function(name: str, function: object, size: int) -> None:
    """Warn of a function or class that is large when pickled, and say why it is.

    Args:
        name: its name.
        function: the function or class.
        size: bytes that it takes when pickled, more than `WARNED_FROM`.

    Raises:
        AiogpuWarning: the filters make errors of warnings.
    """
    path, part = find_heaviest(name, function)
    much = f", of which {format_size(part)} are {path}" if path != name else ""
    advise(
        f"{name} is {format_size(size)} when pickled{much}; every worker that runs it "
        f"gets a copy. Put what is large once, `handle = await aiogpu.put(x)`, and "
        f"pass the handle as an argument."
    )


REPEATS: Final = 8
"""Calls with the same object after which a warning is due."""

REMEMBERED: Final = 256
"""Objects, and warnings given, that are remembered; the oldest are forgotten."""

MAX_ITEMS: Final = 64
"""Arguments of one call that are looked at."""

_SMALL: Final = frozenset({int, float, complex, bool, type(None)})
_SAMPLE: Final = 64
_MAX_DEPTH: Final = 3


class RepeatedArguments:
    """The latest large arguments, and how often each was passed.

    No object is kept alive. One is recognised by a weak reference. A list, a
    dictionary, bytes and the like, which allow none, are recognised by identity and
    samples of their contents: a new object often has the address of a deleted one.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, int], tuple[object, int]] = {}
        self._told: dict[tuple[str, str], None] = {}

    def note(
        self, function: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Note a call with large arguments; warns once, at the eighth with the same.

        Args:
            function: the function's name.
            args: positional arguments.
            kwargs: arguments by name.

        Raises:
            AiogpuWarning: the filters make errors of warnings.
        """
        for label, value in islice(label_arguments(args, kwargs), MAX_ITEMS):
            if type(value) in _SMALL or (function, label) in self._told:
                continue
            if self._count(function, label, value) == REPEATS:
                self._tell(function, label, value)

    def _count(self, function: str, label: str, value: object) -> int:
        key = function, label, id(value)
        fingerprint = _fingerprint(value)
        # The latest goes to the end, so that the first is the oldest.
        before, count = self._seen.pop(key, (None, 0))
        count = count + 1 if before == fingerprint else 1
        self._seen[key] = fingerprint, count
        _forget_oldest(self._seen)
        return count

    def _tell(self, function: str, label: str, value: object) -> None:
        size = pickled_size(value)
        if size < WARNED_FROM:
            return
        self._told[function, label] = None
        _forget_oldest(self._told)
        advise(
            f"{label} of {function} was the same {type(value).__name__} in {REPEATS} "
            f"calls, and its {format_size(size)} were copied for each. Put it once, "
            f"`handle = await aiogpu.put(x)`, and pass the handle in its place."
        )


class _IdentityRef:
    """A weak reference that is equal to another of the same living object only.

    Plain ones compare what they refer to: arrays would compare their elements.
    """

    __slots__ = ("_ref",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self._ref = ref(value)

    def __eq__(self, other: object) -> bool:
        # An object has one plain reference for as long as it lives.
        return isinstance(other, _IdentityRef) and self._ref is other._ref


def _fingerprint(value: object, depth: int = 0) -> object:
    """Tell an object from another at the same address, without holding it.

    Nor does one match whose memory has changed: a buffer that is filled anew for each
    call cannot be put once.
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
    """The size of a buffer or text, and copies of its ends and its middle."""
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
"""Those of this process's calls."""
