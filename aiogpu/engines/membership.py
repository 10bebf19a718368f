"""This program's membership in a node of another process: from greeting to parting.

Who waits for an answer is known here by a number, and told what has come for it. What
its tasks print is shown as in a program with a node of its own (`Terminal`): a thread
writes, an answer is told when the lines before it are out, and a terminal that is slow
slows the tasks. `NodeConnection` is not a transport of asyncio's: what was said must be
on its way, and the answer read, where plain code has to wait for the node, as for room
on its other socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.node_client import NodeClient
from aiogpu.client.references import Loans
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import (
    AiogpuError,
    NodeClosedError,
    NodeDiedError,
    NodeError,
    OptionError,
    ProtocolError,
)
from aiogpu.linux.sockets import check_server, keep_pages
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.directories import check_meeting, default_socket
from aiogpu.runtime.output.console import Console, Source
from aiogpu.runtime.zygote.config import interpreter_flags
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import CLIENT, Connection, greeting
from aiogpu.wire.messages import (
    FIRST_CLIENT,
    ChildFailed,
    Close,
    Depart,
    Departed,
    Failed,
    Join,
    Message,
    Printed,
    Refused,
    Warned,
    Welcome,
)
from aiogpu.worker.interrupts import Interrupts

if TYPE_CHECKING:
    from aiogpu.core.resources.ledger import Ledger


CHUNK: Final = 1 << 18


AT_ONCE: Final = 1 << 14
"""Bytes of what is said in one turn that are sent in the midst of it, so that the node
begins with them while the program goes on."""


FIRST_PAUSE: Final = 1e-3


LONGEST_PAUSE: Final = 0.05
"""Seconds until a node is tried again whose queue of connections is full."""


async def connect_to(path: str) -> socket.socket:
    """A non-blocking socket, connected to a node of this user.

    Where the node's queue of connections is full, it tries again until there is room:
    the caller sets a limit of time.

    Raises:
        OSError: nobody listens there.
        NodeError: another user does; nothing was sent.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        pause = FIRST_PAUSE
        while True:
            try:
                connected.connect(path)
                break
            except BlockingIOError:
                # EAGAIN, see connect(2). No event tells when there is room.
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        check_server(connected, path)
    except BaseException:
        connected.close()
        raise
    return connected


