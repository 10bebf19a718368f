"""`aiogpu.put`: a value that is kept once and handed to many by its handle.

Also the way from what was pickled to a payload, for whichever code sends it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from aiogpu.client.current import services
from aiogpu.errors import MisuseError
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import HANDLE_MARK, PickledValue
from aiogpu.serialization.serializer import PUT, WARNED_FROM, dump_result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiogpu.api.handle import Handle
    from aiogpu.serialization.large_arguments import RepeatedArguments


_repeats: RepeatedArguments | None = None


def packed_call(
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    outgoing: PickledValue,
) -> bytes:
    """The payload of a call's arguments that are more than a pickle.

    Who passes the same large object again and again is told of `put`.

    Args:
        name: what is called.
        args: positional arguments.
        kwargs: arguments by name.
        outgoing: the same, pickled.

    Raises:
        Exception: see `packed`.
    """
    payload = packed(outgoing)
    size = len(outgoing.stream) + sum(one.nbytes for one in outgoing.buffers)
    if size >= WARNED_FROM and not (type(payload) is Payload and payload.is_shown):
        global _repeats  # noqa: PLW0603 - most programs never need it
        if _repeats is None:
            from aiogpu.serialization.large_arguments import RepeatedArguments

            _repeats = RepeatedArguments()
        _repeats.note(name, args, kwargs)
    return payload


def packed(outgoing: PickledValue) -> bytes:
    """The payload of what is more than a pickle.

    Raises:
        MisuseError: a handle among them belongs to another event loop.
        ObjectMemoryError: there is no room for them.
        SerializationError: they are too large.
        NoLoopError: no event loop is running here.
    """
    if services.client is not None:
        from aiogpu.worker.nested import task_client

        return task_client().loans.pack(outgoing)
    from aiogpu.api.submission import session_of_caller

    return session_of_caller().pack(outgoing)


T = TypeVar("T")


class Putting(Generic[T]):
    """What `put` gives: awaited, or given to `get`, it is the value's handle."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __repr__(self) -> str:
        return f"<Putting {self.handle!r}>"

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            "put() gives no handle before it is awaited; write `handle = await "
            "aiogpu.put(value)`, in a plain task `aiogpu.get(aiogpu.put(value))`."
        )

    def __await__(self) -> Generator[Any, None, Handle[T]]:
        yield from ()
        return self.handle  # type: ignore[no-any-return]


def put(value: T) -> Putting[T]:
    """Keep a value, to hand it to many tasks without copying it for each.

    `handle = await aiogpu.put(value)`; in a plain function of a task
    `handle = aiogpu.get(aiogpu.put(value))`. The value is what it was at the call,
    whatever becomes of the object. Large buffers (arrays) lie in shared memory, where
    tasks on this machine see them read-only and without a copy. It is freed with the
    last handle to it.

    Args:
        value: any object that can be pickled.

    Raises:
        MisuseError: it is a handle already.
        SerializationError: with the path to what cannot be pickled.
        ObjectMemoryError: there is no room for it.
        NoLoopError: no event loop is running here, and this is no task.
    """
    if hasattr(type(value), HANDLE_MARK):
        raise MisuseError(
            f"aiogpu.put() was given {value!r}, which is a handle already: pass it to "
            f"tasks as it is, or put what it gives: `aiogpu.put(await handle)`."
        )
    payload = dump_result(value, PUT)
    if isinstance(payload, PickledValue):
        payload = packed(payload)
    from aiogpu.api.restored_handle import put_here

    return Putting(put_here(payload))
