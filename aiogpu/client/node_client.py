"""A process's conversation with its node: requests by number, and who is told.

A task in a worker (`worker.nested`) and a program that has joined a node
(`engines.remote`) send the same messages, so both clients derive from `NodeClient`. It
does no I/O: the subclass implements `send`, and gives `take` each message that comes.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Final, Self
from weakref import finalize

from aiogpu.client.current import current
from aiogpu.client.references import Loan, Loans, SharedResults
from aiogpu.errors import SerializationError
from aiogpu.wire.codec import LARGEST_PAYLOAD
from aiogpu.wire.messages import (
    NUMBER_BITS,
    Ask,
    Carried,
    ChildDemand,
    ChildDone,
    ChildFailed,
    ChildItems,
    Declare,
    Discard,
    Failed,
    Fetch,
    Find,
    Hold,
    Make,
    Message,
    Release,
    Stop,
    Submit,
    Withdraw,
)

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver

DECLARED: Final = 512
"""Functions that the node is taken to know; then all are declared anew. The node keeps
more, so that it never forgets one that a client still counts on."""


class NodeClient:
    """See above.

    Attributes:
        client: id of the program; 0 in a worker.
        upsets: how many requests have ended without a result so far.
        shares: values that this process gives to others.
        new_number: gives a number for a request, a value or an actor, each once.
    """

    def __init__(self, client: int = 0) -> None:
        self.client = client
        self.upsets = 0
        self.new_number = count(1).__next__
        self.shares = SharedResults(self)
        self._receivers: dict[int, Receiver] = {}
        self._declared: set[int] = set()
        # A task may start others in several threads.
        self._requesting = allocate_lock()

    @property
    def loans(self) -> Loans:
        """What was lent to this process."""
        raise NotImplementedError

    @property
    def remote_values(self) -> Self:
        """Who knows values that another process keeps; see `client.port.Far`."""
        return self

    def send(self, message: Message) -> None:
        """Say something to the node."""
        raise NotImplementedError

    def read(self) -> None:
        """Take in what has come, where nothing else does that."""

    def _prepare(self, name: str, has_payload: bool) -> None:
        """Send what must precede the next request.

        Args:
            name: what is asked for, for messages.
            has_payload: whether that request may contain handles of this process.

        Raises:
            MisuseError: the task that asks has ended.
            NodeError: the node has gone.
        """
        raise NotImplementedError

    def _check(self, func: FunctionSpec, payload: bytes) -> None:
        """Refuse a call that cannot be made.

        Raises:
            SerializationError: the arguments are too large to be sent.
        """
        if len(payload) > LARGEST_PAYLOAD:
            raise too_large(f"the arguments of {func.spec.name}.remote()", payload)

    def own(self, identity: int) -> Loan:
        """A value that this process has just put, as one that was lent to it."""
        return self.loans.own(identity)

    def new_id(self) -> int:
        """An id for a value or an actor that no other process uses."""
        return -(((self.client or current.worker) << NUMBER_BITS) + self.new_number())

    def expect(self, receiver: Receiver) -> int:
        """Have the answer of a new request told to a receiver; gives its number."""
        number = self.new_number()
        self._receivers[number] = receiver
        return number

    def declare(self, func: FunctionSpec) -> None:
        """Tell the node what a function is and asks for."""
        # Late: a worker whose tasks start no others does without the core's types.
        from aiogpu.client.spec_codec import Terms

        if len(self._declared) >= DECLARED:
            self._declared.clear()
        terms = Terms.of(func).pack()
        self.send(Declare(func.id, func.spec.name, terms, func.function.payload))
        self._declared.add(func.id)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; gives its number.

        Raises:
            SerializationError: the arguments are too large to be sent.
            MisuseError: the task that asks has ended.
        """
        self._check(func, payload)
        with self._requesting:
            self._prepare(func.spec.name, has_payload=True)
            if func.id not in self._declared:
                self.declare(func)
            number = self.expect(receiver)
            self.send(Submit(current.task, number, func.id, payload))
        return number

    def make(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> int:
        """Have an actor made; gives its id.

        Args:
            func: its class.
            payload: the constructor's arguments.
            key: its namespace and name, None without a name.
            get_if_exists: whether the living actor of that name is as good.
        """
        self._check(func, payload)
        namespace, name = key or ("", "")
        with self._requesting:
            self._prepare(func.spec.name, has_payload=True)
            if func.id not in self._declared:
                self.declare(func)
            actor = self.new_id()
            self.send(Make(actor, func.id, payload, name, namespace, get_if_exists))
        return actor

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number."""
        with self._requesting:
            self._prepare(method, has_payload=True)
            number = self.expect(receiver)
            self.send(Ask(current.task, number, actor, method, payload))
        return number

    def fetch(self, value: int, receiver: Receiver) -> int:
        """Ask for a value; gives the question's number."""
        with self._requesting:
            self._prepare("a task", has_payload=False)
            number = self.expect(receiver)
            self.send(Fetch(current.task, number, value))
        return number

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Ask which actor has a name; gives the question's number."""
        with self._requesting:
            self._prepare(name, has_payload=False)
            number = self.expect(receiver)
            self.send(Find(number, name, namespace))
        return number

    def hold(self, actor: int) -> None:
        """A handle to an actor has come to this process."""
        self.send(Hold(actor))

    def drop(self, actor: int) -> None:
        """The last handle to an actor is gone; called in any thread."""
        self.send(Release(actor))

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `wire.messages.Stop` for how."""
        self.send(Stop(actor, how))

    def discard(self, value: int) -> None:
        """Nobody wants a value any more: stop whoever makes it."""
        self.send(Discard(value))

    def demand(self, number: int, limit: int) -> None:
        """Let a request that is a stream yield so many items in all."""
        if number in self._receivers:
            self.send(ChildDemand(number, limit))

    def withdraw(self, number: int) -> bool:
        """Stop what a request has asked for; False if it has been answered."""
        if self._receivers.pop(number, None) is None:
            return False
        self.upsets += 1
        self.shares.withdraw(number)
        self.send(Withdraw(current.task, number))
        return True

    def take(self, message: Message) -> bool:
        """Tell the receiver of an answer; False if the message is none."""
        kind = type(message)
        if kind is ChildDone:
            if self.shares.due:
                self.shares.pass_on(message)
            receiver = self._receivers.pop(message.child, None)  # type: ignore[union-attr]
            if receiver is not None:
                receiver.receive(message.payload)  # type: ignore[union-attr, arg-type]
            return True
        if isinstance(message, ChildItems):
            receiver = self._receivers.get(message.child)
            if receiver is not None:
                receiver.receive_items(message.payloads)  # type: ignore[attr-defined]
            return True
        if isinstance(message, ChildFailed):
            if self.shares.due:
                self.shares.pass_on(message)
            receiver = self._receivers.pop(message.child, None)
            if receiver is None:
                self._take_stray(message)
            else:
                receiver.reject(Failed(*message))
                self.upsets += 1
            return True
        if isinstance(message, Carried):
            receiver = self._receivers.get(message.child)
            # A receiver in a wrapper is the handle that outlives the answer.
            hold_for(getattr(receiver, "receiver", receiver), message.actors, self)
            return True
        return False

    def _take_stray(self, failed: ChildFailed) -> None:
        """Something has failed for which no receiver waits."""


def too_large(what: str, payload: bytes) -> SerializationError:
    """The error for what a call cannot carry."""
    return SerializationError(
        f"{what}: {len(payload)} bytes when pickled; a call carries at most "
        f"{LARGEST_PAYLOAD}. Pass the path of a file, or split it over several calls."
    )


def hold_for(receiver: object, actors: Iterable[int], client: NodeClient) -> None:
    """Have actors live as long as the handle whose result they are in.

    Whoever unpickles that result holds them himself, from then on.

    Args:
        receiver: the handle; None if nobody wants the result any more.
        actors: their ids; each counts as held by this process.
        client: says that this process holds one no more.
    """
    for actor in actors:
        if receiver is None:
            client.drop(actor)
        else:
            finalize(receiver, client.drop, actor).atexit = False