class NodeConnection:
    """See above.

    Attributes:
        on_messages: told what has come.
        on_lost: told that the node has gone, and why if that is known.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.on_messages: Callable[[list[Message]], None]
        self.on_lost: Callable[[Exception | None], None]
        self._loop = loop
        self._connection = Connection(CLIENT)
        self._socket: socket.socket | None = None
        self._unsent: list[bytes] = []
        self._size = 0
        self._rest: memoryview | None = None
        self._is_flushing = False
        self._late: list[Message] = []

    def __repr__(self) -> str:
        return f"<NodeConnection {'open' if self.is_open else 'closed'}>"

    @property
    def is_open(self) -> bool:
        """True if the node is there, as far as is known."""
        return self._socket is not None

    async def connect(self, path: str, greeting: bytes, first: Message) -> None:
        """Connect and greet; see `connect_to` for how long that may take.

        Args:
            path: of the node's socket.
            greeting: see `wire.connection.greeting`.
            first: what is said next, before what was said until now.

        Raises:
            OSError: nobody listens there.
            NodeError: another user does; nothing was sent.
        """
        connected = await connect_to(path)
        try:
            connected.send(greeting)
        except BaseException:
            connected.close()
            raise
        self._socket = connected
        self._loop.add_reader(connected.fileno(), self._read)
        self._flush_soon()
        # Not in a turn to come: the node waits for it, and this loop may be held up.
        self._write(encode(first))

    def send(self, message: Message) -> None:
        """Say something: at once, and what is said later in this turn together.

        Raises:
            SerializationError: it is too long.
        """
        frame = encode(message)
        if self._is_flushing or self._rest is not None or self._socket is None:
            self._unsent.append(frame)
            self._size += len(frame)
            if self._size >= AT_ONCE and self._socket is not None:
                self._send_unsent()
            return
        self._flush_soon()
        self._write(frame)

    def _flush_soon(self) -> None:
        self._is_flushing = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        self._send_unsent()

    def _send_unsent(self) -> None:
        """Send what is to be said; what waits for room goes before it."""
        if self._unsent and self._rest is None:
            unsent, self._unsent, self._size = self._unsent, [], 0
            self._write(b"".join(unsent))

    def _write(self, data: bytes) -> None:
        connected = self._socket
        if connected is None:
            return
        sent = _send(connected, data)
        if sent < len(data):
            # Never copied again, however many times it takes.
            self._rest = memoryview(data)[sent:]
            self._loop.add_writer(connected.fileno(), self._go_on)

    def _go_on(self) -> None:
        """There is room for more of what was not sent."""
        connected, rest = self._socket, self._rest
        assert connected is not None, self
        assert rest is not None, self
        sent = _send(connected, rest)
        if sent < len(rest):
            self._rest = rest[sent:]
            return
        self._rest = None
        self._loop.remove_writer(connected.fileno())
        self._send_unsent()

    def _read(self) -> None:
        try:
            messages = self._receive()
        except ProtocolError as error:
            self._lose(error)
            return
        self._tell_late()
        if messages is None:
            self._lose(None)
        elif messages:
            self.on_messages(messages)

    def _receive(self) -> list[Message] | None:
        """Return what has come; None where the node has gone."""
        assert self._socket is not None, self
        size = max(CHUNK, self._connection.missing)
        try:
            data = self._socket.recv(min(size, 4 * CHUNK))
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._connection.receive(data) if data else None

    def _lose(self, error: Exception | None) -> None:
        self.close()
        self.on_lost(error)

    def press(self) -> None:
        """Send and read what can be, while the loop waits in plain code for the node.

        It hears nothing from who reads nothing.
        """
        if self._socket is None:
            return
        self._push()
        try:
            messages = self._receive()
        except ProtocolError as error:
            self._lose(error)
            return
        # Where the node has gone, the loop finds that out and tells everybody.
        self._tell_later(messages or [])

    def _push(self) -> None:
        if self._rest is not None:
            self._go_on()
        else:
            self._send_unsent()

    def _tell_later(self, messages: list[Message]) -> None:
        if messages and not self._late:
            self._loop.call_soon(self._tell_late)
        self._late += messages

    def _tell_late(self) -> None:
        late, self._late = self._late, []
        if late:
            self.on_messages(late)

    def pause(self) -> None:
        """Read no more for now; the node sees it, and tells no more."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        """Read again."""
        if self._socket is not None:
            self._loop.add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Hang up; what was not sent is not sent any more."""
        connected, self._socket = self._socket, None
        if connected is None:
            return
        self._loop.remove_reader(connected.fileno())
        self._loop.remove_writer(connected.fileno())
        connected.close()

    def leave(self) -> None:
        """This process is a fork of the client: it must not speak for it."""
        connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()


def _send(connected: socket.socket, data: bytes | memoryview) -> int:
    """Send what there is room for now; gives how much."""
    try:
        return connected.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)  # what the node said last may still be read, and then its end


def join_of(options: NodeOptions) -> Join:
    """What the node is told of this program, by which its tasks' workers begin."""
    from aiogpu import __version__

    return Join(
        release=__version__,
        name=_name(),
        executable=sys.executable,
        flags=tuple(interpreter_flags()),
        sys_path=tuple(path for path in sys.path if isinstance(path, str)),
        directory=_directory(),
        environ=dict(os.environ),
        preload=tuple(options.preload),
        shows=options.log_to_driver,
        only_looks=options.only_looks,
        weight=_weight(),
    )


def _weight() -> float:
    """What this program gets where another gets 1, by the variable AIOGPU_WEIGHT.

    Raises:
        OptionError: it is no number above 0.
    """
    given = os.environ.get("AIOGPU_WEIGHT") or "1"
    try:
        weight = float(given)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise OptionError(
            f"AIOGPU_WEIGHT={given!r} is no weight; give a number above 0, such as 2 "
            f"for twice what another program gets, or leave it out."
        )
    return weight


def _name() -> str:
    """How people know this program."""
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    return os.path.basename(script) or os.path.basename(sys.executable) or "python"


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


def unreachable(path: str, error: OSError) -> str:
    """The words for a node that cannot be reached."""
    return (
        f"no node can be reached at {path}: {error.strerror or error}. Start one by "
        f"`aiogpu start --head`, or leave address out for one of the program's own."
    )


PATIENCE: Final = 5.0
"""Seconds that the last lines get to be written in."""


