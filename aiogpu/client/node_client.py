"""A process's requests to its node: numbers, receivers and messages.

A task in a worker (`worker.nested`) and a program that has joined a node
(`engines.remote`) send the same messages, so both clients derive from `NodeClient`. It
does no I/O: the subclass implements `send`, and passes each received message to `take`.
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
from aiogpu.serialization.serializer import NONE_PAYLOAD
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
"""Functions that count as known to the node; after these, all are declared again. The
node keeps more, so it never forgets a function that counts as known here."""


OWN_FRAMES: Final = "/aiogpu/"
"""Path of frames that are removed from users' tracebacks."""


class _Due(NamedTuple):
    """A result that was shared before it arrived.

    Attributes:
        loan: loan of the value; held until the answer was passed on.
        part: index among several results; -1 for the whole result.
        name: name of the task.
    """

    loan: Loan
    part: int
    name: str


class ClientActor:
    """An actor of the node of another process; see `engines.base.ActorPort`."""

    def __init__(self, client: NodeClient, hold: Loan, func: FunctionSpec) -> None:
        self.id = hold.id
        self.func = func
        self._client = client
        self._hold = hold

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.func.spec.name} {self.id}>"

    def holder(self) -> Loan:
        """Return an object that counts as a handle; see `ActorPort.holder`."""
        return self._hold

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; return the number of the call."""
        return self._client.call(self.id, method, payload, receiver)

    def ask(self, query: str, receiver: Receiver) -> int:
        """Send a query; see `ActorPort.ask`."""
        return self._client.call(self.id, query, NONE_PAYLOAD, receiver)


class SharedResults:
    """The values that this process shares: `put` values and its children's results.

    Attributes:
        due: results that were shared before they arrived, by child.
    """

    def __init__(self, client: NodeClient) -> None:
        self.due: dict[int, list[_Due]] = {}
        self._client = client

    def put(self, payload: bytes) -> Loan:
        """Store a value; return this process's loan of it."""
        return self._lent(Put(self._client.new_id(), payload))

    def share(self, handle: Shareable) -> Loan:
        """Return the loan that stands for a child's handle; see `SharedValues`."""
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

        The answer may already be in the socket, and the driver keeps no answer that it
        has sent. So this reads the socket, and `pass_on` sends such an answer back as
        the value. The handle itself may be settled later, in a turn of its loop.
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
        """Fulfil a promise: the result of a started task becomes the value."""
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
        """Cancel one of a child's several results; the others stay expected."""
        kept = [due for due in self.due.get(child, ()) if due.loan is not loan]
        for due in self.due.pop(child, ()):
            if due.loan is loan:
                self.fail(due.loan, TaskCancelledError(f"{due.name} was cancelled."))
        if kept:
            self.due[child] = kept

    def due_now(self) -> dict[int, tuple[_Due, ...]]:
        """Return a copy of `due`."""
        return {child: tuple(due) for child, due in self.due.items()}

    def forget(self, settled: dict[int, tuple[_Due, ...]]) -> None:
        """Forget due results: the driver has promised to deliver them by itself."""
        for child, results in settled.items():
            # Another thread may have shared one of the results again since.
            remaining = [due for due in self.due.pop(child, ()) if due not in results]
            if remaining:
                self.due[child] = remaining

    def _lent(self, message: Put | PutFailed | Share) -> Loan:
        loan = self._client.own(message.value)
        self._client.send(message)
        return loan

    def pass_on(self, message: Message) -> None:
        """Send the driver the answer of a child whose result was shared early.

        The driver may have sent the answer before it received the `Share`; then only
        this process has it.
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
    """A client of a node that exchanges messages; see the module.

    Attributes:
        client: id of the program; 0 in a worker.
        shares: values that this process shares.
        new_number: returns a new number for a request, a value or an actor.
    """

    def __init__(self, client: int = 0) -> None:
        self.client = client
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
        """Send a message to the node."""
        raise NotImplementedError

    def read(self) -> None:
        """Read the socket, in clients whose socket no loop reads."""

    def _prepare(self, name: str) -> None:
        """Send the messages that must precede the next request.

        Raises:
            MisuseError: the requesting task has ended.
            NodeError: the node has gone.
        """
        raise NotImplementedError

    def _check(self, func: FunctionSpec, payload: bytes) -> None:
        """Check a call before it is sent.

        Raises:
            SerializationError: the arguments are too large to send.
        """
        if len(payload) > LARGEST_PAYLOAD:
            raise too_large(f"the arguments of {func.spec.name}.remote()", payload)

    def own(self, identity: int) -> Loan:
        """Return the loan of a new value or actor of this process."""
        return self.loans.own(identity)

    def actor(self, identity: int, _name: str = "") -> Loan:
        """Return the loan of an actor while its handle is unpickled.

        A function may contain a handle that no message has announced: then the node is
        informed.
        """
        loan = self.loans.find(identity)
        if loan is None:
            loan = self.own(identity)
            self.send(Hold(identity))
        return loan

    def pass_on(self, hold: Reference) -> None:
        """Add an actor's reference to the value that is being pickled."""
        add_actor(hold.id, hold)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Loans.pack`."""
        return self.loans.pack(outgoing)

    def new_id(self) -> int:
        """Return an id for a value or an actor that no other process uses."""
        return -(((self.client or current.worker) << NUMBER_BITS) + self.new_number())

    def expect(self, receiver: Receiver) -> int:
        """Register the receiver of a new request; return the request's number."""
        number = self.new_number()
        self._receivers[number] = receiver
        return number

    def declare(self, func: FunctionSpec) -> None:
        """Send a function and its options to the node."""
        # Late: a worker whose tasks start no tasks does not need the core's types.
        from aiogpu.client.spec_codec import dump_spec

        func.check_one_machine()
        if len(self._declared) >= DECLARED:
            self._declared.clear()
        spec = dump_spec(func)
        function = func.function
        self.send(
            Declare(func.id, func.spec.name, spec, function.payload, function.modules)
        )
        self._declared.add(func.id)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; return its number.

        Raises:
            SerializationError: the arguments are too large to send.
            MisuseError: the requesting task has ended.
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
        public: int = 0,
    ) -> Loan:
        """Create an actor; return the loan that keeps it alive.

        Args:
            func: its class.
            payload: the constructor's arguments.
            key: its namespace and name, None without a name.
            get_if_exists: if an actor of this name lives, use it instead.
            public: its id, if one was promised; 0 for a new one.
        """
        self._check(func, payload)
        if func.function.actors:
            payload = self.loans.with_actors(payload, func.function.actors)
        namespace, name = key or ("", "")
        with self._requesting:
            self._prepare(func.spec.name)
            if func.id not in self._declared:
                self.declare(func)
            actor = public or self.new_id()
            self.send(Make(actor, func.id, payload, name, namespace, get_if_exists))
        return self.own(actor)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; return the number of the call."""
        with self._requesting:
            self._prepare(method)
            number = self.expect(receiver)
            self.send(Ask(current.task, number, actor, method, payload))
        return number

    def fetch(self, value: int, receiver: Receiver) -> int:
        """Request a value; return the number of the request."""
        with self._requesting:
            self._prepare("a task")
            number = self.expect(receiver)
            self.send(Fetch(current.task, number, value))
        return number

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Look an actor up by its name; return the number of the request."""
        with self._requesting:
            self._prepare(name)
            number = self.expect(receiver)
            self.send(Find(number, name, namespace))
        return number

    def stop(self, actor: int, how: str) -> None:
        """End an actor; `how` is explained at `wire.messages.Stop`."""
        self.send(Stop(actor, how))

    def discard(self, value: int) -> None:
        """Discard a value: cancel the task that produces it."""
        self.send(Discard(value))

    def demand(self, number: int, limit: int) -> None:
        """Set the number of items that a stream may yield in all."""
        if number in self._receivers:
            self.send(ChildDemand(number, limit))

    def withdraw(self, number: int) -> bool:
        """Cancel a request; False if it was answered."""
        if self._receivers.pop(number, None) is None:
            return False
        self.shares.withdraw(number)
        self.send(Withdraw(current.task, number))
        return True

    def take(self, message: Message) -> bool:
        """Pass an answer to its receiver; False if the message is no answer."""
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
            if hasattr(receiver, "receive_report"):  # a map's receiver takes no reports
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
        """Fail all open requests by the error that `why` makes for a task's name."""
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.settle(why(getattr(receiver, "task_name", "it")))

    def _take_stray(self, failed: ChildFailed) -> None:
        """Handle a failure for which no receiver waits."""


def too_large(what: str, payload: bytes) -> SerializationError:
    """Make the error for a payload that is too large for a call."""
    return SerializationError(
        f"{what}: {len(payload)} bytes when pickled; a call carries at most "
        f"{LARGEST_PAYLOAD}. Pass the path of a file, or split it over several calls."
    )
