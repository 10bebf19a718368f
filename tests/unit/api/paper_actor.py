"""Actors of paper: they answer, live and die as a test has it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiogpu.api.actors.actor import ActorHandle
from aiogpu.api.actors.methods import ActorInterface
from aiogpu.api.results.handle import Handle
from aiogpu.errors import ActorDiedError
from aiogpu.observe.why import Why
from aiogpu.serialization.serializer import NONE_PAYLOAD, dump_result, load_arguments


class Model:
    """The actors' class."""

    def embed(self, text: str) -> str:
        return text

    def reset(self) -> None:
        pass


FACE = ActorInterface(Model)


class PaperLink:
    """A tie to one actor of paper.

    Attributes:
        calls: those that it has got, in order.
        arguments: of each of these.
        story: what it was told to do.
        cancelled: how many of its calls were.
    """

    name = "Model"
    interface: ActorInterface | None = FACE
    own = None
    most: int | None = None

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[Handle[Any]] = []
        self.arguments: list[Any] = []
        self.story: list[str] = []
        self.cancelled = 0
        self._is_ready = False
        self._death: Exception | None = None
        self._readies: list[Handle[None]] = []
        self._ends: list[Handle[None]] = []
        self._lost: Exception | None = None

    def cancel(self, _task: int) -> None:
        self.cancelled += 1

    async def why(self, name: str, task: int) -> Why:
        return Why(name, task, "running")

    def reference(self) -> tuple[int, str, str]:
        return self.number, self.name, ""

    def _handle(self, label: str) -> Handle[Any]:
        return Handle(label, self, asyncio.get_running_loop())

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Handle[Any]:
        assert not returns
        assert not window
        handle = self._handle(label)
        self.calls.append(handle)
        self.arguments.append((method, *load_arguments(payload)[0]))
        if self._death is not None:
            handle.settle(self._death)
        return handle

    def ready(self) -> Handle[None]:
        if self._lost is not None:
            raise self._lost
        handle = self._handle("ready")
        self._readies.append(handle)
        self._tell()
        return handle

    def room(self) -> Handle[Any]:
        handle: Handle[Any] = Handle("Model()", self, asyncio.get_running_loop())
        handle.settle(dump_result((self.most, "half a GPU")))
        return handle

    def ended(self) -> Handle[None]:
        handle = self._handle("ended")
        self._ends.append(handle)
        return handle

    def _tell(self) -> None:
        for handle in self._readies:
            if self._death is not None:
                handle.settle(self._death)
            elif self._is_ready:
                handle.settle(NONE_PAYLOAD)

    def kill(self, no_restart: bool) -> None:
        self.story.append("kill" if no_restart else "restart")

    def terminate(self) -> None:
        self.story.append("terminate")

    def live(self) -> None:
        """Its constructor has returned."""
        self._is_ready = True
        self._tell()

    def restart(self) -> None:
        """Its process dies, and another takes its place."""
        self._is_ready = False
        error = ActorDiedError("it restarts", "Model", is_restarting=True)
        for handle in self.calls:
            handle.settle(error)

    def die(self, why: Exception | str = "it died") -> None:
        """It is dead, and its process is not gone yet."""
        self._death = ActorDiedError(why, "Model") if isinstance(why, str) else why
        for handle in self.calls:
            handle.settle(self._death)
        self._tell()

    def end(self) -> None:
        """Its process has gone."""
        for handle in self._ends:
            handle.settle(NONE_PAYLOAD)

    def lose_node(self, error: Exception) -> None:
        """Its node has gone, and can be asked nothing any more."""
        self._lost = error
        for handle in self._ends:
            handle.settle(error)

    def answer(self, call: int = -1, value: Any = None) -> None:
        self.calls[call].settle(dump_result(value))


class Paper:
    """Makes actors of paper.

    Attributes:
        links: to all that were made.
        refuses: raised in place of making one.
    """

    def __init__(self) -> None:
        self.links: list[PaperLink] = []
        self.refuses: Exception | None = None

    def make(self) -> ActorHandle[Model]:
        if self.refuses is not None:
            raise self.refuses
        link = PaperLink(len(self.links))
        self.links.append(link)
        return ActorHandle(link)

    def live(self) -> None:
        """All constructors have returned."""
        for link in self.links:
            link.live()

    @property
    def loads(self) -> list[int]:
        """How many calls each has got."""
        return [len(link.calls) for link in self.links]
