"""A process's conversation with its node: numbered requests and their receivers.

A task in a worker (`worker.nested`) and a program that has joined a node
(`engines.remote`) send the same messages, so both clients derive from `NodeClient`. It
does no I/O: the subclass implements `send`, and gives `take` each message that comes.
"""

from __future__ import annotations

from _thread import allocate_lock
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from aiogpu.client.current import current
from aiogpu.client.references import Loan, Loans
from aiogpu.errors import SerializationError, TaskCancelledError
from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.serialization.payload import result_part
from aiogpu.serialization.references import add_actor
from aiogpu.wire.messages import (
    LARGEST_PAYLOAD,
    NUMBER_BITS,
    Ask,
    ChildDemand,
    ChildDone,
    ChildFailed,
    ChildItems,
    ChildReport,
    Declare,
    Discard,
    Failed,
    Fetch,
    Find,
    Hold,
    Make,
    Message,
    Put,
    PutFailed,
    Share,
    Stop,
    Submit,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver, Shareable
    from aiogpu.serialization.references import PickledValue, Reference

DECLARED: Final = 512
"""Functions that the node is taken to know; then all are declared anew. The node keeps
more, so that it never forgets one that a client still counts on."""


OWN_FRAMES: Final = "/aiogpu/"
"""Marks frames that a user's traceback leaves out."""


class _Due(NamedTuple):
    """A result that was shared before it came.

    Attributes:
        loan: of the value; it is needed until the answer was passed on.
        part: which of several results it is; -1 for all of it.
        name: of the task.
    """

    loan: Loan
    part: int
    name: str


class SharedResults:
    """The values that this process gives to others: what it puts, and its results.

    Attributes:
        due: what was shared before its answer came, by child.
    """

    def __init__(self, client: NodeClient) -> None:
        self.due: dict[int, list[_Due]] = {}
        self._client = client

    def put(self, payload: bytes) -> Loan:
        """Have a value kept; this process holds it."""
        return self._lent(Put(self._client.new_id(), payload))

    def share(self, handle: Shareable) -> Loan:
        """The value that receivers of a child's handle refer to; see `SharedValues`."""
        if _is_due(handle):
            return self._share_due(handle)
        identity = self._client.new_id()
        if handle.raw is not None:
            return self._lent(Put(identity, handle.raw))
        error = handle.error
        if handle.cancelled() or error is None:
            error = TaskCancelledError(f"{handle.task_name} was cancelled.")
        failed = pack_failure(0, RAISED, error, OWN_FRAMES)
        return self._lent(PutFailed(identity, *failed.why))

    def _share_due(self, handle: Shareable) -> Loan:
        """Share a result that the handle does not have yet.

        The answer may have come: the driver keeps no answer that it has sent. So it is
        read here, and `pass_on` sends it back as the value. The handle itself may learn
        of it later, in a turn of its loop.
        """
        loan = self._client.own(self._client.new_id())
        due = _Due(loan, handle.part, handle.task_name)
        self.due.setdefault(handle.task_id, []).append(due)
        self._client.read()
        if due in self.due.get(handle.task_id, ()):
            self._client.send(Share(loan.id, handle.task_id, handle.part))
        return loan

    def promise(self) -> Loan:
        """Return the reference of a result before its task is started."""
        return self._client.own(self._client.new_id())

    def keep(self, loan: Loan, handle: Shareable) -> None:
        """The task of what was promised is started: its result is that value."""
        self._client.send(Share(loan.id, handle.task_id, handle.part))
        due = self.due.setdefault(handle.task_id, [])
        due.append(_Due(loan, handle.part, handle.task_name))

    def fail(self, loan: Loan, error: BaseException) -> None:
        """Fail a shared or promised value."""
        failed = pack_failure(0, RAISED, error, OWN_FRAMES)
        self._client.send(PutFailed(loan.id, *failed.why))

    def withdraw(self, child: int) -> None:
        """Settle the shared result of a cancelled child."""
        for due in self.due.pop(child, ()):
            self.fail(due.loan, TaskCancelledError(f"{due.name} was cancelled."))

    def drop(self, child: int, loan: object) -> None:
        """Cancel one of a child's several results; the others may still come."""
        kept = [due for due in self.due.get(child, ()) if due.loan is not loan]
        for due in self.due.pop(child, ()):
            if due.loan is loan:
                self.fail(due.loan, TaskCancelledError(f"{due.name} was cancelled."))
        if kept:
            self.due[child] = kept

    def due_now(self) -> dict[int, tuple[_Due, ...]]:
        """A copy of `due`."""
        return {child: tuple(due) for child, due in self.due.items()}

    def forget(self, told: dict[int, tuple[_Due, ...]]) -> None:
        """The driver itself passes on these results when they come."""
        for child, over in told.items():
            # Another thread may have shared one of them again meanwhile.
            left = [due for due in self.due.pop(child, ()) if due not in over]
            if left:
                self.due[child] = left

    def _lent(self, message: Put | PutFailed | Share) -> Loan:
        loan = self._client.own(message.value)
        self._client.send(message)
        return loan

    def pass_on(self, message: Message) -> None:
        """Tell the driver the answer of a child that was shared while it was due.

        It may have told it before it heard that; then nobody else has it.
        """
        if not isinstance(message, ChildDone | ChildFailed):
            return
        for due in self.due.pop(message.child, ()):
            if isinstance(message, ChildFailed):
                self._client.send(PutFailed(due.loan.id, *message[1:]))
            else:
                payload = result_part(message.payload, due.part)
                self._client.send(Put(due.loan.id, payload))


def _is_due(handle: Shareable) -> bool:
    return handle.raw is None and handle.error is None and not handle.cancelled()


class NodeClient:
    """See above.

    Attributes:
        client: id of the program; 0 in a worker.
        upsets: how many requests of plain code have ended without a result so far;
            handles count their own.
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
        """The loans of this process."""
        raise NotImplementedError

    @property
    def remote_values(self) -> Self:
        """The values that other processes keep; see `client.interface.ValueStore`."""
        return self

    def send(self, message: Message) -> None:
        """Say something to the node."""
        raise NotImplementedError

    def read(self) -> None:
        """Take in what has come, where nothing else does that."""

    def _prepare(self, name: str) -> None:
        """Send the messages that must precede the next request.

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
        """Return a new value or actor of this process as a loan."""
        return self.loans.own(identity)

    def actor(self, identity: int, _name: str = "") -> Loan:
        """Return the hold on an actor whose handle is being unpickled.

        As a part of a function that comes unannounced: the node is told then.
        """
        loan = self.loans.find(identity)
        if loan is None:
            loan = self.own(identity)
            self.send(Hold(identity))
        return loan

    def pass_on(self, hold: Reference) -> None:
        """A handle to the actor of a hold is being pickled."""
        add_actor(hold.id, hold)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Loans.pack`."""
        return self.loans.pack(outgoing)

    def new_id(self) -> int:
        """An id for a value or an actor that no other process uses."""
        return -(((self.client or current.worker) << NUMBER_BITS) + self.new_number())

    def expect(self, receiver: Receiver) -> int:
        """Register the receiver of a new request; return the request's number."""
        number = self.new_number()
        self._receivers[number] = receiver
        return number

    def declare(self, func: FunctionSpec) -> None:
        """Tell the node what a function is and asks for."""
        # Late: a worker whose tasks start no others does without the core's types.
        from aiogpu.client.spec_codec import dump_spec

        if len(self._declared) >= DECLARED:
            self._declared.clear()
        spec = dump_spec(func)
        self.send(Declare(func.id, func.spec.name, spec, func.function.payload))
        self._declared.add(func.id)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; gives its number.

        Raises:
            SerializationError: the arguments are too large to be sent.
            MisuseError: the task that asks has ended.
        """
        self._check(func, payload)
        if func.function.actors:
            payload = self.loans.with_actors(payload, func.function.actors)
        with self._requesting:
            self._prepare(func.spec.name)
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
    ) -> Loan:
        """Have an actor made; return the hold on it.

        Args:
            func: its class.
            payload: the constructor's arguments.
            key: its namespace and name, None without a name.
            get_if_exists: whether the living actor of that name is as good.
        """
        self._check(func, payload)
        if func.function.actors:
            payload = self.loans.with_actors(payload, func.function.actors)
        namespace, name = key or ("", "")
        with self._requesting:
            self._prepare(func.spec.name)
            if func.id not in self._declared:
                self.declare(func)
            actor = self.new_id()
            self.send(Make(actor, func.id, payload, name, namespace, get_if_exists))
        return self.own(actor)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number."""
        with self._requesting:
            self._prepare(method)
            number = self.expect(receiver)
            self.send(Ask(current.task, number, actor, method, payload))
        return number

    def fetch(self, value: int, receiver: Receiver) -> int:
        """Ask for a value; gives the question's number."""
        with self._requesting:
            self._prepare("a task")
            number = self.expect(receiver)
            self.send(Fetch(current.task, number, value))
        return number

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Ask which actor has a name; gives the question's number."""
        with self._requesting:
            self._prepare(name)
            number = self.expect(receiver)
            self.send(Find(number, name, namespace))
        return number

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `wire.messages.Stop` for how."""
        self.send(Stop(actor, how))

    def discard(self, value: int) -> None:
        """Discard a value: cancel the task that makes it."""
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
                receiver.settle(message.payload)  # type: ignore[union-attr, arg-type]
            return True
        if isinstance(message, ChildItems):
            receiver = self._receivers.get(message.child)
            if receiver is not None:
                receiver.receive_items(message.payloads)  # type: ignore[attr-defined]
            return True
        if isinstance(message, ChildReport):
            receiver = self._receivers.get(message.child)
            if hasattr(receiver, "receive_report"):  # nobody can read a map's
                receiver.receive_report(message.lost, message.payload)  # type: ignore[union-attr]
            return True
        if isinstance(message, ChildFailed):
            if self.shares.due:
                self.shares.pass_on(message)
            receiver = self._receivers.pop(message.child, None)
            if receiver is None:
                self._take_stray(message)
            else:
                receiver.settle(Failed(*message))
            return True
        return False

    def _settle_all(self, why: Callable[[str], Exception]) -> None:
        """Nothing that was asked for will come; `why` makes the error for a name."""
        left, self._receivers = self._receivers, {}
        for receiver in left.values():
            receiver.settle(why(getattr(receiver, "task_name", "it")))

    def _take_stray(self, failed: ChildFailed) -> None:
        """Something has failed for which no receiver waits."""


def too_large(what: str, payload: bytes) -> SerializationError:
    """The error for what a call cannot carry."""
    return SerializationError(
        f"{what}: {len(payload)} bytes when pickled; a call carries at most "
        f"{LARGEST_PAYLOAD}. Pass the path of a file, or split it over several calls."
    )
