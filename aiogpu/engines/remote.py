"""The engine of a program that has joined a node of another process.

Requests go over a Unix socket, by the same messages as a worker's requests. They are
checked here against the node's resources, so that impossible requests fail at
`.remote()`, as on every engine. The output of the program's tasks is shown as with an
own node: a thread writes it, an answer is delivered after the lines before it, and a
slow terminal slows the tasks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.function_spec import placeholder_func
from aiogpu.client.node_client import ClientActor, NodeClient
from aiogpu.client.references import Loans
from aiogpu.engines.base import NodeOptions, expected_modules
from aiogpu.engines.node_connection import NodeConnection, connect_to
from aiogpu.errors import (
    ActorNameError,
    AiogpuError,
    DeserializationError,
    NodeClosedError,
    NodeDiedError,
    NodeError,
    OptionError,
)
from aiogpu.linux.sockets import keep_pages
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.directories import check_socket, default_socket
from aiogpu.runtime.interrupts import interrupts
from aiogpu.runtime.output import Console, LoggedText, Source
from aiogpu.runtime.zygote.config import arguments, interpreter_flags
from aiogpu.serialization.exceptions import error_of, unpack_failure
from aiogpu.serialization.references import add_actor
from aiogpu.serialization.serializer import load_result
from aiogpu.wire.connection import CLIENT, greeting
from aiogpu.wire.messages import (
    AVAILABLE,
    FIRST_CLIENT,
    HISTORY,
    RESOURCES,
    STATUS,
    TASKS,
    TIMELINE,
    WHY,
    WHY_TASK,
    ChildDemand,
    ChildFailed,
    Close,
    Depart,
    Departed,
    Failed,
    Inquire,
    Join,
    Logged,
    Message,
    Printed,
    ProtocolError,
    Refused,
    Stopping,
    TakeLease,
    Warned,
    Welcome,
    Withdraw,
)
from aiogpu.worker.interrupts import Interrupts

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Outcome
    from aiogpu.core.resources.ledger import Ledger
    from aiogpu.notebook.cells import Cells
    from aiogpu.observe.status import EndedTask, NodeStatus
    from aiogpu.observe.task_list import TaskPage, TaskQuery
    from aiogpu.observe.trace import Span
    from aiogpu.observe.why import StopReport, Why
    from aiogpu.runtime.callers.leases import LeaseReceiver


def join_of(options: NodeOptions) -> Join:
    """Return the message that introduces this program to the node."""
    from aiogpu.version import __version__

    # A program that only looks needs no workers, which would start with these.
    only_looks = options.only_looks
    sys_path = (path for path in sys.path if isinstance(path, str))
    return Join(
        release=__version__,
        name=_name(),
        executable=sys.executable,
        flags=tuple(interpreter_flags()),
        argv=() if only_looks else tuple(arguments()),
        sys_path=() if only_looks else tuple(sys_path),
        directory=_directory(),
        environ={} if only_looks else dict(os.environ),
        preload=tuple(options.preload),
        expected=() if only_looks else expected_modules(options),
        shows=options.log_to_driver,
        only_looks=options.only_looks,
        weight=_weight(),
    )


def _weight() -> float:
    """Return this program's weight, from AIOGPU_WEIGHT; the default is 1.

    Raises:
        OptionError: the value is no number above 0.
    """
    text = os.environ.get("AIOGPU_WEIGHT") or "1"
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise OptionError(
            f"AIOGPU_WEIGHT={text!r} is not a weight; give a number above 0, such as "
            f"2 for twice the share of another program, or leave it out."
        )
    return weight


def _name() -> str:
    """Return a readable name of this program: its script, or its module after -m."""
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    # runpy gives the module's name in `__spec__`; a package's ends in `.__main__`.
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(script) or os.path.basename(sys.executable) or "python"


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


def unreachable(path: str, error: OSError) -> str:
    """Return the message for a node that cannot be reached."""
    return (
        f"no node can be reached at {path}: {error.strerror or error}. Start one by "
        f"`aiogpu start --head`, or leave address out for a node in this program."
    )


PATIENCE: Final = 5.0
"""Seconds to write the last lines at the end."""


class Terminal:
    """Shows the output of the program's tasks, and delays answers until it is written.

    Args:
        loop: the loop that receives messages.
        source: the connection; paused while the terminal is slow.
        take: called with delayed messages.
        cells: the cells of a notebook; None outside notebooks.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: Source,
        take: Callable[[Message], None],
        cells: Cells | None = None,
    ) -> None:
        self._console = Console(loop, is_shown=True)
        self._cells = cells
        self._source = source
        self._take = take
        self._number = 0

    def __repr__(self) -> str:
        return f"<Terminal {self._console.written}/{self._number}>"

    def keeps(self, message: Message) -> bool:
        """Show or delay a message; False if the caller must handle it now."""
        if type(message) is Printed:
            console, stream = self._console, message.stream
            self._number = console.write(
                stream,
                message.text,
                self._source,
                message.worker,
                self._cell_of(message),
            )
            return True
        if type(message) is Logged:
            text = LoggedText(message.label, message.text, message.fields)
            cell = self._cell_of(message)
            self._number = self._console.write(2, text, self._source, cell=cell)
            return True
        if self._number <= self._console.written:
            return False
        self._console.after(self._number, partial(self._take, message))
        return True

    def _cell_of(self, message: Printed | Logged) -> object:
        """Return the cell that has started the task that printed; None if unknown."""
        return None if self._cells is None else self._cells.find(message.child)

    def hold_nothing(self) -> None:
        """Pass delayed messages on, and delay no more messages."""
        self._console.hold_nothing()

    async def close(self) -> None:
        """Wait until all lines are written, for `PATIENCE` seconds at most."""
        self._console.hold_nothing()
        await self._console.drain(PATIENCE)
        self._console.close()


