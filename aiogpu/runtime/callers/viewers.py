"""Answers commands that look at a node over the node's own socket.

That socket is in the node's private directory and serves its zygotes, keepers and
workers. A command such as `aiogpu status` finds it there, and asks what a program asks
of a service, or has a task cancelled. It can start nothing: a node inside a program
ends with that program, and so runs tasks of nobody else. This module is imported for
the first viewer.

Viewers slow the program by a bounded amount, whatever they send. Their questions are
answered one at a time, in turns, with a pause after each; all together take one part in
`SHARE` of the loop's time. A viewer is not read while it has a question open, and is
not answered while it does not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Final

from aiogpu.errors import ProtocolError
from aiogpu.observe.status_codec import status_codec
from aiogpu.runtime.connection import Peer, Recipient
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.wire import messages as wire

MOST: Final = 16
"""Viewers at the same time; each has a descriptor of the program."""


WITHIN: Final = 10.0
"""Seconds in which a viewer introduces itself."""


LONGEST_FRAME: Final = 1 << 22
"""Bytes of a frame; a program that joins by mistake sends its environment."""


SHARE: Final = 20
"""Of the loop's time, all viewers together get one part in so many."""


LEAST_PAUSE: Final = 1e-3
"""Seconds between two answers, at least."""


Answer = Callable[[int], Coroutine[Any, Any, object]]


@dataclass(slots=True, eq=False)
class Viewer:
    """One command that looks at the node.

    Attributes:
        peer: its connection.
        late: turns it away unless it introduces itself.
        has_joined: it has.
        is_slow: it does not read what it was sent.
        asked: its open questions, in order.
    """

    peer: Peer
    late: asyncio.TimerHandle | None = None
    has_joined: bool = False
    is_slow: bool = False
    asked: deque[wire.Inquire | wire.Depart] = field(default_factory=deque)


class Viewers:
    """The commands that look at one node.

    Args:
        loop: the node's.
        node: the node's id.
        capacity: what the node has to share out, packed.
        answers: what can be asked, by name; each is given the number of a task.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node: str,
        capacity: bytes,
        answers: Mapping[str, Answer],
    ) -> None:
        self._loop = loop
        self._welcome = wire.Welcome(node, "", "", "", capacity)
        self._answers = answers
        self._viewers: set[Viewer] = set()
        self._turns: deque[Viewer] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._answering: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Viewers {len(self._viewers)}>"

    def greeted(self, peer: Peer) -> Recipient | None:
        """Take over the connection of a client that has greeted; None if refused."""
        if self._is_closed:
            peer.abort()
            return None
        if len(self._viewers) >= MOST:
            peer.refuse(f"{MOST} commands look at this node already; end one of them")
            return None
        peer.limit_frames(LONGEST_FRAME)
        viewer = Viewer(peer)
        viewer.late = self._loop.call_later(WITHIN, self._turn_away, viewer)
        self._viewers.add(viewer)
        return Recipient(
            partial(self._hear, viewer),
            partial(self._on_lost, viewer),
            partial(self._on_slow, viewer),
        )

    def _turn_away(self, viewer: Viewer) -> None:
        self._refuse(viewer, f"it was not said within {WITHIN:g} s who asks")

    def _refuse(self, viewer: Viewer, reason: str) -> None:
        self._on_lost(viewer)
        viewer.peer.drop(reason)

    def _hear(self, viewer: Viewer, messages: list[wire.Message]) -> None:
        for message in messages:
            if isinstance(message, wire.Join) and not viewer.has_joined:
                self._join(viewer, message)
            elif isinstance(message, wire.Inquire | wire.Depart) and viewer.has_joined:
                viewer.asked.append(message)
            else:
                self._refuse(viewer, _REFUSAL)
            if viewer not in self._viewers:
                return
        if viewer.asked:
            viewer.peer.pause()
            self._take_turn(viewer)

    def _join(self, viewer: Viewer, join: wire.Join) -> None:
        from aiogpu import __version__

        if join.release != __version__:
            told = (
                f"the node runs aiogpu {__version__}, and who asks {join.release}; use "
                f"the `aiogpu` command of the program's environment"
            )
            self._refuse(viewer, told)
        elif not join.only_looks:
            self._refuse(viewer, _REFUSAL)
        else:
            viewer.has_joined = True
            self._end_wait(viewer)
            viewer.peer.send_one(self._welcome)

    def _end_wait(self, viewer: Viewer) -> None:
        late, viewer.late = viewer.late, None
        if late is not None:
            late.cancel()

    def _on_slow(self, viewer: Viewer, is_slow: bool) -> None:
        viewer.is_slow = is_slow
        if not is_slow:
            self._take_turn(viewer)

    def _on_lost(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        viewer.asked.clear()
        self._end_wait(viewer)

    def _take_turn(self, viewer: Viewer) -> None:
        """Let it wait for its next answer, or ask on if it has no open question."""
        if viewer.is_slow or viewer not in self._viewers:
            return
        if not viewer.asked:
            viewer.peer.resume()
        elif viewer not in self._turns:
            self._turns.append(viewer)
            if self._pause is None and self._answering is None:
                self._answer_next()

    def _answer_next(self) -> None:
        self._pause = None
        while self._turns and not self._is_closed:
            viewer = self._turns.popleft()
            if viewer.asked and not viewer.is_slow:
                self._answering = self._loop.create_task(self._answer(viewer))
                return

    async def _answer(self, viewer: Viewer) -> None:
        began = perf_counter()
        asked = viewer.asked.popleft()
        try:
            viewer.peer.send_one(await self._reply(asked))
        finally:
            self._answering = None
            if not self._is_closed:
                pause = max(LEAST_PAUSE, (SHARE - 1) * (perf_counter() - began))
                self._pause = self._loop.call_later(pause, self._answer_next)
                self._take_turn(viewer)

    async def _reply(self, asked: wire.Inquire | wire.Depart) -> wire.Message:
        if isinstance(asked, wire.Depart):
            return wire.Departed()
        try:
            answer = self._answers.get(asked.what)
            if answer is None:
                raise ProtocolError(f"nothing is known of {asked.what[:40]!r}")
            told = status_codec.dump(await answer(asked.number))
        except Exception as error:  # noqa: BLE001 - it is told to who has asked
            return wire.ChildFailed(asked.child, *pack_own_error(error).why)
        return wire.ChildDone(asked.child, told)

    def close(self) -> None:
        """The node is being stopped: part from those that are still there."""
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        if self._answering is not None:
            self._answering.cancel()
        for viewer in list(self._viewers):
            self._on_lost(viewer)
            viewer.peer.send_one(wire.Close())
            viewer.peer.end()


_REFUSAL: Final = (
    "on this socket a node answers questions and takes no work. A node inside a "
    "program runs that program's own tasks, and ends with it; `aiogpu start --head` "
    "starts one for several programs"
)
