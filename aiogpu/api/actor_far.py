"""A worker's tie to an actor, shared by all handles to it in this process.

The counterpart of `api.actor_link`, over the worker's own socket. asyncio stays out,
since plain functions need none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, cast
from weakref import WeakValueDictionary

from aiogpu.api.blocking import get
from aiogpu.api.blocking_handle import BlockingHandle
from aiogpu.api.face import stranger
from aiogpu.engines import nested
from aiogpu.engines.family import is_loop_running
from aiogpu.errors import InternalError, MisuseError
from aiogpu.serialization.serializer import NONE_PAYLOAD, load_result
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    AT_ONCE,
    CAPACITY,
    ENDED,
    READY,
    Hold,
    Make,
    Stop,
)
from aiogpu.worker.context import current, note_passed

if TYPE_CHECKING:
    from aiogpu.api.face import Face
    from aiogpu.api.several import Several
    from aiogpu.engines.nested import LoopLink
    from aiogpu.runtime.call import Site

_links: Final[WeakValueDictionary[int, FarLink]] = WeakValueDictionary()


class FarLink:
    """See above.

    Attributes:
        name: how errors call the actor.
        actor: its id.
    """

    def __init__(self, name: str, actor: int) -> None:
        self.name = name
        self.actor = actor
        self._children = nested.family()
        _links[actor] = self

    def __repr__(self) -> str:
        return f"<FarLink {self.name} {self.actor}>"

    @classmethod
    def to(cls, actor: int, name: str, home: str) -> FarLink:
        """The tie to an actor of which a handle has come; raises `MisuseError`."""
        if home != current.home:
            raise stranger(name)
        link = _links.get(actor)
        if link is None:
            link = cls(name, actor)
            link._children.tell(Hold(actor))
        return link

    @classmethod
    def create(
        cls,
        site: Site,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> FarLink:
        """Have an actor made, which ends with this process if nobody else has it."""
        namespace, name = key or ("", "")

        def made(actor: int) -> Make:
            return Make(actor, site.id, payload, name, namespace, get_if_exists)

        family = nested.family()
        actor = family.make(made, site.id, partial(nested.describe, site))
        return cls(site.spec.name, actor)

    def reference(self) -> tuple[int, str, str]:
        """What a handle is pickled as; whoever gets it counts as a holder."""
        note_passed(self.actor)
        return self.actor, self.name, current.home

    def call(self, label: str, method: str, payload: bytes) -> Any:
        """Call a method; gives the kind of handle that fits.

        Raises:
            MisuseError: no task runs any more.
            SerializationError: the arguments are too large to be sent.
        """
        if is_loop_running():
            import asyncio

            from aiogpu.api.nested import session_of_task

            session = session_of_task(asyncio.get_running_loop())
            return session.ask(label, self.actor, method, payload)
        handle: BlockingHandle[Any] = BlockingHandle(label, self._children)
        handle.child = self._children.ask(self.actor, method, payload, handle)
        if not handle.child:
            raise MisuseError(f"{label}.remote() was called after the task had ended.")
        return handle

    def several(self, method: str, payload: bytes) -> FarSeveral:
        """How to call a method that has several results."""
        return FarSeveral(self.actor, method, payload)

    def stream(self, label: str, size: int, method: str, payload: bytes) -> Any:
        """Call a method that is a generator; gives the kind of stream that fits.

        Raises:
            MisuseError: no task runs any more.
            SerializationError: the arguments are too large to be sent.
        """
        if is_loop_running():
            import asyncio

            from aiogpu.api.nested import session_of_task

            session = session_of_task(asyncio.get_running_loop())
            return session.ask_stream(label, size, self.actor, method, payload)
        from aiogpu.api.blocking_stream import stream_of

        family = self._children
        ask = partial(family.ask, self.actor, method, payload)
        return stream_of(label, size, family, ask)

    def ready(self) -> Any:
        """Settled when the constructor has returned."""
        return self.call(f"{self.name}()", READY, NONE_PAYLOAD)

    def ended(self) -> Any:
        """Settled when the actor's process has ended."""
        return self.call(f"{self.name}()", ENDED, NONE_PAYLOAD)

    def room(self) -> Any:
        """How many actors of its kind can live at once."""
        return self.call(f"{self.name}()", CAPACITY, NONE_PAYLOAD)

    def kill(self, no_restart: bool) -> None:
        """End its process at once."""
        self._children.tell(Stop(self.actor, AT_ONCE if no_restart else AGAIN))

    def terminate(self) -> None:
        """Have it end after what it was sent."""
        self._children.tell(Stop(self.actor, AFTER_ALL))

    def __del__(self) -> None:
        self._children.drop(self.actor)


def find(name: str, namespace: str) -> tuple[FarLink, Face]:
    """The living actor of a name and what handles to it are made of; waits for it.

    Raises:
        ActorNameError: no actor has that name.
        DeserializationError: what its class refers to cannot be imported here.
    """
    family = nested.family()
    handle: BlockingHandle[tuple[int, str, bytes]] = BlockingHandle(name, family)
    handle.child = family.find(name, namespace, handle)
    return _found(*get(cast("Any", handle)))


async def find_softly(name: str, namespace: str) -> tuple[FarLink, Face]:
    """The same on the event loop that runs; raises as `find` does."""
    import asyncio

    from aiogpu.api.nested import session_of_task

    session = session_of_task(asyncio.get_running_loop())
    return _found(*await session.find(name, namespace))


def _found(actor: int, of_class: str, face: bytes) -> tuple[FarLink, Face]:
    link = _links.get(actor)
    if link is None:
        link = FarLink(of_class, actor)
    else:
        nested.family().drop(actor)  # it counts as a holder already
    return link, load_result(face)


class FarSeveral(NamedTuple):
    """A call with several results, from a worker; see `several.Start`.

    Attributes:
        actor: its id.
        method: what is called.
        payload: the pickled arguments.
    """

    actor: int
    method: str
    payload: bytes

    def in_program(self, _session: object, _several: object) -> NoReturn:
        """Nobody but a worker has such a tie."""
        raise InternalError(f"{self!r} belongs to a worker")

    def by_host(self, _host: object, _several: object) -> NoReturn:
        """Nobody but a worker has such a tie."""
        raise InternalError(f"{self!r} belongs to a worker")

    def on_loop(self, link: LoopLink, several: Several) -> None:
        """Make it for a task's event loop."""
        several.stop, several.ask = link.cancel, link.why
        several.note(link.ask(self.actor, self.method, self.payload, several))

    def in_plain_code(self, several: Several) -> None:
        """Make it for a plain task."""
        family = nested.family()
        several.stop = family.withdraw
        several.note(family.ask(self.actor, self.method, self.payload, several))