_log: Final = logging.getLogger(__name__)


JOIN_LIMIT: Final = 30.0
"""Seconds to join a node."""


IMPORT_LIMIT: Final = 60.0
"""Additional seconds for each module of `preload`."""


DEPART_LIMIT: Final = 30.0
"""Seconds to wait for the end of a leaving program's tasks."""


class FutureReceiver:
    """Receives the answer to a query of the node.

    Attributes:
        future: gets the answer.
    """

    def __init__(
        self,
        future: asyncio.Future[Any],
        load: Callable[[bytes], Any] | None = None,
    ) -> None:
        """Make the receiver.

        Args:
            future: gets the answer.
            load: unpacks the answer; by default, as a status of the node.
        """
        self.future = future
        self._load = load

    def settle(self, outcome: Outcome) -> None:
        """Unpack the answer; an error of unpacking becomes the outcome."""
        if self.future.done():
            return
        if not isinstance(outcome, bytes):
            self.future.set_exception(error_of(outcome, "the node"))
            return
        load = self._load
        if load is None:
            # Late: a program that only runs tasks does not need it.
            from aiogpu.observe.status_codec import status_codec

            load = status_codec.load
        try:
            answer = load(outcome)
        except ProtocolError as error:
            self.future.set_exception(
                DeserializationError(
                    f"the node's answer cannot be read: {error}. Use the same version "
                    f"of aiogpu in the program and the node."
                )
            )
            return
        self.future.set_result(answer)


class _LeaseRequest:
    """Receives the grant or refusal of a lease.

    Args:
        held: the granted leases, by number.
        receiver: gets the outcome, and later the removal of a granted lease.

    Attributes:
        number: the number of the request.
    """

    def __init__(self, held: dict[int, LeaseReceiver], receiver: LeaseReceiver) -> None:
        self.number = 0
        self._held = held
        self._receiver = receiver

    def settle(self, outcome: Outcome) -> None:
        """Record a granted lease, and pass the outcome on."""
        if isinstance(outcome, bytes):
            self._held[self.number] = self._receiver
        self._receiver.settle(outcome)


