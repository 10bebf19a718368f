"""Answers commands that look at a node over the node's own socket.

Commands such as `aiogpu status` and `aiogpu cancel` find this socket in the private
directory of a node inside a program. They cannot start tasks: the node ends with its
program, so it runs only that program's tasks. Viewers can slow the program only by a
bounded amount: questions are answered one at a time, in turns, with pauses, and take at
most 1/`SHARE` of the loop's time. Lists of tasks have turns and a share of their own: a
search among 100 000 tasks, which takes 0.1 s, would make the status of other viewers
wait for its pause of 2 s. Imported for the first viewer.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Final

from aiogpu.runtime.connection import Peer, Recipient
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.wire import messages as wire
from aiogpu.wire.messages import ProtocolError

MOST: Final = 16
"""Most viewers at the same time; each takes a descriptor of the program."""


WITHIN: Final = 10.0
"""Seconds in which a viewer must identify itself."""


LONGEST_FRAME: Final = 1 << 22
"""Bytes of a frame; a program that joins by mistake sends its environment."""


SHARE: Final = 20
"""All viewers together get at most 1/`SHARE` of the loop's time for lists of tasks, and
as much for all other answers."""


LEAST_PAUSE: Final = 1e-3
"""Least seconds between two answers."""


Answer = Callable[[wire.Inquire], Coroutine[Any, Any, object]]
"""Answers a question about the node, or acts on it."""


def unknown_question(inquiry: wire.Inquire) -> ProtocolError:
    """Return the error for a question that the node cannot answer."""
    return ProtocolError(f"this node cannot answer {inquiry.what[:40]!r}")


async def import_in_turns() -> None:
    """Import what answers need, one module in each turn of the loop.

    Together they take 8 ms, the longest takes 4 ms.
    """
    if "aiogpu.observe.snapshot" in sys.modules:
        return
    import aiogpu.observe.why

    await asyncio.sleep(0)
    import aiogpu.observe.task_list

    await asyncio.sleep(0)
    import aiogpu.observe.status_codec

    await asyncio.sleep(0)
    import aiogpu.core.scheduler.contention.shortage

    await asyncio.sleep(0)
    import aiogpu.observe.snapshot  # noqa: F401


@dataclass(slots=True, eq=False)
class Viewer:
    """One command that looks at the node.

    It is not read while a question is open, and not answered while it does not read.

    Attributes:
        peer: the connection.
        late: the timer that refuses a viewer which does not identify itself.
        has_joined: the viewer has identified itself.
        is_slow: the viewer does not read what it was sent.
        questions: the open questions, in order.
    """

    peer: Peer
    late: asyncio.TimerHandle | None = None
    has_joined: bool = False
    is_slow: bool = False
    questions: deque[wire.Inquire | wire.Depart] = field(default_factory=deque)


class Turns:
    """Answers viewers' questions of one kind, one at a time, with pauses.

    Args:
        loop: the event loop of the node.
        answer: answers the first question of a viewer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[Viewer], Coroutine[Any, Any, None]],
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._viewers: deque[Viewer] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._answering: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Turns of {len(self._viewers)}>"

    def add(self, viewer: Viewer) -> None:
        """Queue a viewer for its next answer."""
        if viewer not in self._viewers:
            self._viewers.append(viewer)
            if self._pause is None and self._answering is None:
                self._answer_next()

    def _answer_next(self) -> None:
        self._pause = None
        while self._viewers and not self._is_closed:
            viewer = self._viewers.popleft()
            if viewer.questions and not viewer.is_slow:
                self._answering = self._loop.create_task(self._take(viewer))
                return

    async def _take(self, viewer: Viewer) -> None:
        began = perf_counter()
        try:
            await self._answer(viewer)
        finally:
            self._answering = None
            if not self._is_closed:
                pause = max(LEAST_PAUSE, (SHARE - 1) * (perf_counter() - began))
                self._pause = self._loop.call_later(pause, self._answer_next)

    def close(self) -> None:
        """Answer nothing more."""
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        if self._answering is not None:
            self._answering.cancel()


