"""A worker's tie to an actor, shared by all handles to it in this process.

The counterpart of `api.actors.link`, over the worker's own socket. asyncio stays out,
since plain functions need none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from aiogpu.api.actors.methods import interface_in, stranger
from aiogpu.api.calls import request
from aiogpu.api.results.wait import get
from aiogpu.client.current import current
from aiogpu.serialization.references import add_actor
from aiogpu.serialization.serializer import NONE_PAYLOAD, load_result
from aiogpu.wire.messages import AFTER_ALL, AGAIN, AT_ONCE, CAPACITY, ENDED, READY
from aiogpu.worker.nested import task_client

if TYPE_CHECKING:
    from aiogpu.api.actors.methods import ActorInterface
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.references import Loan


_links: Final[WeakValueDictionary[int, WorkerActorLink]] = WeakValueDictionary()


class WorkerActorLink:
    """See above.

    Attributes:
        name: how errors call the actor.
        actor: its id.
        interface: what handles are made of.
    """

    own = None

    def __init__(self, name: str, hold: Loan, interface: ActorInterface | None) -> None:
        self.name = name
        self.actor = hold.id
        self._hold = hold
        self.interface = interface
        self._client = task_client()
        _links[self.actor] = self

    def __repr__(self) -> str:
        return f"<WorkerActorLink {self.name} {self.actor}>"

    @classmethod
    def known(
        cls, actor: int, name: str, home: str, interface: ActorInterface
    ) -> WorkerActorLink:
        """The tie to an actor of which a handle has come; raises `MisuseError`."""
        if home != current.home:
            raise stranger(name)
        return _links.get(actor) or cls(name, task_client().actor(actor), interface)

    @classmethod
    def create(
        cls,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> WorkerActorLink:
        """Have an actor made, which ends with this process if nobody else has it."""
        client = task_client()
        actor = client.make(func, payload, key, get_if_exists)
        return cls(func.spec.name, client.own(actor), interface_in(func))

    @classmethod
    def find(cls, name: str, namespace: str) -> WorkerActorLink:
        """Tie the living actor of a name; waits for the node's answer.

        Raises:
            ActorNameError: no actor has that name.
            DeserializationError: what its class refers to cannot be imported here.
        """
        return cls._found(*get(_ask_for(name, namespace)))

    @classmethod
    async def find_on_loop(cls, name: str, namespace: str) -> WorkerActorLink:
        """The same on the event loop that runs; raises as `find` does."""
        return cls._found(*await _ask_for(name, namespace))

    @classmethod
    def _found(cls, actor: int, of_class: str, interface: bytes) -> WorkerActorLink:
        hold = task_client().own(actor)
        return _links.get(actor) or cls(of_class, hold, load_result(interface))

    def reference(self) -> tuple[int, str, str]:
        """Return what a handle is pickled as; whoever gets it counts as a holder."""
        add_actor(self.actor, self._hold)
        return self.actor, self.name, current.home

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Any:
        """Call a method; gives the kind of handle, handles or stream that fits.

        Raises:
            MisuseError: no task runs any more.
            SerializationError: the arguments are too large to be sent.
        """
        call = partial(self._client.call, self.actor, method, payload)
        return request(self._client, label, call, returns, window)

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


def _ask_for(name: str, namespace: str) -> Any:
    client = task_client()
    start = partial(client.find, name, namespace)
    return request(client, f"get_actor({name!r})", start)
