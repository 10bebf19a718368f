"""Cancelling on Ray: interrupts in its workers, and cancels that do it no harm.

Ray's core ends a process in which a task is cancelled in the moment between its reply
and its completion (seen in 2.60, a failed check "it != submissible_tasks_.end()"): the
core takes in replies in a thread of its own, and lets go of its lock in between. It
does so too where a task is cancelled that was sent a moment ago and whose arguments are
still to come. So cancels are done in that thread (`Cancelling`), when it says that it
has taken up what is cancelled (`Uptake`).

Ray 2.60 also loses an actor's order where a call of a plain method is cancelled that
waits. So these are cancelled past it: their ids come to a socket of the actor's process
(`CancelSender`, `Cancels`), which does not begin them any more, and interrupts the one
that runs. The socket has a name and no file, so that nothing of it is left, whatever
ends the process.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import struct
import threading
import time
from _thread import get_ident, interrupt_main, start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Final

from aiogpu.engines.ray import ray_api as ray
from aiogpu.worker.interrupts import imports

AGAIN: Final = 0.02
"""Seconds between two looks at whether an import has ended."""


LOOK: Final = signal.SIGRTMAX
"""Whose handler looks, in the main thread; nobody really sends it."""


WAKE: Final = signal.SIGURG
"""Sent to the main thread to end what blocks it; a process that forgets about it
ignores it. Ray's workers have SIGINT blocked."""


UNHEARD: Final = 0.25
"""Seconds in which a loop that turns has heard of a cancel."""


WAKES: Final = 50
"""Signals for one interrupt: the main thread may block a moment after the first."""


class Interrupts:
    """See above; one for each process.

    Attributes:
        has_come: whether the running task was interrupted.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._is_heard = False
        self._is_pending = False
        self._depth = 0
        self._wake: Callable[[], object] | None = None
        self._told: socket.socket | None = None
        self._is_forced = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """The block runs a task's code, which an interrupt ends."""
        if not _is_main():
            yield
            return
        if signal.getsignal(signal.SIGINT) != self._on_interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
            signal.signal(WAKE, self._on_wake)
        self._listen()
        self.has_come = self._is_pending = False
        self._is_heard = True
        try:
            yield
        finally:
            self._is_heard = False
            self.forget()

    def _listen(self) -> None:
        """Have a thread of this process told of each signal that Python notes."""
        if self._told is None:
            heard, self._told = socket.socketpair()
            self._told.setblocking(False)
            start_new_thread(self._relay, (heard, get_ident()))
        signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)

    def _relay(self, heard: socket.socket, main: int) -> None:
        while numbers := heard.recv(64):
            if signal.SIGINT not in numbers and LOOK not in numbers:
                continue
            for _ in range(WAKES):
                signal.pthread_kill(main, WAKE)
                is_taken = not self._is_heard or self.has_come or self._is_pending
                if is_taken or signal.SIGINT not in numbers:
                    break
                time.sleep(AGAIN)
            self._insist(main)

    def _insist(self, main: int) -> None:
        """End a coroutine that blocks its loop, which so cannot hear of a cancel."""
        until = time.monotonic() + UNHEARD
        while self._is_pending and self._wake is not None:
            if time.monotonic() > until:
                self._is_forced = True
                signal.pthread_kill(main, WAKE)
                return
            time.sleep(AGAIN)

    def _on_wake(self, _signal: int, frame: FrameType | None) -> None:
        # Without force, it only ends what blocks.
        is_forced, self._is_forced = self._is_forced, False
        if is_forced and not imports(frame) and self.take():
            raise KeyboardInterrupt

    def forget(self) -> None:
        """The code has ended that what was put off would have ended."""
        if _is_main():
            self._is_pending = False

    @contextmanager
    def put_off(self, wake: Callable[[], object] | None = None) -> Iterator[None]:
        """An interrupt that comes in the block is raised at its end.

        Or at the end of the outermost of such blocks, unless it is taken before. Of
        other threads than the main one nothing is put off: nobody interrupts them.

        Args:
            wake: called, by the signal's handler, when one was put off; None leaves
                that to the block around this one.
        """
        if not _is_main():
            yield
            return
        before = self._wake
        self._depth += 1
        self._wake = wake or before
        try:
            yield
        finally:
            self._wake = before
            self._depth -= 1
            if not self._depth and self.take():
                raise KeyboardInterrupt

    def is_due(self) -> bool:
        """Return whether one is raised as soon as the block ends that runs."""
        return self._is_pending and self._depth == 1 and _is_main()

    def take(self) -> bool:
        """Whether one was put off: whoever asks sees to the end of the task's code."""
        if not self._is_pending or not _is_main():
            return False
        self._is_pending = False
        self.has_come = True
        return True

    def interrupt(self, frame: FrameType | None) -> None:
        """End the code of the main thread, which asks: now, or when it may be ended.

        Args:
            frame: what it executes.
        """
        if self._depth:
            self._is_pending = True
            if self._wake is not None:
                self._wake()
        elif imports(frame):
            is_watched, self._is_pending = self._is_pending, True
            if not is_watched:
                signal.signal(LOOK, self._look)
                # `threading` takes a lock for it, which the import may hold.
                start_new_thread(self._watch, ())
        else:
            self._is_pending = False
            self.has_come = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        while self._is_pending:
            time.sleep(AGAIN)
            interrupt_main(LOOK)

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_pending and not self._depth:
            self.interrupt(frame)

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_heard and not self.has_come:
            self.interrupt(frame)