class Viewers:
    """The commands that look at one node.

    Args:
        loop: the event loop of the node.
        node: the id of the node.
        capacity: the node's resources, packed.
        answers: the questions that viewers may ask, by name.
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
        self._turns = Turns(loop, self._answer)
        self._lists = Turns(loop, self._answer)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Viewers {len(self._viewers)}>"

    def on_hello(self, peer: Peer) -> Recipient | None:
        """Accept the connection of a client that has sent `Hello`; None if refused."""
        if self._is_closed:
            peer.abort()
            return None
        if len(self._viewers) >= MOST:
            peer.refuse(f"{MOST} commands are watching this node already; end one")
            return None
        peer.limit_frames(LONGEST_FRAME)
        viewer = Viewer(peer)
        viewer.late = self._loop.call_later(WITHIN, self._turn_away, viewer)
        self._viewers.add(viewer)
        return Recipient(
            partial(self._on_messages, viewer),
            partial(self._on_lost, viewer),
            partial(self._on_slow, viewer),
        )

    def _turn_away(self, viewer: Viewer) -> None:
        self._refuse(viewer, f"the command did not identify itself in {WITHIN:g} s")

    def _refuse(self, viewer: Viewer, reason: str) -> None:
        self._on_lost(viewer)
        viewer.peer.drop(reason)

    def _on_messages(self, viewer: Viewer, messages: list[wire.Message]) -> None:
        for message in messages:
            if isinstance(message, wire.Join) and not viewer.has_joined:
                self._join(viewer, message)
            elif isinstance(message, wire.Inquire | wire.Depart) and viewer.has_joined:
                viewer.questions.append(message)
            else:
                self._refuse(viewer, _REFUSAL)
            if viewer not in self._viewers:
                return
        if viewer.questions:
            viewer.peer.pause()
            self._take_turn(viewer)

    def _join(self, viewer: Viewer, join: wire.Join) -> None:
        from aiogpu.version import __version__

        if join.release != __version__:
            reason = (
                f"the node runs aiogpu {__version__}, this command {join.release}; use "
                f"the `aiogpu` command of the program's environment"
            )
            self._refuse(viewer, reason)
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
        viewer.questions.clear()
        self._end_wait(viewer)

    def _take_turn(self, viewer: Viewer) -> None:
        """Queue a viewer for its next answer, or read on if it has no open question."""
        if viewer.is_slow or viewer not in self._viewers:
            return
        if not viewer.questions:
            viewer.peer.resume()
        else:
            turns = self._lists if _asks_for_list(viewer.questions[0]) else self._turns
            turns.add(viewer)

    async def _answer(self, viewer: Viewer) -> None:
        question = viewer.questions.popleft()
        try:
            viewer.peer.send_one(await self._reply(question))
        finally:
            if not self._is_closed:
                # Later: the next question waits for its turn, after the pause.
                self._loop.call_soon(self._take_turn, viewer)

    async def _reply(self, question: wire.Inquire | wire.Depart) -> wire.Message:
        if isinstance(question, wire.Depart):
            return wire.Departed()
        try:
            answer = self._answers.get(question.what)
            if answer is None:
                raise unknown_question(question)
            await import_in_turns()
            from aiogpu.observe.status_codec import status_codec

            payload = status_codec.dump(await answer(question))
        except Exception as error:  # noqa: BLE001 - sent to the viewer
            return wire.ChildFailed(question.child, *pack_own_error(error).why)
        return wire.ChildDone(question.child, payload)

    def close(self) -> None:
        """Disconnect the remaining viewers: the node is being stopped."""
        self._is_closed = True
        self._turns.close()
        self._lists.close()
        for viewer in list(self._viewers):
            self._on_lost(viewer)
            viewer.peer.send_one(wire.Close())
            viewer.peer.end()


def _asks_for_list(question: wire.Inquire | wire.Depart) -> bool:
    return isinstance(question, wire.Inquire) and question.what == wire.TASKS


_REFUSAL: Final = (
    "this socket takes no work, it only answers questions about the node. A node "
    "inside a program runs only that program's tasks; `aiogpu start --head` starts a "
    "node for several programs"
)
