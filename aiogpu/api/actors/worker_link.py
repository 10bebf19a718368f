"""A worker's tie to an actor, shared by all handles to it in this process.

The counterpart of `api.actors.link`, over the worker's own socket. asyncio stays out,
since plain functions need none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from weakref import WeakValueDictionary

from aiogpu.api.actors.methods import stranger
from aiogpu.api.calls import request
from aiogpu.api.results.wait import get
from aiogpu.client.current import current, note_passed
from aiogpu.errors import InternalError
from aiogpu.serialization.serializer import NONE_PAYLOAD, load_result
from aiogpu.wire.messages import AFTER_ALL, AGAIN, AT_ONCE, CAPACITY, ENDED, READY
from aiogpu.worker.nested import task_client

if TYPE_CHECKING:
    from aiogpu.api.actors.methods import ActorInterface
    from aiogpu.api.calls import ResultGroup
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Client


_links: Final[WeakValueDictionary[int, WorkerActorLink]] = WeakValueDictionary()


class WorkerActorLink:
    """See above.

    Attributes:
        name: how errors call the actor.
        actor: its id.
    """

    def __init__(self, name: str, actor: int) -> None:
        self.name = name
        self.actor = actor
        self._client = task_client()
        _links[actor] = self

    def __repr__(self) -> str:
        return f"<WorkerActorLink {self.name} {self.actor}>"

    @classmethod
    def to(cls, actor: int, name: str, home: str) -> WorkerActorLink:
        """The tie to an actor of which a handle has come; raises `MisuseError`."""
        if home != current.home:
            raise stranger(name)
        link = _links.get(actor)
        if link is None:
            link = cls(name, actor)
            link._client.hold(actor)
        return link

    @classmethod
    def create(
        cls,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> WorkerActorLink:
        """Have an actor made, which ends with this process if nobody else has it."""
        actor = task_client().make(func, payload, key, get_if_exists)
        return cls(func.spec.name, actor)

    def reference(self) -> tuple[int, str, str]:
        """Return what a handle is pickled as; whoever gets it counts as a holder."""
        note_passed(self.actor)
        return self.actor, self.name, current.home

    def call(self, label: str, method: str, payload: bytes) -> Any:
        """Call a method; gives the kind of handle that fits.

        Raises:
            MisuseError: no task runs any more.
            SerializationError: the arguments are too large to be sent.
        """
        client = self._client
        start = partial(client.call, self.actor, method, payload)
        return request(client, label, start)

    def several(self, method: str, payload: bytes) -> SeveralResults:
        """How to call a method that has several results."""
        return SeveralResults(self.actor, method, payload)

    def stream(self, label: str, size: int, method: str, payload: bytes) -> Any:
        """Call a method that is a generator; gives the kind of stream that fits.

        Raises:
            MisuseError: no task runs any more.
            SerializationError: the arguments are too large to be sent.
        """
        from aiogpu.api.calls import request_stream

        start = partial(self._client.call, self.actor, method, payload)
        return request_stream(self._client, label, size, start)

    def ready(self) -> Any:
        """Settled when the constructor has returned."""
        return self.call(f"{self.name}()", READY, NONE_PAYLOAD)

    def ended(self) -> Any:
        """Settled when the actor's process has ended."""
        return self.call(f"{self.name}()", ENDED, NONE_PAYLOAD)

    def room(self) -> Any:
        """Return how many actors of its kind can live at once."""
        return self.call(f"{self.name}()", CAPACITY, NONE_PAYLOAD)

    def kill(self, no_restart: bool) -> None:
        """End its process at once."""
        self._client.stop(self.actor, AT_ONCE if no_restart else AGAIN)

    def terminate(self) -> None:
        """Have it end after what it was sent."""
        self._client.stop(self.actor, AFTER_ALL)

    def __del__(self) -> None:
        self._client.drop(self.actor)


def find(name: str, namespace: str) -> tuple[WorkerActorLink, ActorInterface]:
    """The living actor of a name and what handles to it are made of; waits for it.

    Raises:
        ActorNameError: no actor has that name.
        DeserializationError: what its class refers to cannot be imported here.
    """
    return _found(*get(_ask_for(name, namespace)))


async def find_softly(
    name: str, namespace: str
) -> tuple[WorkerActorLink, ActorInterface]:
    """The same on the event loop that runs; raises as `find` does."""
    return _found(*await _ask_for(name, namespace))


def _ask_for(name: str, namespace: str) -> Any:
    client = task_client()
    start = partial(client.find, name, namespace)
    return request(client, f"get_actor({name!r})", start)


def _found(
    actor: int, of_class: str, interface: bytes
) -> tuple[WorkerActorLink, ActorInterface]:
    link = _links.get(actor)
    if link is None:
        link = WorkerActorLink(of_class, actor)
    else:
        task_client().drop(actor)  # it counts as a holder already
    return link, load_result(interface)


class SeveralResults(NamedTuple):
    """A call with several results, from a worker; see `calls.Start`.

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

    def by_client(self, client: Client, several: ResultGroup) -> None:
        """Make it for the task whose code asks."""
        several.stop, several.ask = client.cancel, client.why
        several.note(client.call(self.actor, self.method, self.payload, several))