class RemoteActors:
    """The actors of the joined node; see `ActorsPort`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
    ) -> ClientActor | asyncio.Future[ClientActor]:
        """Create an actor, or find it by its name; see `ActorsPort.create`.

        If the name is taken, the node refuses the actor, and its calls fail.
        """
        engine = self._engine
        hold = engine.make(func, payload, key, get_if_exists, public)
        made = ClientActor(engine, hold, func)
        # An actor that exists may be of another class, which the answer contains.
        return self.find(key, made) if key is not None and get_if_exists else made

    def find(
        self, key: tuple[str, str], made: ClientActor | None = None
    ) -> asyncio.Future[Any]:
        """Find a living actor by its name, by a query of the node.

        Args:
            key: its namespace and name.
            made: the answer if there is no such actor.
        """
        engine = self._engine
        namespace, name = key
        found: asyncio.Future[ClientActor | None] = engine.loop.create_future()
        engine.find(name, namespace, _ActorLookup(engine, found, made))
        # This program's departure waits for the answer.
        engine.lookups.add(found)
        found.add_done_callback(engine.lookups.discard)
        return found

    def held(self, actor: int, name: str = "actor") -> ClientActor:
        """Return an actor of a received handle; see `ActorsPort.held`."""
        self._engine.check_open()
        hold = self._engine.actor(actor)
        return ClientActor(self._engine, hold, placeholder_func(name))

    def pass_on(self, actor: int, hold: object) -> None:
        """Note that a handle is being pickled; see `ActorsPort.pass_on`."""
        add_actor(actor, hold)

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Set the number of items that a call's stream may yield in all."""
        self._engine.send(ChildDemand(number, limit))

    def cancel(self, _actor: int, number: int) -> None:
        """Cancel a call."""
        self._engine.cancel(number)

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `ActorsPort.stop`."""
        self._engine.stop(actor, how)


def _load_actor(engine: RemoteEngine, payload: bytes) -> ClientActor:
    identity, of_class, interface = load_result(payload)
    func = placeholder_func(of_class, interface)
    return ClientActor(engine, engine.own(identity), func)


class _ActorLookup(FutureReceiver):
    """Receives the answer to a lookup; `made` is the result if there is no actor."""

    def __init__(
        self,
        engine: RemoteEngine,
        future: asyncio.Future[ClientActor | None],
        made: ClientActor | None,
    ) -> None:
        super().__init__(future, partial(_load_actor, engine))
        self._made = made

    def settle(self, outcome: Outcome) -> None:
        """Take the answer: an actor, `ActorNameError` for none, or another error."""
        if isinstance(outcome, Failed):
            outcome = unpack_failure(outcome, "the node")
        if not isinstance(outcome, ActorNameError):
            super().settle(outcome)
        elif not self.future.done():
            self.future.set_result(self._made)


class RemoteEngine(NodeClient):
    """The engine of a joined node; see the module.

    Attributes:
        loop: the loop on which it is used.
        actors: the node's actors; see `Engine.actors`.
        home: the node's id, "" before the program has joined.
        lookups: unanswered lookups of actors by name.
    """

    waits = None
    runs_together = True

    def __init__(
        self, path: str, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(FIRST_CLIENT + int.from_bytes(os.urandom(3), "little"))
        self.loop = loop
        self._leases: dict[int, LeaseReceiver] = {}
        self.actors = RemoteActors(self)
        self._path = path
        self._options = options
        self._line = NodeConnection(loop, self._on_messages, self._on_lost)
        self._page = ControlPage.open(descriptor := ControlPage.create())
        os.close(descriptor)
        self._loans = Loans(
            path="",
            spill="",
            page=self._page,
            interrupts=Interrupts(self._page),
            press=self._line.press,
            owner=self.client,
        )
        self._loans.on_over = self._on_over
        self.lookups: set[asyncio.Future[Any]] = set()
        self._ledger: Ledger | None = None
        self._welcome: asyncio.Future[Welcome] = loop.create_future()
        self._departed = loop.create_future()
        self.home = ""
        self._is_private = (
            False  # the node is inside a program, and only answers queries
        )
        self._is_report_scheduled = False
        self._is_leaving = False
        self._error: NodeError | None = None
        self._terminal: Terminal | None = None
        self._cells: Cells | None = None
        if "IPython" in sys.modules:
            from aiogpu.notebook.cells import Cells

            self._cells = Cells(loop, self.new_number)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._path}>"

    async def open(self) -> None:
        """Join the node; see `Engine.open`.

        Raises:
            NodeDiedError: no node can be reached at the path.
            NodeError: the node has refused, or belongs to another user.
            OptionError: the node does not satisfy the options of `init`.
        """
        interrupts.add(self, self.loop)
        try:
            await self._join()
        except BaseException:
            interrupts.discard(self)
            self._close_cells()
            self._line.close()
            self._release_memory()
            raise

    async def _join(self) -> None:
        try:
            check_socket(self._path)
            greeted = greeting(CLIENT, self.client, os.getpid())
            joining = join_of(self._options)
            limit = JOIN_LIMIT + IMPORT_LIMIT * len(self._options.preload)
            async with asyncio.timeout(limit):
                await self._line.connect(self._path, greeted, joining)
                if not self._options.only_looks:
                    _import_early()
                await self._enter(await self._welcome)
        except TimeoutError:
            raise NodeDiedError(
                f"the node at {self._path} has not answered within {limit:g} s. "
                f"`aiogpu stop --force` ends it, `aiogpu start --head` starts another."
            ) from None
        except ProtocolError as error:
            raise NodeError(
                f"the messages of the node at {self._path} cannot be read: {error}. "
                f"Use the same version of aiogpu in both, or restart the node."
            ) from None
        except OSError as error:
            if isinstance(error, AiogpuError):
                raise
            raise NodeDiedError(unreachable(self._path, error)) from error

    async def _enter(self, welcome: Welcome) -> None:
        from aiogpu.engines.server_info import check_joining_options, unpack_capacity

        ledger, policies = unpack_capacity(welcome.ledger)
        check_joining_options(self._options, ledger, policies, self._path)
        self.home, self._ledger = welcome.node, ledger
        if not welcome.descriptors:
            self._is_private = True
            return
        connected = await connect_to(welcome.descriptors)
        with suppress(OSError):
            descriptor = os.open(welcome.page, os.O_RDWR | os.O_CLOEXEC)
            self._page.close()
            self._page = ControlPage.open(descriptor)
            os.close(descriptor)
        self._loans.connect(connected, welcome.spill, self._page)

    @property
    def node_socket(self) -> str:
        """The path of the socket of the joined node."""
        return self._path

    @property
    def loans(self) -> Loans:
        """The loans of this process."""
        return self._loans

    def send(self, message: Message) -> None:
        """Send a message to the node; dropped if the node has gone."""
        if self._loans.unnamed:
            self._loans.name(message)
        self._line.send(message)

    @property
    def has_gone(self) -> bool:
        """True if the node has ended or has disconnected this program."""
        return self._error is not None

    def _prepare(self, _name: str) -> None:
        self.check_open()

    def check_open(self) -> None:
        """Raise `NodeError` if the node has gone, or the program is leaving it."""
        if self._error is not None:
            raise _again(self._error)
        if self._ledger is None or self._is_leaving:
            raise NodeClosedError("this node is not open.")

    def _on_messages(self, messages: list[Message]) -> None:
        for message in self._loans.take_in(messages):
            if self._terminal is None or not self._terminal.keeps(message):
                self._take(message)

    def _take(self, message: Message) -> None:
        if not self.take(message):
            self._on_other(message)

    def _take_stray(self, failed: ChildFailed) -> None:
        if not failed.child and not self._welcome.done():
            # The node has refused the program.
            self._welcome.set_exception(unpack_failure(Failed(*failed), "init()"))
        receiver = self._leases.pop(failed.child, None)
        if receiver is not None:  # a granted lease was removed
            receiver.settle(Failed(*failed))

    def _on_other(self, message: Message) -> None:
        match message:
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case Refused(reason):
                self._end(NodeError(f"the node at {self._path} refuses: {reason}."))
            case Close():
                self._end(
                    NodeClosedError(
                        f"the node at {self._path} was stopped, and all its tasks have "
                        f"ended.{self._how_to_join('When a node runs there again,')}"
                    )
                )
            case Printed() | Logged() if self._terminal is None:
                self._terminal = Terminal(
                    self.loop, self._line, self._take, self._cells
                )
                self._terminal.keeps(message)
            case Warned(text):
                _log.warning("! %s", text)
            case Departed():
                if not self._departed.done():
                    self._departed.set_result(None)

    def _on_over(self) -> None:
        """Schedule a report of ended loans; called in any thread."""
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._report_ended_loans)

    def _report_ended_loans(self) -> None:
        self._is_report_scheduled = False
        if not self._line.is_open:
            return
        try:
            returned = self._loans.take_report()
        except (NodeClosedError, ConnectionResetError):
            return  # the node has gone, which the other connection reports next
        if returned is not None:
            self.send(returned)

    def _on_lost(self, error: Exception | None) -> None:
        why = f": {error}" if error is not None else ""
        restart = "Restart it by `aiogpu start --head`; then"
        self._end(
            NodeDiedError(
                f"the node at {self._path} has ended{why}. All its tasks have ended "
                f"with it.{self._how_to_join(restart)}"
            )
        )

    def _how_to_join(self, before: str) -> str:
        """Return a sentence for errors; "" for a node that cannot be joined."""
        if self._is_private:
            return ""
        address = "auto" if self._path == default_socket() else self._path
        return f" {before} `await aiogpu.init(address={address!r})` joins it."

    def _end(self, error: NodeError) -> None:
        """End the connection, and fail all open requests."""
        if self._error is not None:
            return
        self._error = error
        self._declared.clear()
        self._close_cells()
        self._line.close()
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()
        if not self._departed.done():
            self._departed.set_result(None)
        if self._terminal is not None:
            self._terminal.hold_nothing()
        self._settle_all(lambda _: _again(error))
        leases, self._leases = self._leases, {}
        for receiver in leases.values():
            receiver.settle(_again(error))

    def _close_cells(self) -> None:
        if self._cells is not None:
            self._cells.close()

    def announce_stop(self) -> None:
        """Inform this program's tasks that it stops; see `Engine.announce_stop`."""
        if self._line.is_open and self._ledger is not None:
            self.send(Stopping())

    async def close(self) -> None:
        """Stop this program's tasks, wait for their end, and leave the node."""
        try:
            await self._leave()
        finally:
            interrupts.discard(self)

    async def _leave(self) -> None:
        if self._line.is_open and self._ledger is not None:
            until = self.loop.time() + DEPART_LIMIT
            await self._finish_lookups(DEPART_LIMIT)
            self.send(Depart())
            self._is_leaving = (
                True  # answers about tasks that are being stopped may still arrive
            )
            self._settle_all(
                lambda name: NodeClosedError(
                    f"the node was shut down before {name} had ended."
                )
            )
            remaining = max(0.0, until - self.loop.time())
            await asyncio.wait([self._departed], timeout=remaining)
        self._end(NodeClosedError("this node is shut down; join one by aiogpu.init()."))
        if self._terminal is not None:
            await self._terminal.close()
        self._release_memory()

    async def _finish_lookups(self, limit: float) -> None:
        """Wait until the node has answered all lookups.

        For example, the kill of an actor by its name can be sent only then.
        """
        if not self.lookups:
            return
        answered = asyncio.gather(*self.lookups, return_exceptions=True)
        # `_departed` is also set when the node has gone, and by `force_close`.
        first, either = asyncio.FIRST_COMPLETED, [answered, self._departed]
        await asyncio.wait(either, timeout=limit, return_when=first)

    def _release_memory(self) -> None:
        self._loans.close()
        self._page.close()

    def force_close(self) -> None:
        """Stop waiting for the end of tasks; see `Engine.force_close`."""
        if not self._departed.done():
            self._departed.set_result(None)

    def close_now(self) -> None:
        """Close at once, without an event loop; the node notices."""
        interrupts.discard(self)
        self._close_cells()
        self.after_fork()

    def after_fork(self) -> None:
        """Close the sockets in a fork: the connection belongs to the parent."""
        self._line.leave()
        self._loans.leave()

    # Requests to the node.

    def promise_actor(self) -> int:
        """Return the id of an actor; see `Engine.promise_actor`."""
        return self.new_id()

    def declare(self, func: FunctionSpec) -> None:
        """Check a function once for all its calls, and declare it to the node.

        Raises:
            InfeasibleError: the node can never meet the function's request.
            NodeError: the node has gone.
        """
        from aiogpu.engines.base import check_func

        self.check_open()
        assert self._ledger is not None, self
        check_func(func, self._ledger)
        super().declare(func)

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Request a lease; see `Engine.take_lease`."""
        self._prepare(func.spec.name)
        if func.id not in self._declared:
            self.declare(func)
        request = _LeaseRequest(self._leases, receiver)
        request.number = self.expect(request)
        self.send(TakeLease(request.number, func.id))
        return request.number

    def cancel(self, task: int) -> None:
        """Stop a task, or return a lease; see `Engine.cancel`."""
        if not self.withdraw(task) and self._leases.pop(task, None) is not None:
            self.send(Withdraw(0, task))

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        answer: dict[str, float] = await self._inquire(RESOURCES)
        return answer

    async def available(self) -> dict[str, float]:
        """Return the free amount of each resource."""
        answer: dict[str, float] = await self._inquire(AVAILABLE)
        return answer

    async def status(self) -> NodeStatus:
        """Return the held resources, waiting tasks and reasons, of all programs."""
        answer: NodeStatus = await self._inquire(STATUS)
        return answer

    async def why(self, task: int) -> Why | None:
        """Return why a task of this program waits; see `Engine.why`."""
        answer: Why | None = await self._inquire(WHY, task)
        return answer

    async def timeline(self, most: int = 0) -> list[Span]:
        """Return the times and places of executed tasks; see `History.spans`."""
        from aiogpu.observe.trace import Span

        return [Span(*fields) for fields in await self._inquire(TIMELINE, most)]

    async def ended(self, actor: int = 0) -> tuple[EndedTask, ...]:
        """Return the last ended tasks of the node, latest first.

        Args:
            actor: number of an actor, for its failed calls: the last of each method,
                with the traceback. 0 for tasks.
        """
        return tuple(await self._inquire(HISTORY, actor))

    async def list_tasks(self, query: TaskQuery) -> TaskPage:
        """Return a page of a list of the tasks of all programs."""
        from aiogpu.observe.status_codec import status_codec

        packed = status_codec.dump(query)
        page: TaskPage = await self._inquire(TASKS, query=packed)
        return page

    async def stop_task(self, what: str, number: int) -> tuple[str, Why | None]:
        """Cancel a task, kill an actor or end a lease of any program.

        Args:
            what: `CANCEL`, `KILL` or `END_LEASE`.
            number: its number on the node.

        Returns:
            Its kind: "task", "actor", "lease", "placement", "stopping", or "" if it has
                ended; and its state before. What is of another kind goes on.
        """
        answer: tuple[str, Why | None] = await self._inquire(what, number)
        return answer

    async def stop_named(self, what: str, name: str) -> StopReport:
        """Stop the task or actor of any program with a name, or all such tasks.

        Args:
            what: `CANCEL_NAMED`, `CANCEL_ALL` or `KILL_NAMED`.
            name: the name.
        """
        answer: StopReport = await self._inquire(what, name=name)
        return answer

    async def why_task(self, number: int) -> Why | None:
        """Return why any program's task waits; see `Engine.why_task`."""
        answer: Why | None = await self._inquire(WHY_TASK, number)
        return answer

    async def _inquire(
        self, what: str, number: int = 0, name: str = "", query: bytes = b""
    ) -> Any:
        self.check_open()
        receiver = FutureReceiver(self.loop.create_future())
        self.send(Inquire(self.expect(receiver), what, number, name, query))
        return await receiver.future


def _again(error: NodeError) -> NodeError:
    """Copy an error for another waiter, so that each has its own traceback."""
    return type(error)(*error.args)


def _import_early() -> None:
    """Import modules that a first call needs, while the node starts a zygote."""
    keep_pages()
    import aiogpu.core.resources.placement_group
    import aiogpu.engines.server_info
    import aiogpu.serialization.pickler  # noqa: F401
