"""A node of another process, which this program has joined.

What is asked of it goes over a Unix socket as a worker's own requests do. Requests are
checked here against what the node has, so that what it can never give is refused at
`.remote()`, as everywhere.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines.base import NodeOptions
from aiogpu.engines.line import Line
from aiogpu.engines.program import join_of, unreachable
from aiogpu.engines.remote_link import RemoteLink, Told
from aiogpu.errors import AiogpuError, NodeClosedError, NodeDiedError, NodeError
from aiogpu.memory.page import ControlPage
from aiogpu.runtime.terms import Terms
from aiogpu.wire.acting import Release
from aiogpu.wire.connection import CLIENT, greeting
from aiogpu.wire.joining import (
    AVAILABLE,
    FIRST_CLIENT,
    RESOURCES,
    STATUS,
    WHY,
    WHY_TASK,
    Carried,
    Depart,
    Departed,
    Inquire,
    Refused,
    Welcome,
)
from aiogpu.wire.messages import (
    ChildDone,
    ChildFailed,
    Close,
    Declare,
    Failed,
    Message,
    Submit,
    Withdraw,
)
from aiogpu.wire.streaming import ChildDemand, ChildItems
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.loans import Loans
from aiogpu.worker.shares import Shares

if TYPE_CHECKING:
    from aiogpu.core.ledger import Ledger
    from aiogpu.core.snapshot import NodeStatus
    from aiogpu.core.why import Why
    from aiogpu.engines.remote_actors import RemoteActors
    from aiogpu.runtime.call import Receiver, Site
    from aiogpu.wire.outgoing import Outgoing

DECLARED: Final = 512
"""Sites that the node is taken to know; then all are declared anew. It keeps more."""
JOIN_LIMIT: Final = 10.0
"""Seconds in which a node lets a program join."""
DEPART_LIMIT: Final = 30.0
"""Seconds in which what a program leaves has stopped, or is left to the node."""
UNCHECKED: Final = 1 << 20
"""Bytes that any call may carry."""


class RemoteEngine:
    """See above.

    Attributes:
        loop: on which it is used.
        loans: what was lent to this process.
        shares: what this process gives to others.
        shared_early: told that a handle was started which others refer to already.
    """

    waits = None

    def __init__(
        self, path: str, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.client = FIRST_CLIENT + int.from_bytes(os.urandom(3), "little")
        self._path = path
        self._options = options
        self._line = Line(loop)
        self._line.on_messages = self._on_messages
        self._line.on_lost = self._on_lost
        self._page = ControlPage.open(descriptor := ControlPage.create())
        os.close(descriptor)
        self.loans = Loans("", "", self._page, Interrupts(self._page), self.client)
        self.loans.on_over = self._on_over
        self.shares = Shares(self, _nothing, self.new_number, self.loans, self.client)
        self._receivers: dict[int, Receiver] = {}
        self._last = 0
        self._mark = object()
        self._declared = 0
        self._ledger: Ledger | None = None
        self._actors: RemoteActors | None = None
        self._welcome: asyncio.Future[Welcome] = loop.create_future()
        self._departed = loop.create_future()
        self._is_telling = False
        self._error: NodeError | None = None

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._path}>"

    @property
    def far(self) -> RemoteEngine:
        """Who knows values that have come from elsewhere; see `Engine.far`."""
        return self

    @property
    def link(self) -> RemoteLink:
        """The way to them."""
        return RemoteLink(self)

    @property
    def mark(self) -> object:
        """Left on sites that the node knows."""
        return self._mark

    async def open(self) -> None:
        """Join the node; see `Engine.open`.

        Raises:
            NodeDiedError: no node can be reached there.
            NodeError: it has refused.
        """
        try:
            self._line.connect(self._path, greeting(CLIENT, self.client, os.getpid()))
            self._line.send(join_of(self._options))
            async with asyncio.timeout(JOIN_LIMIT):
                welcome = await self._welcome
            self._move_in(welcome)
        except TimeoutError:
            self._line.close()
            raise NodeDiedError(
                f"the node at {self._path} has not answered within {JOIN_LIMIT:g} s. "
                f"`aiogpu stop --force` ends it, `aiogpu start --head` starts another."
            ) from None
        except OSError as error:
            if isinstance(error, AiogpuError):
                raise
            raise NodeDiedError(unreachable(self._path, error)) from error
        except BaseException:
            self._line.close()
            raise

    def _move_in(self, welcome: Welcome) -> None:
        from aiogpu.engines.hosting import unpack_capacity

        self._ledger = unpack_capacity(welcome.ledger)
        page = self._page
        with suppress(OSError):
            descriptor = os.open(welcome.page, os.O_RDWR | os.O_CLOEXEC)
            try:
                page = ControlPage.open(descriptor)
            finally:
                os.close(descriptor)
        self.loans.move_in(welcome.descriptors, welcome.spill, page)

    @property
    def actors(self) -> RemoteActors:
        """The node's actors; see `Engine.actors`."""
        if self._actors is None:
            from aiogpu.engines.remote_actors import RemoteActors

            self._actors = RemoteActors(self)
        return self._actors

    def new_number(self) -> int:
        """A number for a child, a value or an actor, given to no other."""
        self._last += 1
        return self._last

    def expect(self, receiver: Receiver) -> int:
        """Have the answer of a new child told to a receiver; gives its number."""
        self._last = number = self._last + 1
        self._receivers[number] = receiver
        return number

    def send(self, message: Message) -> None:
        """Say something to the node; nothing, where it has gone."""
        self._line.send(message)

    def check_open(self) -> None:
        """Raise `NodeError` where the node has gone."""
        if self._error is not None:
            raise self._error
        if self._ledger is None:
            raise NodeClosedError("this node is not open.")

    def pack(self, outgoing: Outgoing) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return self.loans.pack(outgoing)

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        if site.checked_by is not self._mark:
            self.admit(site)
        if len(payload) > UNCHECKED:
            from aiogpu.engines.admission import check_arguments

            check_arguments(site, payload)
        self._last = child = self._last + 1
        self._receivers[child] = receiver
        self._line.send(Submit(0, child, site.id, payload))
        return child

    def admit(self, site: Site) -> None:
        """Check what is the same for all calls of a site, and declare it.

        Raises:
            InfeasibleError: the node can never give what it asks for.
            NodeError: the node has gone.
        """
        from aiogpu.engines.admission import check_site

        self.check_open()
        assert self._ledger is not None, self
        check_site(site, self._ledger)
        if self._declared >= DECLARED:
            self._mark, self._declared = object(), 0
        site.checked_by = self._mark
        self._declared += 1
        terms = Terms.of(site).pack()
        self.send(Declare(site.id, site.spec.name, terms, site.function.payload))

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all; see `Engine.demand`."""
        if task in self._receivers:
            self.send(ChildDemand(task, limit))

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        if self._receivers.pop(task, None) is not None:
            self.shares.withdraw(task)
            self.send(Withdraw(0, task))

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        found: dict[str, float] = await self._inquire(RESOURCES)
        return found

    async def available(self) -> dict[str, float]:
        """What is free of each."""
        found: dict[str, float] = await self._inquire(AVAILABLE)
        return found

    async def status(self) -> NodeStatus:
        """Who holds what, what waits and why, whosever it is."""
        found: NodeStatus = await self._inquire(STATUS)
        return found

    async def why(self, task: int) -> Why | None:
        """Why a task of this program waits; see `Engine.why`."""
        found: Why | None = await self._inquire(WHY, task)
        return found

    async def why_task(self, number: int) -> Why | None:
        """Why a task waits, whosever it is; see `Engine.why_task`."""
        found: Why | None = await self._inquire(WHY_TASK, number)
        return found

    async def _inquire(self, what: str, number: int = 0) -> Any:
        self.check_open()
        told = Told(self.loop.create_future())
        self.send(Inquire(self.expect(told), what, number))
        return await told.future

    def ask_now(self, question: Callable[[int], Message]) -> ChildDone | ChildFailed:
        """Ask something of which the answer is waited for here, in plain code.

        Raises:
            NodeDiedError: the node has gone, or does not answer.
        """
        self.check_open()
        number = self.new_number()

        def is_answer(message: Message) -> bool:
            return isinstance(message, ChildDone | ChildFailed) and (
                message.child == number
            )

        answer = self._line.ask_now(question(number), is_answer)
        assert isinstance(answer, ChildDone | ChildFailed), answer
        return answer

    def _on_messages(self, messages: list[Message]) -> None:
        shares, receivers = self.shares, self._receivers
        for message in self.loans.take_in(messages):
            kind = type(message)
            if kind is ChildDone:
                if shares.due:
                    shares.pass_on(message)
                receiver = receivers.pop(message.child, None)  # type: ignore[union-attr]
                if receiver is not None:
                    receiver.receive(message.payload)  # type: ignore[union-attr, arg-type]
            elif isinstance(message, ChildFailed):
                shares.pass_on(message)
                receiver = receivers.pop(message.child, None)
                if receiver is not None:
                    receiver.reject(Failed(*message))
            elif isinstance(message, ChildItems):
                receiver = receivers.get(message.child)
                if receiver is not None:
                    receiver.receive_items(message.payloads)  # type: ignore[attr-defined]
            else:
                self._on_other(message)

    def _on_other(self, message: Message) -> None:
        match message:
            case Carried():
                self._hold_for(message)
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case Refused(reason):
                self._end(NodeError(f"the node at {self._path} refuses: {reason}."))
            case Close():
                self._end(NodeClosedError(f"the node at {self._path} was stopped."))
            case Departed():
                if not self._departed.done():
                    self._departed.set_result(None)

    def _hold_for(self, carried: Carried) -> None:
        """Actors whose handles are in an answer live as long as its handle."""
        receiver = self._receivers.get(carried.child)
        receiver = getattr(receiver, "receiver", receiver)
        for actor in carried.actors:
            if receiver is None:
                self.send(Release(actor))
            else:
                weakref.finalize(receiver, self._release_soon, actor)

    def _release_soon(self, actor: int) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.send, Release(actor))

    def _on_over(self) -> None:
        """A loan has ended, in whichever thread."""
        if not self._is_telling:
            self._is_telling = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._tell_over)

    def _tell_over(self) -> None:
        self._is_telling = False
        if not self._line.is_open:
            return
        returned = self.loans.tell()
        if returned is not None:
            self.send(returned)

    def _on_lost(self, error: Exception | None) -> None:
        why = f": {error}" if error is not None else ""
        self._end(
            NodeDiedError(
                f"the node at {self._path} has ended{why}. What ran on it has ended "
                f"with it; start it anew by `aiogpu start --head`."
            )
        )

    def _end(self, error: NodeError) -> None:
        """Nothing more comes from the node."""
        if self._error is not None:
            return
        self._error = error
        self._mark = object()
        self._line.close()
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()
        if not self._departed.done():
            self._departed.set_result(None)
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.fail(error)

    async def close(self) -> None:
        """Stop what is this program's, wait for that, and leave."""
        if self._line.is_open and self._ledger is not None:
            self.send(Depart())
            receivers, self._receivers = self._receivers, {}
            for receiver in receivers.values():
                receiver.fail(
                    NodeClosedError(
                        "the program has left its node before it had ended."
                    )
                )
            await asyncio.wait([self._departed], timeout=DEPART_LIMIT)
        self._end(NodeClosedError("this program has left its node."))
        self.loans.leave()

    def hasten(self) -> None:
        """Wait no more for what stops; see `Engine.hasten`."""
        if not self._departed.done():
            self._departed.set_result(None)

    def abandon(self) -> None:
        """The same in haste; the node sees it."""
        self.disown()

    def disown(self) -> None:
        """This process is a fork of the program: the connection is its parent's."""
        self._line.leave()
        self.loans.leave()


def _nothing() -> None:
    """What has come is read by the loop."""
