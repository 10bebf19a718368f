"""Pickled values that are no payloads yet: a pickle, its buffers, and references.

References stand for values and actors, which are not part of the pickle. The sender
knows whether there is shared memory, and by which ids the receiver knows the values; so
the sender makes the payload.
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
"""The version of pickle's format; it is the first with buffers beside the stream."""

HANDLE_MARK: Final = "__aiogpu_handle__"
"""Attribute of the classes of handles, so that nothing here needs to import them: True,
or what gives the handle for which the object stands."""

SHARED_FROM: Final = 1 << 18
"""Bytes of buffers, or of a pickle, from which on they go into shared memory: below
it, copying them through a socket costs less than passing and mapping a descriptor."""

STREAM_SHARED_FROM: Final = 1 << 16
"""The same for the pickle of a value whose buffers go there anyway."""


class Reference(Protocol):
    """The value or actor that a handle in a pickle stands for.

    Attributes:
        id: by which the receiver asks for it.
    """

    id: int


class ActorReference(NamedTuple):
    """The actor that a handle in a pickle stands for.

    Attributes:
        id: by which the receiver asks for it.
        hold: keeps it alive, as this process's handles do.
    """

    id: int
    hold: object


class PickledValue(NamedTuple):
    """A pickle and what belongs to it.

    Attributes:
        stream: the pickle.
        buffers: flat views of what was left out of it.
        handles: the handles that are arguments by themselves.
        places: their places among the arguments: index, or name.
        references: what the handles in the pickle stand for, values and actors.
        parts: the results, each pickled, of a task that has several.
        returns: how many results the call shall have, 0 for the usual one.
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
        return tuple(it.id for it in self.references if type(it) is ActorReference)

    @property
    def values(self) -> tuple[int, ...]:
        """Ids of the values among the references."""
        return tuple(it.id for it in self.references if type(it) is not ActorReference)

    @property
    def is_plain(self) -> bool:
        """True if the pickle alone is the payload."""
        return len(self.stream) < SHARED_FROM and not any(self[1:])

    @property
    def is_large(self) -> bool:
        """True if it goes into shared memory: it has buffers, or a long pickle."""
        return bool(self.buffers) or len(self.stream) >= SHARED_FROM

    def split(self) -> tuple[list[memoryview], bytes]:
        """Return the buffers for shared memory, and the rest of the pickle.

        A long pickle goes there as a whole, before the other buffers.
        """
        shared_from = STREAM_SHARED_FROM if self.buffers else SHARED_FROM
        if len(self.stream) >= shared_from:
            return [memoryview(self.stream), *self.buffers], b""
        return [*self.buffers], self.stream


def keep_small_buffers(large: list[memoryview]) -> Callable[[PickleBuffer], bool]:
    """Make a `buffer_callback`, for one pickle, that leaves small buffers in it.

    They stay while there is room: to copy them costs less than memory that is to be
    shared, mapped and given back.

    Args:
        large: is given the other buffers, flat, in their order.
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
    """The thread's list of pickled references; None while nothing is sent."""

    found: list[Any] | None = None
    actors: list[Any] | None = None


_collector: Final = _Collector()


@contextmanager
def collect_references(are_actors: bool = False) -> Iterator[list[Any]]:
    """List the references of handles that this thread pickles in the block.

    Args:
        are_actors: whether handles to actors alone may be there, as in a function or an
            exception.
    """
    before = _collector.found, _collector.actors
    found: list[Any] = []
    _collector.found, _collector.actors = None if are_actors else found, found
    try:
        yield found
    finally:
        _collector.found, _collector.actors = before


def end_collecting() -> None:
    """End a block of this thread's that an interrupt has left where it began.

    There it lands before the `try` whose `finally` would end it.
    """
    _collector.found = _collector.actors = None


def add_handle(name: str, share: Callable[[], Reference]) -> int:
    """Add the reference of a handle to what is pickled; returns its id.

    Args:
        name: of the handle's task, for the message.
        share: gives the reference.

    Raises:
        MisuseError: nothing of aiogpu's is being sent.
    """
    if _collector.found is None:
        raise MisuseError(
            f"the handle of {name} can only be pickled as a part of what a task or "
            f"an actor is given, or of what it returns. Await it, and pickle the value."
        )
    reference = share()
    _collector.found.append(reference)
    return reference.id


def add_reference(reference: Reference) -> bool:
    """Add a reference to what this thread pickles.

    False if what is pickled is sent as a part of something else, as a function is.
    """
    if _collector.found is None:
        return False
    _collector.found.append(reference)
    return True


def add_actor(actor: int, hold: object) -> None:
    """Add the reference of an actor to what this thread pickles.

    Where nothing is being sent, whoever unpickles it has to see that the actor lives.
    """
    if _collector.actors is not None:
        _collector.actors.append(ActorReference(actor, hold))


def closed_node_error(name: str) -> MisuseError:
    """Make the error for a handle to a value that ended with its node."""
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