def _is_main() -> bool:
    # `threading.current_thread` would make an object for each of Ray's own threads.
    return get_ident() == threading.main_thread().ident


interrupts: Final = Interrupts()
"""Those of this process."""


ATTEMPTS: Final = 100
"""Questions that are asked until one is not answered before it is asked to the end."""


class Uptake:
    """See above."""

    def __init__(self) -> None:
        self._marker: Any = None

    def __repr__(self) -> str:
        return f"<Uptake {self._marker}>"

    def _asked_for(self) -> Any:
        if self._marker is None:
            self._marker = ray.keep(b"")
        return self._marker

    def then(self, do: Callable[[], object]) -> None:
        """Have it done in Ray's thread, after what was sent before was taken up."""
        for _ in range(ATTEMPTS):
            if self._is_asked(do):
                return
        do()

    def _is_asked(self, do: Callable[[], object]) -> bool:
        """False if it was answered at once, in this thread, and is to be done yet."""
        here, asking = threading.get_ident(), [True]
        was_here = False

        def come(_: object) -> None:
            nonlocal was_here
            if asking and threading.get_ident() == here:
                was_here = True
            else:
                do()

        ray.when_done(self._asked_for(), come)
        asking.clear()
        return not was_here


LOST_AFTER: Final = 1.0
"""Seconds after which what was posted is taken for lost, and others are posted."""


_log: Final = logging.getLogger(__name__)


class Cancelling:
    """See above; one for each event loop, and for whichever threads."""

    def __init__(self) -> None:
        self._uptake = Uptake()
        self._lock = threading.Lock()
        self._asked: list[partial[None]] = []
        self._lost_at = 0.0

    def __repr__(self) -> str:
        return f"<Cancelling {len(self._asked)}>"

    def cancel(self, ref: ray.Ref, *, at_once: bool = False) -> None:
        """Have it cancelled soon; see `ray.cancel`."""
        one = partial(ray.cancel, ref, at_once=at_once)
        with self._lock:
            self._asked.append(one)
        self._post(time.monotonic())

    def _post(self, now: float) -> None:
        """Have done together what was asked for, unless something is on its way."""
        with self._lock:
            if now < self._lost_at or not self._asked:
                return
            asked, self._asked = self._asked, []
            self._lost_at = now + LOST_AFTER
        self._uptake.then(partial(self._do, asked))

    def _do(self, asked: list[partial[None]]) -> None:
        for one in asked:
            if not ray.is_connected():
                return  # to ask would have Ray start a cluster
            try:
                one()
            except Exception:  # noqa: BLE001 - one that fails must not lose the others
                _log.exception("! a cancel was not heard")
        with self._lock:
            self._lost_at = 0.0
        # What was sent since, Ray need not have taken up.
        self._post(time.monotonic())


