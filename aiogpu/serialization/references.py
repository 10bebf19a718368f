"""What is pickled but not a payload yet: a pickle, its buffers, and references.

References stand in for values and actors, which do not travel in the pickle. The sender
knows whether there is shared memory, and by which ids the other side will know the
values; so the sender makes the payload.
"""

from __future__ import annotations

from _thread import _local
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from pickle import PickleBuffer


HANDLE: Final = "__aiogpu_handle__"
"""What the classes of handles have, so that nobody here needs to import them."""

APART: Final = 1 << 18
"""Bytes of buffers, or of a pickle, from which on they go into shared memory: below
it, copying them through a socket costs less than passing and mapping a descriptor."""

ALONG: Final = 1 << 16
"""Bytes of a pickle from which on it goes along, where its buffers do."""


class Reference(Protocol):
    """What a handle in a pickle stands for.

    Attributes:
        id: by which the other side asks for it.
    """

    id: int


class PickledValue(NamedTuple):
    """See above.

    Attributes:
        stream: the pickle.
        buffers: what was left out of it, flat.
        handles: those that are arguments by themselves.
        places: where among the arguments they are: index, or name.
        references: what the handles in the pickle stand for.
        parts: of several results each.
        returns: how many results the call shall have, 0 for the usual one.
    """

    stream: bytes = b""
    buffers: Sequence[memoryview] = ()
    handles: tuple[Any, ...] = ()
    places: tuple[int | str, ...] = ()
    references: tuple[Reference, ...] = ()
    parts: tuple[Any, ...] = ()
    returns: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the pickle says it all."""
        return len(self.stream) < APART and not any(self[1:])

    @property
    def is_large(self) -> bool:
        """Whether it goes into shared memory: it has buffers, or a long pickle."""
        return bool(self.buffers) or len(self.stream) >= APART

    def laid_out(self) -> tuple[list[memoryview], bytes]:
        """What of it goes there, and what of the pickle does not: all or nothing.

        A long pickle goes there, before the buffers.
        """
        is_long = len(self.stream) >= (ALONG if self.buffers else APART)
        if is_long:
            return [memoryview(self.stream), *self.buffers], b""
        return [*self.buffers], self.stream


def keeping(apart: list[memoryview]) -> Callable[[PickleBuffer], bool]:
    """What decides which of a value's buffers stay in its pickle, of protocol 5.

    They do while there is room: copied along they cost less than memory that is to be
    shared, mapped and given back.

    Args:
        apart: is given the others, flat, in their order.

    Returns:
        The `buffer_callback`, for one pickle.
    """
    room = APART

    def is_kept(buffer: PickleBuffer) -> bool:
        nonlocal room
        view = buffer.raw()
        if view.nbytes < room:
            room -= view.nbytes
            return True
        apart.append(view)
        return False

    return is_kept


class _Collecting(_local):
    """The references that the pickle of this thread has come across."""

    into: list[Reference] | None = None


_collecting: Final = _Collecting()


@contextmanager
def collecting() -> Iterator[list[Reference]]:
    """Handles that are pickled meanwhile, in this thread, are listed."""
    before = _collecting.into
    into: list[Reference] = []
    _collecting.into = into
    try:
        yield into
    finally:
        _collecting.into = before


def refer(name: str, share: Callable[[], Reference]) -> int:
    """A handle is pickled; gives the id as which it is.

    Args:
        name: of its task, for the message.
        share: gives what it stands for.

    Raises:
        MisuseError: nothing of aiogpu's is being sent.
    """
    if _collecting.into is None:
        raise MisuseError(
            f"the handle of {name} can only be pickled as a part of what a task or "
            f"an actor is given, or of what it returns. Await it, and pickle the value."
        )
    reference = share()
    attach(reference)
    return reference.id


def attach(reference: Reference) -> bool:
    """Have something go along with the pickle of this thread.

    False if what is pickled is nothing that is sent by itself, as a function is.
    """
    if _collecting.into is None:
        return False
    _collecting.into.append(reference)
    return True


def of_closed_node(name: str) -> MisuseError:
    """The error for a handle to a value that went with its node."""
    return MisuseError(
        f"the handle of {name} belongs to a node that was closed, and its value went "
        f"with it. Await handles before their node is closed, and pass the values."
    )


def take_out(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[Any, ...], tuple[int | str, ...]]:
    """The handles among arguments, and where they are."""
    found: list[tuple[int | str, object]] = [
        (index, arg) for index, arg in enumerate(args) if hasattr(type(arg), HANDLE)
    ]
    if kwargs:
        found += [it for it in kwargs.items() if hasattr(type(it[1]), HANDLE)]
    if not found:
        return (), ()
    places, handles = zip(*found, strict=True)
    return handles, places
