"""`aiogpu.put`: a value that is kept once and handed to many by its handle."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from aiogpu.api.packing import packed
from aiogpu.errors import MisuseError
from aiogpu.serialization.references import HANDLE_MARK, PickledValue
from aiogpu.serialization.serializer import PUT, dump_result

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle

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
