"""Values to which handles refer, as one process of a program on Ray knows them.

A value is an object in Ray's store, or a small payload that is here, or the reason why
there is none; or it is promised, while its task is still to be started. Ids are drawn
so that no two processes give the same one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from aiogpu.engines import ray
from aiogpu.engines.cluster.failure import OWN_FRAMES
from aiogpu.engines.cluster.payload import (
    Broken,
    Carried,
    Stored,
    Terms,
    kept_in,
    made,
    stored,
)
from aiogpu.errors import ProtocolError, TaskCancelledError
from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.serialization.payload import Contents
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.engines.ray import Handle, Ref

_ids: Final = count(secrets.randbits(40) << 22 | 1)
_known: Final[WeakValueDictionary[int, Shared]] = WeakValueDictionary()


class Shared:
    """See above.

    Attributes:
        id: by which others ask for it.
        ref: its object, None if it has none.
        payload: it is here.
        failed: why there is none.
        task: number of the call of this process that makes it, 0 for others' values.
        part: which of several results of that it is; -1 for all of it.
    """

    __slots__ = (
        *("__weakref__", "_watchers", "failed", "id", "part", "payload", "ref"),
        "task",
    )

    def __init__(self, identity: int = 0) -> None:
        self.id = identity or next(_ids)
        self.ref: Ref | None = None
        self.payload: bytes | None = None
        self.failed: Failed | None = None
        self.task, self.part = 0, -1
        self._watchers: list[Callable[[], object]] = []
        _known[self.id] = self

    def __repr__(self) -> str:
        return f"<Shared {self.id}>"

    @property
    def is_promised(self) -> bool:
        """True if its task is still to be started."""
        return self.ref is None and self.payload is None and self.failed is None

    def when_known(self, call: Callable[[], object]) -> None:
        """Call when it is promised no more; now, if it is not."""
        if self.is_promised:
            self._watchers.append(call)
        else:
            call()

    def keep(self, ref: Ref) -> None:
        """It is that object, there or still to come."""
        self.ref = ref
        self._settle()

    def take(self, payload: bytes) -> None:
        """It is here."""
        self.payload = payload
        kept = kept_in(payload)
        if kept is not None:
            self.ref = kept.ref
        self._settle()

    def take_over(self, other: Shared) -> None:
        """It is what the other one is."""
        self.ref, self.payload, self.failed = other.ref, other.payload, other.failed
        self.task, self.part = other.task, other.part
        self._settle()

    def fail(self, error: BaseException) -> None:
        """It will never be there."""
        self.failed = pack_failure(0, RAISED, error, OWN_FRAMES)
        self._settle()

    def forsake(self, error: BaseException) -> None:
        """Whoever is given it from here on is told that, though Ray may still make it.

        Not if it has come.
        """
        if self.payload is None:
            self.ref = None
            self.fail(error)

    def _settle(self) -> None:
        watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()

    def as_argument(self) -> Any:
        """What Ray is given where it is an argument: it brings the value itself."""
        if self.ref is not None:
            return self.ref
        if self.failed is not None:
            return Broken(tuple(self.failed))
        assert self.payload is not None, self
        return stored(self.payload)

    def as_ref(self) -> Ref:
        """Its object; it is put into the store if it has none."""
        if self.ref is None:
            self.ref = ray.keep(self.as_argument())
        return self.ref


def shared_of(handle: Any, ref_of: Callable[[int, int], Ref | None]) -> Shared:
    """Return what others refer to who are given a handle.

    Args:
        handle: of a task that was started.
        ref_of: gives the object of a task that runs, and of which of its results.
    """
    shared = Shared()
    shared.task, shared.part = handle.child, handle.part
    if handle.raw is not None:
        shared.take(handle.raw)
    elif handle.cancelled():
        shared.fail(TaskCancelledError(f"{handle.task_name} was cancelled."))
    elif handle.error is not None:
        shared.fail(handle.error)
    else:
        ref = ref_of(handle.child, handle.part)
        if ref is not None:
            shared.keep(ref)
    return shared


def known(identity: int) -> Shared:
    """The value of that id, while it is known to this process.

    Raises:
        ProtocolError: nobody here has it.
    """
    shared = _known.get(identity)
    if shared is None:
        raise ProtocolError(f"nobody in this process has the value {identity}")
    return shared


def arrived(found: Any, ref: Ref | None = None) -> bytes:
    """A payload of this process for what has come from Ray, not `Broken`.

    Args:
        found: what has come.
        ref: of the object that it was, for whoever passes it on.
    """
    if not isinstance(found, Stored):
        return found  # type: ignore[no-any-return]
    references = tuple(_arrived(*one) for one in found.references)
    contents = Contents(found.stream, buffers=tuple(found.buffers))
    actors = tuple(meet(*one) for one in found.actors)
    return made(contents, (*references, *actors), ref=ref)


def _arrived(identity: int, ref: Ref) -> Shared:
    shared = _known.get(identity)
    if shared is None:
        shared = Shared(identity)
        shared.keep(ref)
    return shared


def meet(identity: int, handle: Handle, terms: Terms) -> Carried:
    """A handle of Ray's has come to this process, before one of ours is unpickled."""
    handle = met.setdefault(identity, handle)
    return Carried(identity, handle, terms_met.setdefault(handle, terms))


def outlive() -> None:
    """This process is a fork: what it lets go of here, Ray must not hear of."""
    _kept_by_forks.extend(met.values())


met: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()
"""Ray's handles of actors that have come to this process, by the actors' ids."""
terms_met: Final[WeakKeyDictionary[Any, Terms]] = WeakKeyDictionary()
"""How these are called, as far as their handles have brought it along."""
_kept_by_forks: Final[list[Any]] = []


def failure_in(found: Any) -> Failed | None:
    """Return why there is no value, if that is what has come."""
    return Failed(*found.fields) if isinstance(found, Broken) else None
