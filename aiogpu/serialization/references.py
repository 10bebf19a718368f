"""Pickled values before they become payloads: a pickle, its buffers, and references.

References stand for values and actors, which are not part of the pickle. The sender
makes the payload, since it knows whether there is shared memory and by which ids the
receiver knows the values.
"""

from __future__ import annotations

from _thread import _local
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from pickle import PickleBuffer

PROTOCOL: Final = 5
"""Version of pickle's format; the first version with out-of-band buffers."""

HANDLE_MARK: Final = "__aiogpu_handle__"
"""Attribute that marks classes of handles, which are not imported here: True, or a
property that returns the handle for which the object stands."""

SHARED_FROM: Final = 1 << 18
"""Bytes of buffers, or of a pickle, from which they are sent in shared memory. Below
this, a copy through a socket is faster than passing and mapping a descriptor."""

STREAM_SHARED_FROM: Final = 1 << 16
"""The same for the pickle of a value whose buffers are sent in shared memory."""


class Reference(Protocol):
    """The value or actor for which a handle in a pickle stands.

    Attributes:
        id: the receiver requests it by this id.
    """

    id: int


class ActorReference(NamedTuple):
    """The actor for which a handle in a pickle stands.

    Attributes:
        id: the receiver requests it by this id.
        hold: keeps the actor alive.
    """

    id: int
    hold: object


class PickledValue(NamedTuple):
    """A pickle with its buffers and references.

    Attributes:
        stream: the pickle.
        buffers: flat views of its out-of-band buffers.
        handles: handles that are themselves arguments.
        places: their places among the arguments: index or name.
        references: values and actors for which handles in the pickle stand.
        parts: the pickled results of a task that has several.
        returns: number of results that the call shall have, 0 for the default.
    """

    stream: bytes = b""
    buffers: Sequence[memoryview] = ()
    handles: tuple[Any, ...] = ()
    places: tuple[int | str, ...] = ()
    references: tuple[Reference | ActorReference, ...] = ()
    parts: tuple[Any, ...] = ()
    returns: int = 0

    @property
    def actors(self) -> tuple[int, ...]:
        """Ids of the actors among the references."""
        return tuple(
            reference.id
            for reference in self.references
            if type(reference) is ActorReference
        )

    @property
    def values(self) -> tuple[int, ...]:
        """Ids of the values among the references."""
        return tuple(
            reference.id
            for reference in self.references
            if type(reference) is not ActorReference
        )

    @property
    def is_plain(self) -> bool:
        """True if the pickle alone is the payload."""
        return len(self.stream) < SHARED_FROM and not any(self[1:])

    @property
    def is_large(self) -> bool:
        """True if it is sent in shared memory: it has buffers or a long pickle."""
        return bool(self.buffers) or len(self.stream) >= SHARED_FROM

    def split(self) -> tuple[list[memoryview], bytes]:
        """Return the buffers for shared memory, and the pickle for the message.

        A long pickle becomes the first buffer, and the second value is empty.
        """
        shared_from = STREAM_SHARED_FROM if self.buffers else SHARED_FROM
        if len(self.stream) >= shared_from:
            return [memoryview(self.stream), *self.buffers], b""
        return [*self.buffers], self.stream


def keep_small_buffers(large: list[memoryview]) -> Callable[[PickleBuffer], bool]:
    """Make a `buffer_callback` for one pickle, which keeps small buffers in it.

    They stay in the pickle up to `SHARED_FROM` bytes in all: a copy is faster than
    shared memory, which must be mapped and given back.

    Args:
        large: receives the other buffers, flat and in order.
    """
    room = SHARED_FROM

    def is_kept(buffer: PickleBuffer) -> bool:
        nonlocal room
        view = buffer.raw()
        if view.nbytes < room:
            room -= view.nbytes
            return True
        large.append(view)
        return False

    return is_kept


class _Collector(_local):
    """The thread's list of pickled references; None outside `collect_references`."""

    found: list[Any] | None = None
    actors: list[Any] | None = None


_collector: Final = _Collector()


@contextmanager
def collect_references(are_actors: bool = False) -> Iterator[list[Any]]:
    """Context manager: collect references of handles that this thread pickles.

    Args:
        are_actors: only handles to actors are allowed, as in functions and exceptions.
    """
    before = _collector.found, _collector.actors
    references: list[Any] = []
    _collector.found, _collector.actors = None if are_actors else references, references
    try:
        yield references
    finally:
        _collector.found, _collector.actors = before


def end_collecting() -> None:
    """End a `collect_references` block whose start was interrupted.

    Such an interrupt lands before the `try`, so the `finally` does not run.
    """
    _collector.found = _collector.actors = None


def add_handle(name: str, share: Callable[[], Reference]) -> int:
    """Add the reference of a handle to the value being pickled; return its id.

    Args:
        name: name of the handle's task, for the message.
        share: returns the reference.

    Raises:
        MisuseError: the pickle is not for aiogpu.
    """
    if _collector.found is None:
        raise MisuseError(
            f"the handle of {name} can only be pickled as a part of what a task or "
            f"an actor is given, or of what it returns. Await it, and pickle the value."
        )
    reference = share()
    _collector.found.append(reference)
    return reference.id


def is_for_one_node() -> bool:
    """Return whether this thread pickles a value, which only one node gets.

    A function or an error may be unpickled by another node too.
    """
    return _collector.found is not None


def add_reference(reference: Reference | ActorReference) -> bool:
    """Add a reference to the value that this thread pickles.

    False if no references to values are collected, as in the pickle of a function.
    """
    if _collector.found is None:
        return False
    _collector.found.append(reference)
    return True


def add_actor(actor: int, hold: object) -> None:
    """Add the reference of an actor to the value that this thread pickles.

    Outside `collect_references`, the code that unpickles must keep the actor alive.
    """
    if _collector.actors is not None:
        _collector.actors.append(ActorReference(actor, hold))


def closed_node_error(name: str) -> MisuseError:
    """Make the error for a handle whose node was closed."""
    return MisuseError(
        f"the handle of {name} belongs to a node that was closed, and its value went "
        f"with it. Await handles before their node is closed, and pass the values."
    )


def extract_handles(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object], dict[int | str, Any]]:
    """Return the arguments with None in place of handles, and the handles by place."""
    items: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
    handles = {
        place: arg if getattr(arg, HANDLE_MARK) is True else getattr(arg, HANDLE_MARK)
        for place, arg in items
        if hasattr(type(arg), HANDLE_MARK)
    }
    if not handles:
        return args, kwargs, handles
    others = [None if index in handles else arg for index, arg in enumerate(args)]
    named = {name: None if name in handles else arg for name, arg in kwargs.items()}
    return tuple(others), named, handles
