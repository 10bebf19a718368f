"""The event loop that has the node, as other threads reach it.

A `Portal` runs functions and coroutines on the loop of another thread and waits for
their results, so only the loop's thread touches the objects of a node. `portal_for`
finds the portal for the calling code, or starts a loop in a background thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import shutil
import sys
import threading
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakSet

from aiogpu.api.results.handle import Handle, sessions
from aiogpu.api.run import new_runner
from aiogpu.api.session import refuse_in_worker
from aiogpu.client.current import is_in_task, is_loop_running, proxy_maker
from aiogpu.errors import MisuseError, NodeError, NoLoopError
from aiogpu.serialization.diagnostics import line_of_caller, waiting_line

P = ParamSpec("P")
T = TypeVar("T")


CHECK_EVERY: Final = 1.0
"""Seconds between a waiting thread's checks that the loop is still open."""


proxies: Final[dict[type, Callable[[Portal, Any], Any]]] = {}
"""Makes the proxy of an object of the loop, by class; filled by later modules."""


class Portal:
    """Runs calls on the event loop of another thread, in the order of arrival.

    Attributes:
        loop: the event loop.
        thread: the id of the thread that runs the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self.thread = thread
        self._pid = os.getpid()
        self._posted: deque[Callable[[], object]] = deque()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.loop!r}>"

    @property
    def is_here(self) -> bool:
        """True in the loop's own thread, as in a callback of a handle."""
        return get_ident() == self.thread

    @property
    def is_usable(self) -> bool:
        """True if the loop is open and belongs to this process."""
        return self._pid == os.getpid() and not self.loop.is_closed()

    def check(self) -> None:
        """Raise `NodeError` if the loop is closed, or this process is a fork."""
        if self._pid != os.getpid():
            raise NodeError(
                f"this node belongs to process {self._pid}, and process {os.getpid()} "
                f"is a fork of it. Open a node in this process by aiogpu.sync.init()."
            )
        if self.loop.is_closed():
            raise NodeError("this node is shut down; open one by aiogpu.sync.init().")

    def post(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon; the function must not raise.

        Raises:
            NodeError: the loop is closed, or this process is a fork.
        """
        self.check()
        self._posted.append(function)
        try:
            self.loop.call_soon_threadsafe(self._catch_up)
        except RuntimeError:  # the loop was closed meanwhile
            self.check()
            raise

    def _catch_up(self) -> None:
        """Call the functions that were posted so far, in order."""
        for _ in range(len(self._posted)):
            if self._posted:  # a function may have caught up
                self._posted.popleft()()

    def call(self, function: Callable[..., T], /, *args: Any, **named: Any) -> T:
        """Call a function on the loop; return its result or raise its error.

        Raises:
            NodeError: the loop is closed, or this process is a fork.
        """
        if self.is_here:
            self._catch_up()  # a callback may use the handle of a posted call
            return function(*args, **named)
        ended = allocate_lock()
        ended.acquire()
        results: list[T] = []
        errors: list[BaseException] = []
        line = line_of_caller()

        def run() -> None:
            before = waiting_line.set(line)
            try:
                results.append(function(*args, **named))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                errors.append(error)
            finally:
                waiting_line.reset(before)
                ended.release()

        self.post(run)
        while not ended.acquire(timeout=CHECK_EVERY):
            self.check()
        if not errors:
            return results[0]
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback refers to this frame

    def run(self, what: str, begin: Callable[[], Awaitable[T]]) -> T:
        """Await something on the loop; return its result or raise its error.

        Ctrl-C in the calling thread cancels the wait on the loop.

        Args:
            what: the call, for the message.
            begin: called on the loop; returns an awaitable.

        Raises:
            MisuseError: called in the loop's own thread, which would block itself.
            NodeError: the loop is closed, or this process is a fork.
        """
        if self.is_here:
            raise blocks_loop(what)
        self.check()

        async def wait() -> T:
            return await begin()

        ended = asyncio.run_coroutine_threadsafe(wait(), self.loop)
        try:
            while not concurrent.futures.wait([ended], CHECK_EVERY).done:
                self.check()
            return ended.result()
        except BaseException:
            ended.cancel()
            raise
        finally:
            del ended  # the error's traceback refers to this frame

    def fetch(self, what: str, begin: Callable[[], Awaitable[T]]) -> T:
        """`run`, for a user's value: handles and actors in it arrive as proxies."""
        line = line_of_caller()

        async def get() -> T:
            # In the context of this asyncio task.
            proxy_maker.set(self)
            waiting_line.set(line)
            return await begin()

        return self.run(what, get)

    def wrap(self, target: Any) -> Any:
        """Return the proxy of an object, or a tuple of proxies; else the object."""
        for kind, proxy_of in proxies.items():
            if isinstance(target, kind):
                return proxy_of(self, target)
        if isinstance(target, tuple) and target and isinstance(target[0], Handle):
            return tuple(self.wrap(handle) for handle in target)
        return target

    def enter(self, what: str, manager: AbstractAsyncContextManager[object]) -> None:
        """Enter a context manager on the loop; leave it if that fails.

        Python does not call `__exit__` after a failure, such as a Ctrl-C that came when
        the loop had entered. Raises like `run`.
        """
        try:
            self.run(what, manager.__aenter__)
        except BaseException as error:
            self.leave(what, manager, error)
            raise

    def leave(
        self, what: str, manager: AbstractAsyncContextManager[object], error: Any
    ) -> None:
        """Leave a context manager on the loop, with the error of its block or None.

        If the loop is closed, its node holds nothing any more. Raises like `run`.
        """
        if self.is_usable:
            kind = None if error is None else type(error)
            self.run(what, lambda: manager.__aexit__(kind, error, None))


class LoopThread(Portal):
    """An event loop in a background thread, for a program without an event loop.

    The thread is a daemon, so that a program can end without closing the node; an exit
    handler closes it.

    Attributes:
        opener: the id of the thread that started the loop.
    """

    def __init__(self) -> None:
        self.opener = get_ident()
        started: concurrent.futures.Future[asyncio.AbstractEventLoop]
        started = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._serve, args=(started,), name="aiogpu-loop", daemon=True
        )
        self._thread.start()
        super().__init__(started.result(), self._thread.ident or 0)
        atexit.register(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Close the loop, and let Ctrl-C end the program as it does without a loop.

        After an unhandled KeyboardInterrupt Python ends by SIGINT, so that a shell
        script stops too. Python clears its flag for that whenever it compiles and runs
        a string of code (CPython's `run_eval_code_obj`), as a named tuple does. So the
        modules with named tuples that closing a node needs are imported before: see
        `_IMPORTED_TO_CLOSE`.
        """
        try:
            _end_executors()
        finally:  # Ctrl-C ends the wait, and the calls
            self.end()

    def _serve(
        self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]
    ) -> None:
        async def run_until_closed() -> None:
            self._is_ending = asyncio.Event()
            started.set_result(asyncio.get_running_loop())
            await self._is_ending.wait()

        try:
            with new_runner() as runner:
                runner.run(run_until_closed())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    def end(self) -> None:
        """Close the loop and its node, if any; idempotent."""
        atexit.unregister(self._end_at_exit)
        if self._pid == os.getpid():
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._is_ending.set)
            self._thread.join()


_IMPORTED_TO_CLOSE: Final = (shutil,)
"""Modules that closing a node uses; see `LoopThread._end_at_exit`."""


_own: Final[list[LoopThread]] = []
"""The loop in a background thread, if one was started."""


_starting: Final = threading.Lock()

_portals: Final[dict[asyncio.AbstractEventLoop, Portal]] = {}
"""The portals to the program's own loops: one each, so that calls keep their order."""


def portal_for(what: str, *, opens: bool = False) -> Portal:
    """Return the portal to the program's node; a task needs none.

    The loop that has the node may run in any thread. For a program without a node,
    start a loop in a background thread.

    Args:
        what: the call, for the message.
        opens: True if a fork of a program with a node may open a node of its own.

    Raises:
        MisuseError: an event loop runs in this thread, and would be blocked.
        NoLoopError: several event loops of the program have a node.
        NodeError: this process was forked by a task, or by a program with a node.
    """
    own = _own_loop()
    if own is None or get_ident() != own.opener:
        # The opener is no task's, even while an inline node runs a task.
        refuse_in_worker(what)
    if (portal := proxy_maker.get()) is not None:
        # After the map's node was shut down, its input must not open another node.
        return portal  # type: ignore[no-any-return]
    if own is not None and own.is_here:
        return own
    if is_loop_running():
        raise blocks_loop(what)
    portal = own or portal_to_program(what)
    if portal is not None:
        return portal
    for inherited in sessions.values():
        if inherited.is_forked and not opens:
            raise inherited.unusable()
    with _starting:
        own = _own_loop()
        if own is None:
            own = LoopThread()
            _own[:] = [own]
        return own


def portal_of_program(what: str, instead: str) -> Portal:
    """Return the portal to the program's node; refuse a call in a task.

    Args:
        what: the call, for messages.
        instead: what to do in a task.

    Raises:
        MisuseError: the call was made in a task; or see `portal_for`.
    """
    if is_in_task():
        raise MisuseError(f"{what} is for programs. {instead}")
    return portal_for(what)


def _own_loop() -> LoopThread | None:
    """Return the loop in a background thread, if one was started and is still open."""
    return next((own for own in _own if own.is_usable), None)


def close_own_loop() -> None:
    """Close the loop in a background thread, and its node."""
    with _starting:
        own = _own_loop()
        _own.clear()
    if own is not None:
        own.end()


def close_if_own(portal: Portal) -> None:
    """Close a loop in a background thread whose node was closed."""
    if portal.loop in [own.loop for own in _own]:
        close_own_loop()


def portal_to_program(what: str) -> Portal | None:
    """Return the portal to the loop that has the program's node; None without one.

    Raises:
        NoLoopError: several loops have a node.
    """
    usable = [one for one in sessions.values() if not one.is_forked]
    if len(usable) > 1:
        raise NoLoopError(
            f"{what} cannot choose a node: {len(usable)} event loops of this program "
            f"have one. Write `asyncio.run_coroutine_threadsafe(call(), loop)"
            f".result()`, where `async def call()` makes the call on the loop you want."
        )
    if not usable:
        return None
    loop, thread = usable[0].loop, usable[0].thread
    with _starting:
        portal = _portals.get(loop)
        if portal is None or portal.thread != thread or not portal.is_usable:
            for closed in [each for each in _portals if each.is_closed()]:
                del _portals[closed]
            portal = _portals[loop] = Portal(loop, thread)
        return portal


def blocks_loop(what: str) -> MisuseError:
    """Return the error for a wait that would block a running event loop."""
    return MisuseError(
        f"{what} would block the event loop that is running in this thread: use the "
        f"functions of `aiogpu` instead of `aiogpu.sync`, and `await` them."
    )


executors: Final[WeakSet[concurrent.futures.Executor]] = WeakSet()
"""Executors; calls that have not ended keep theirs alive."""


def _end_executors() -> None:
    """Wait at the end of the program for the calls of executors; accept no more.

    After an unhandled Ctrl-C they are stopped with the node. Nothing is left to wait
    for if the program had the node on its own event loop, which has ended.
    """
    is_interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
    is_waiting = _own_loop() is not None and not is_interrupted
    for executor in list(executors):
        executor.shutdown(wait=is_waiting)


atexit.register(_end_executors)