ID_SIZE: Final = 24
"""Bytes of the id of a call."""


MOST: Final = 1000
"""Ids in one message."""


KEPT: Final = 100_000
"""Ids that are kept of calls that have not come; those that have ended never do."""


INTERRUPT: Final = signal.SIGURG
"""Ray's workers have SIGINT blocked. Whoever does not expect this one ignores it."""


_CREDENTIALS: Final = struct.Struct("3i")
"""Who has sent a message, as the system says: process, user, group."""


def name_of(actor: str) -> str:
    """Under which the process of an actor hears; it stands for no file."""
    return f"\0aiogpu/{actor}"


class Cancels:
    """See above.

    Attributes:
        has_come: whether the call that runs in the main thread was interrupted.
    """

    def __init__(self, actor: str) -> None:
        self.has_come = False
        self._ids: dict[bytes, object] = {}
        self._lock = threading.Lock()
        self._is_heard = False
        self._socket: socket.socket | None = None
        self._glance = select.poll()
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        opened.setblocking(False)
        try:
            opened.bind(name_of(actor))
        except OSError:
            opened.close()  # a process of the same actor has not quite ended
        else:
            self._socket = opened
            self._glance.register(opened, select.POLLIN)

    def __repr__(self) -> str:
        return f"<Cancels {len(self._ids)}>"

    def fileno(self) -> int:
        """Of the socket; -1 if there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def watch(self) -> None:
        """Hear in a thread; what runs in the main thread, this one, is interrupted."""
        if self._socket is not None:
            signal.signal(INTERRUPT, self._on_interrupt)
            here = threading.get_ident()
            threading.Thread(target=self._listen, args=(here,), daemon=True).start()

    def _listen(self, main: int) -> None:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        while True:
            poll.poll()
            if self.take() and self._is_heard:
                signal.pthread_kill(main, INTERRUPT)

    def take(self) -> list[bytes]:
        """Return what has come since the last time."""
        found: list[bytes] = []
        with self._lock:
            while (message := self._received()) is not None:
                found += [
                    message[start : start + ID_SIZE]
                    for start in range(0, len(message), ID_SIZE)
                ]
            self._ids.update(dict.fromkeys(found))
            while len(self._ids) > KEPT:
                del self._ids[next(iter(self._ids))]
        return found

    def _received(self) -> bytes | None:
        """The next message of this user; None if there is none."""
        if self._socket is None:
            return None
        try:
            message, told, _, _ = self._socket.recvmsg(
                ID_SIZE * MOST, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
        except BlockingIOError:
            return None
        for level, kind, data in told:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                user = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1]
                return message if user == os.getuid() else b""
        return b""

    def has(self) -> bool:
        """Return whether the call that is to begin was cancelled."""
        if self._socket is None:
            return False
        with self._lock:
            if not self._ids and not self._glance.poll(0):
                return False
        self.take()
        return bool(self._ids) and self._is_running()

    def _is_running(self) -> bool:
        """Return whether it is the call that runs here; it is no more."""
        return self.forget(bytes.fromhex(ray.task_id()))

    def forget(self, call: bytes) -> bool:
        """Return whether a call was cancelled; it is told once."""
        return self._ids.pop(call, self) is None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """The block runs the code of a call, which its cancel interrupts."""
        self.has_come = False
        self._is_heard = True
        try:
            if self._ids and self._is_running():
                self.has_come = True
                raise KeyboardInterrupt
            yield
        finally:
            self._is_heard = False
            interrupts.forget()

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_heard and self._is_running():
            self.has_come = True
            interrupts.interrupt(frame)


PATIENCE: Final = 5.0
"""Seconds for a process to take what it is told."""


REACHED: Final = 10.0
"""Seconds for a task to begin beside an actor on another machine."""


THREADS: Final = 8
"""So many actors are told at the same time of what one message does not hold, or
elsewhere: one of them may be on a machine that does not answer."""


def tell_here(actor: str, calls: bytes, seconds: float) -> bool:
    """Tell an actor's process that these calls are cancelled, if it is on this machine.

    Raises:
        TimeoutError: it has not taken it in so many seconds.
        BlockingIOError: the same, of none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(seconds)
        try:
            sender.sendto(calls, name_of(actor))
        except ConnectionRefusedError:
            return False
    return True