class Terminal:
    """See above.

    Args:
        loop: on which messages come.
        source: the connection; made to wait while the terminal does.
        take: is given what was held back.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: Source,
        take: Callable[[Message], None],
    ) -> None:
        self._console = Console(loop, is_shown=True)
        self._source = source
        self._take = take
        self._number = 0

    def __repr__(self) -> str:
        return f"<Terminal {self._console.written}/{self._number}>"

    def keeps(self, message: Message) -> bool:
        """Return whether it takes a message: to show it, or to pass it on later."""
        if type(message) is Printed:
            console, stream = self._console, message.stream
            self._number = console.write(
                stream, message.text, self._source, message.worker
            )
            return True
        if self._number <= self._console.written:
            return False
        self._console.after(self._number, partial(self._take, message))
        return True

    def hold_nothing(self) -> None:
        """Pass on what was held back, and hold back nothing more."""
        self._console.hold_nothing()

    async def close(self) -> None:
        """Wait until all lines are out, or for `PATIENCE` seconds."""
        self._console.hold_nothing()
        await self._console.drain(PATIENCE)
        self._console.close()


_log: Final = logging.getLogger(__name__)


JOIN_LIMIT: Final = 30.0
"""Seconds in which a node lets a program join."""


IMPORT_LIMIT: Final = 60.0
"""Seconds that each module gets which the program wants preloaded."""


DEPART_LIMIT: Final = 30.0
"""Seconds in which what a program leaves has stopped, or is left to the node."""


class Membership(NodeClient):
    """See above.

    Attributes:
        loop: on which it is used.
        home: the node's id, "" before it has let this program in.
        lookups: names that the node has been asked for and has yet to answer.
    """

    def __init__(
        self, path: str, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(FIRST_CLIENT + int.from_bytes(os.urandom(3), "little"))
        self.loop = loop
        self._path = path
        self._options = options
        self._line = NodeConnection(loop)
        self._line.on_messages = self._on_messages
        self._line.on_lost = self._on_lost
        self._page = ControlPage.open(descriptor := ControlPage.create())
        os.close(descriptor)
        self._loans = Loans("", "", self._page, Interrupts(self._page), self.client)
        self._loans.on_over = self._on_over
        self._loans.press = self._line.press
        self.lookups: set[asyncio.Future[Any]] = set()
        self._ledger: Ledger | None = None
        self._welcome: asyncio.Future[Welcome] = loop.create_future()
        self._departed = loop.create_future()
        self.home = ""
        self._is_telling = False
        self._is_leaving = False
        self._error: NodeError | None = None
        self._terminal: Terminal | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._path}>"

    async def open(self) -> None:
        """Join the node; see `Engine.open`.

        Raises:
            NodeDiedError: no node can be reached there.
            NodeError: it has refused, or is not this user's.
            OptionError: it does not have what `init` was asked for.
        """
        try:
            await self._join()
        except BaseException:
            self._line.close()
            self._move_out()
            raise

    async def _join(self) -> None:
        try:
            check_meeting(self._path)
            greeted = greeting(CLIENT, self.client, os.getpid())
            joining = join_of(self._options)
            limit = JOIN_LIMIT + IMPORT_LIMIT * len(self._options.preload)
            async with asyncio.timeout(limit):
                await self._line.connect(self._path, greeted, joining)
                if not self._options.only_looks:
                    _import_early()
                await self._move_in(await self._welcome)
        except TimeoutError:
            raise NodeDiedError(
                f"the node at {self._path} has not answered within {limit:g} s. "
                f"`aiogpu stop --force` ends it, `aiogpu start --head` starts another."
            ) from None
        except ProtocolError as error:
            raise NodeError(
                f"what the node at {self._path} says cannot be understood: {error}. "
                f"Use the same version of aiogpu in both, or start the node anew."
            ) from None
        except OSError as error:
            if isinstance(error, AiogpuError):
                raise
            raise NodeDiedError(unreachable(self._path, error)) from error

    async def _move_in(self, welcome: Welcome) -> None:
        from aiogpu.engines.server_info import check_joining_options, unpack_capacity

        ledger, policies = unpack_capacity(welcome.ledger)
        check_joining_options(self._options, ledger, policies, self._path)
        passage = await connect_to(welcome.descriptors)
        self.home, self._ledger = welcome.node, ledger
        with suppress(OSError):
            descriptor = os.open(welcome.page, os.O_RDWR | os.O_CLOEXEC)
            self._page.close()
            self._page = ControlPage.open(descriptor)
            os.close(descriptor)
        self._loans.move_in(passage, welcome.spill, self._page)

    @property
    def _address(self) -> str:
        """By which `init` joins what runs at the same place."""
        return "auto" if self._path == default_socket() else self._path

    @property
    def loans(self) -> Loans:
        """What was lent to this process."""
        return self._loans

    def send(self, message: Message) -> None:
        """Say something to the node; nothing, where it has gone."""
        if self._loans.unnamed:
            self._loans.name(message)
        self._line.send(message)

    @property
    def has_gone(self) -> bool:
        """True if the node has ended, or has cut this program off."""
        return self._error is not None

    def _prepare(self, _name: str) -> None:
        self.check_open()

    def check_open(self) -> None:
        """Raise `NodeError` where the node has gone, or is being left."""
        if self._error is not None:
            raise _again(self._error)
        if self._ledger is None or self._is_leaving:
            raise NodeClosedError("this node is not open.")

    def _on_messages(self, messages: list[Message]) -> None:
        for message in self._loans.take_in(messages):
            if self._terminal is not None and self._terminal.keeps(message):
                continue
            if not self.take(message):
                self._on_other(message)

    def _take(self, message: Message) -> None:
        if not self.take(message):
            self._on_other(message)

    def _take_stray(self, failed: ChildFailed) -> None:
        if not failed.child and not self._welcome.done():
            # The program may not begin.
            self._welcome.set_exception(unpack_failure(Failed(*failed), "init()"))

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
                        f"the node at {self._path} was stopped, and what ran on it has "
                        f"ended. When a node runs there again, `await aiogpu.init("
                        f"address={self._address!r})` joins it."
                    )
                )
            case Printed() if self._terminal is None:
                self._terminal = Terminal(self.loop, self._line, self._take)
                self._terminal.keeps(message)
            case Warned(text):
                _log.warning("! %s", text)
            case Departed():
                if not self._departed.done():
                    self._departed.set_result(None)

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
        try:
            returned = self._loans.tell()
        except (NodeClosedError, ConnectionResetError):
            return  # it has gone, and the other connection tells of it next
        if returned is not None:
            self.send(returned)

    def _on_lost(self, error: Exception | None) -> None:
        why = f": {error}" if error is not None else ""
        self._end(
            NodeDiedError(
                f"the node at {self._path} has ended{why}. What ran on it has ended "
                f"with it. Start it anew by `aiogpu start --head`; then `await "
                f"aiogpu.init(address={self._address!r})` joins it."
            )
        )

    def _end(self, error: NodeError) -> None:
        """Nothing more comes from the node."""
        if self._error is not None:
            return
        self._error = error
        self._line.close()
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()
        if not self._departed.done():
            self._departed.set_result(None)
        if self._terminal is not None:
            self._terminal.hold_nothing()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.fail(_again(error))

    async def close(self) -> None:
        """Stop what is this program's, wait for that, and leave."""
        if self._line.is_open and self._ledger is not None:
            until = self.loop.time() + DEPART_LIMIT
            await self._finish_lookups(DEPART_LIMIT)
            self.send(Depart())
            self._is_leaving = True  # it may answer still of what it is about to end
            receivers, self._receivers = self._receivers, {}
            for receiver in receivers.values():
                name = getattr(receiver, "task_name", "it")
                receiver.fail(
                    NodeClosedError(f"the node was shut down before {name} had ended.")
                )
            left = max(0.0, until - self.loop.time())
            await asyncio.wait([self._departed], timeout=left)
        self._end(NodeClosedError("this node is shut down; join one by aiogpu.init()."))
        if self._terminal is not None:
            await self._terminal.close()
        self._move_out()

    async def _finish_lookups(self, limit: float) -> None:
        """Wait until the node has answered them, and what waits for that was sent.

        The kill of an actor that is looked up by its name can be sent only then.
        """
        if not self.lookups:
            return
        answered = asyncio.gather(*self.lookups, return_exceptions=True)
        # `_departed` is also done where the node has gone, and by `hasten`.
        first, either = asyncio.FIRST_COMPLETED, [answered, self._departed]
        await asyncio.wait(either, timeout=limit, return_when=first)

    def _move_out(self) -> None:
        self._loans.close()
        self._page.close()

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
        self._loans.leave()


def _again(error: NodeError) -> NodeError:
    """The same for one more who hears of it, with a traceback of his own."""
    return type(error)(*error.args)


def _import_early() -> None:
    """Import what a first call needs, while the node starts a zygote for it."""
    keep_pages()
    import aiogpu.engines.admission
    import aiogpu.engines.server_info
    import aiogpu.serialization.pickler  # noqa: F401
