"""Advice about large arguments: what makes one large, and which is sent again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pickle import PickleBuffer
from typing import Any, Final
from weakref import ref

from aiogpu.serialization.diagnostics import DEEPEST, WIDEST, advise, parts
from aiogpu.serialization.pickler import measure
from aiogpu.serialization.serializer import HEAVY

MOST: Final = 0.6
"""Share of the whole; a little above a half, since a part alone is pickled worse."""

LEAST: Final = 4096
"""Bytes below which nothing is sought: what goes by name only has heavy parts."""


def heaviest(roots: Mapping[str, object]) -> tuple[str, int]:
    """The path to the innermost part that is most of what holds it.

    Walks from the largest root inwards, as long as one part stands out. Each step
    pickles what lies within once, without keeping it; so it takes a few times as long
    as pickling did.

    Args:
        roots: objects by the name that the path begins with.

    Returns:
        A path such as `f.__closure__.table`, and the bytes that this part takes when
        pickled; `("it", 0)` without roots.
    """
    sizes = {name: weigh(value) for name, value in roots.items()}
    path = max(sizes, key=sizes.__getitem__, default="it")
    size = sizes.get(path, 0)
    trail = [roots.get(path)]
    for _ in range(DEEPEST):
        found = _heavy_part(trail, size) if size > LEAST else None
        if found is None:
            break
        step, part, size = found
        path += step
        trail.append(part)
    return path, size


def weigh(value: object) -> int:
    """Bytes that an object takes when pickled; 0 if it cannot be."""
    try:
        return measure(value)
    except Exception:  # noqa: BLE001 - a reducer of the user's may raise anything
        return 0


def as_text(size: int) -> str:
    """A size for people: `12.5 MiB`."""
    return f"{size / (1 << 20):.1f} MiB"


def advise_on_function(name: str, function: object, size: int) -> None:
    """Warn of a function or class that takes much with it, and name what.

    Args:
        name: its name.
        function: the function or class.
        size: bytes that it takes when pickled.

    Raises:
        AiogpuWarning: the filters make errors of warnings.
    """
    if size <= HEAVY:
        return
    path, part = heaviest({name: function})
    much = f", of which {as_text(part)} are {path}" if path != name else ""
    advise(
        f"{name} is {as_text(size)} when pickled{much}; every worker that runs it gets "
        f"a copy. Put what is large once, `handle = await aiogpu.put(x)`, and pass the "
        f"handle as an argument."
    )


def _heavy_part(trail: list[object], whole: int) -> tuple[str, object, int] | None:
    try:
        for step, part in islice(parts(trail[-1]), WIDEST):
            # What only its reducer knows has no name that a reader could look up.
            if step.startswith((".__reduce__", ".__getstate__", ".__class__")):
                continue
            if any(part is passed for passed in trail):
                continue
            size = weigh(part)
            if size > MOST * whole:
                return step, part, size
    except Exception:  # noqa: BLE001 - an object that will not be reduced has no parts
        return None
    return None


OFTEN: Final = 8
"""Calls with the same object after which it is told."""

REMEMBERED: Final = 256
"""Objects, and warnings given, that are kept in mind; the oldest are forgotten."""

MOST_ITEMS: Final = 64
"""Arguments of one call that are looked at."""

_LIGHT: Final = frozenset({int, float, complex, bool, type(None)})
_SAMPLE: Final = 64
_DEEPEST: Final = 3


class RepeatedArguments:
    """The large arguments of late, and how often each was passed.

    No object is kept alive. One is known again by a weak reference; a list, a
    dictionary, bytes and their like, which allow none, by identity and samples of what
    they hold: a new one often takes the address of one that is gone.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, int], tuple[object, int]] = {}
        self._told: dict[tuple[str, str], None] = {}

    def note(
        self,
        function: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        size: int,
    ) -> None:
        """One call, by value; warns at the eighth with the same object, and once.

        Args:
            function: the function's name.
            args: positional arguments.
            kwargs: arguments by name.
            size: bytes that the call's arguments took when pickled.

        Raises:
            AiogpuWarning: the filters make errors of warnings.
        """
        if size < HEAVY:
            return
        for label, value in islice(_labelled(args, kwargs), MOST_ITEMS):
            if type(value) in _LIGHT or (function, label) in self._told:
                continue
            if self._count(function, label, value) == OFTEN:
                self._tell(function, label, value)

    def _count(self, function: str, label: str, value: object) -> int:
        key = function, label, id(value)
        mark = _mark(value)
        # What was just used goes to the end, so that the first is the oldest.
        before, count = self._seen.pop(key, (None, 0))
        count = count + 1 if before == mark else 1
        self._seen[key] = mark, count
        _forget_oldest(self._seen)
        return count

    def _tell(self, function: str, label: str, value: object) -> None:
        size = weigh(value)
        if size < HEAVY:
            return
        self._told[function, label] = None
        _forget_oldest(self._told)
        advise(
            f"{label} of {function} was the same {type(value).__name__} in {OFTEN} "
            f"calls, and its {as_text(size)} were copied for each. Put it once, "
            f"`handle = await aiogpu.put(x)`, and pass the handle in its place."
        )


class _Living:
    """A weak reference that is equal to another of the same living object only.

    Plain ones compare what they refer to: arrays would compare their elements.
    """

    __slots__ = ("_ref",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self._ref = ref(value)

    def __eq__(self, other: object) -> bool:
        # Of one object there is one reference, for as long as it lives.
        return isinstance(other, _Living) and self._ref is other._ref


def _labelled(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    return chain(
        ((f"args[{index}]", value) for index, value in enumerate(args)),
        ((f"kwargs[{name!r}]", value) for name, value in kwargs.items()),
    )


def _mark(value: object, depth: int = 0) -> object:
    """What tells an object from another at the same address, without holding it.

    Nor is one the same whose memory has changed: a buffer that is filled anew for
    each call is not to be put once.
    """
    kind = type(value)
    if kind in _LIGHT:
        return hash(value)
    content = _content(value)
    try:
        return _Living(value), content
    except TypeError:
        if content is not None:
            return kind, content
    if depth == _DEEPEST:
        return kind, id(value)
    return kind, [_mark(part, depth + 1) for part in _sample_of_parts(value)]


def _content(value: object) -> object:
    """The size of a buffer or text, and hashes of its ends and its middle."""
    if isinstance(value, str):
        return len(value), *(hash(value[part]) for part in _samples(len(value)))
    try:
        flat = PickleBuffer(value).raw()  # type: ignore[arg-type]
    except (TypeError, BufferError):
        return None
    return flat.nbytes, *(hash(bytes(flat[part])) for part in _samples(flat.nbytes))


def _samples(size: int) -> tuple[slice, slice, slice]:
    middle = size // 2
    return slice(_SAMPLE), slice(middle, middle + _SAMPLE), slice(-_SAMPLE, None)


def _sample_of_parts(value: object) -> Iterable[object]:
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