class CancelSender:
    """What the threads of a process have to tell; see above."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[ray.Ref]] = {}
        self._told: set[tuple[str, str]] = set()
        self._found: dict[str, str] = {}
        self._threads = 0
        self._teller: Any = None

    def __repr__(self) -> str:
        return f"<CancelSender for {len(self._waiting)} actors>"

    def tell(self, actor: str, call: ray.Ref, node: str) -> None:
        """Tell an actor's process that a call is cancelled, now or soon.

        Args:
            actor: its id.
            call: what it makes.
            node: where the process is, empty if that is not known.
        """
        key = actor, node
        with self._lock:
            if key not in self._waiting:
                with suppress(BlockingIOError):
                    if self.reaches(actor, _id_of(call), 0):
                        return
            self._waiting.setdefault(key, []).append(call)
            if self._threads < min(THREADS, len(self._waiting)):
                self._threads += 1
                name = "aiogpu-cancel"
                threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                keys = (key for key in self._waiting if key not in self._told)
                key = next(keys, None)
                if key is None:
                    self._threads -= 1
                    return
                self._told.add(key)
                calls, self._waiting[key] = self._waiting[key], []
            # It hangs, or has gone with the cluster; to Ray that is an exit.
            with suppress(OSError, ray.RayError, RuntimeError, ValueError, SystemExit):
                self._deliver(*key, calls)
            with self._lock:
                self._told.discard(key)
                rest = self._waiting.pop(key)
                if rest:
                    self._waiting[key] = rest

    def _deliver(self, actor: str, node: str, calls: Sequence[ray.Ref]) -> None:
        for start in range(0, len(calls), MOST):
            ids = b"".join(map(_id_of, calls[start : start + MOST]))
            if not self.reaches(actor, ids, PATIENCE):
                self._tell_elsewhere(actor, node, ids)

    def reaches(self, actor: str, ids: bytes, seconds: float) -> bool:
        """Whether its process is on this machine, and was told; see `tell_here`."""
        return tell_here(actor, ids, seconds)

    def _tell_elsewhere(self, actor: str, node: str, ids: bytes) -> None:
        """Where it was found last, or it is known to be; if not there, all at once."""
        here = ray.facts()[0]
        others = [one.id for one in ray.nodes() if one.id != here]
        known = self._found.pop(actor, node)
        likely = [one for one in others if one == known]
        rest = [one for one in others if one != known]
        found = self._told_on(likely, actor, ids) or self._told_on(rest, actor, ids)
        if found:
            self._found[actor] = found
            while len(self._found) > KEPT:
                del self._found[next(iter(self._found))]

    def _told_on(self, nodes: Sequence[str], actor: str, ids: bytes) -> str:
        """On which of these it was told; empty if on none."""
        if self._teller is None:
            # Of no CPUs: it has a place where others have taken all.
            options = {"num_cpus": 0, "max_retries": 0, "name": "aiogpu.cancel"}
            self._teller = ray.function(tell_here, options)
        answers = queue.SimpleQueue[tuple[str, Any]]()
        for node in nodes:
            if not ray.is_connected():
                return ""  # to ask would have Ray start a cluster
            where = ray.Affinity(node, soft=False)
            told = self._teller.options(scheduling_strategy=where)
            ref = told.remote(actor, ids, PATIENCE)
            ray.when_done(ref, partial(_note, answers, node))
        until = time.monotonic() + REACHED
        for _ in nodes:
            with suppress(queue.Empty):
                node, found = answers.get(timeout=max(0, until - time.monotonic()))
                if found is True:
                    return node
        return ""


telling: Final = CancelSender()
"""That of this process."""


def _note(answers: queue.SimpleQueue[tuple[str, Any]], node: str, found: Any) -> None:
    answers.put((node, found))


def _id_of(call: ray.Ref) -> bytes:
    found: bytes = call.task_id().binary()
    return found
