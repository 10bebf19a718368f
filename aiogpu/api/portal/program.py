"""The functions of `aiogpu` for a program's code without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from inspect import isawaitable
from typing import Any, ParamSpec, TypeVar, overload

from aiogpu.api import calls
from aiogpu.api.actors import actor as actors
from aiogpu.api.portal.calls import call_function, map_on, warn_of_change
from aiogpu.api.portal.handle import (
    Handle,
    ResultIterator,
    checked_handles,
    completed,
    results_of,
)
from aiogpu.api.portal.loop_thread import (
    Portal,
    blocks_loop,
    portal_for,
    portal_to_program,
)
from aiogpu.api.portal.proxy import Proxy, call_on, unwrap
from aiogpu.api.results import handle as handles
from aiogpu.api.results import wait as waiting
from aiogpu.api.results.stream import IteratedOnce
from aiogpu.client.current import is_in_task, is_loop_running
from aiogpu.errors import MisuseError, NoLoopError

P = ParamSpec("P")
T = TypeVar("T")


class Program:
    """Calls of a program, over the portal to its node.

    `sync.TaskCode` has the same methods for the code of tasks.

    Args:
        what: the call, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    @property
    def portal(self) -> Portal:
        """The portal to the program's node, which is started if there is none."""
        return portal_for(self._what)

    def call(self, remote: Any, args: Any, kwargs: Any) -> Any:
        """Start a task."""
        portal = self.portal
        warn_of_change(remote._definition)
        return call_function(portal, remote, args, kwargs)

    def make(self, remote: Any, args: Any, kwargs: Any) -> Any:
        """Start an actor."""
        return call_on(self.portal, remote.remote, args, kwargs)

    def map(
        self, remote: Any, iterable: Iterable[Any], options: dict[str, Any]
    ) -> ResultIterator[Any]:
        """Call a function with each item."""
        return map_on(self.portal, remote, iterable, options)

    def get(self, handle: Any, timeout: float | None) -> Any:
        """Wait for results; see `aiogpu.sync.get`."""
        return results_of(handle, timeout)

    def put(self, value: Any) -> Any:
        """Store a value; return its handle."""
        portal = self.portal
        return portal.call(lambda: portal.wrap(calls.put(unwrap(value))))

    def wait(
        self, given: Any, num_returns: int, timeout: float | None
    ) -> tuple[list[Handle[Any]], list[Handle[Any]]]:
        """Wait until some of the handles are done; see `aiogpu.sync.wait`."""
        portal = self.portal
        proxies = checked_handles("wait", given)
        if len(set(proxies)) < len(proxies):
            twice = next(each for each in proxies if proxies.count(each) > 1)
            raise MisuseError(
                f"{self._what} was given {twice!r} more than once; pass each handle "
                f"once."
            )

        async def wait_on_loop() -> tuple[list[Any], list[Any]]:
            proxy_of = {unwrap(proxy): proxy for proxy in proxies}
            ready, pending = await waiting.wait(
                [*proxy_of], num_returns=num_returns, timeout=timeout
            )
            return [proxy_of[one] for one in ready], [proxy_of[one] for one in pending]

        return portal.run(self._what, wait_on_loop)

    def as_completed(self, given: Any) -> Iterator[Handle[Any]]:
        """Yield handles as they end."""
        return completed(checked_handles("as_completed", given))

    def get_actor(self, name: str, namespace: str | None) -> Any:
        """Return a handle to the actor with a name."""
        portal = self.portal
        found = portal.run(self._what, lambda: actors.get_actor(name, namespace))
        return portal.wrap(found)

    def kill(self, actor: Any, no_restart: bool) -> None:
        """End an actor's process at once."""
        self.portal.call(lambda: actors.kill(unwrap(actor), no_restart=no_restart))


@overload
def from_thread(
    call: Callable[P, handles.Handle[T]], /, *args: P.args, **named: P.kwargs
) -> Handle[T]: ...


@overload
def from_thread(
    call: Callable[P, IteratedOnce[T]], /, *args: P.args, **named: P.kwargs
) -> ResultIterator[T]: ...


@overload
def from_thread(
    call: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **named: P.kwargs
) -> T: ...


@overload
def from_thread(call: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T: ...


def from_thread(call: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Make a call of aiogpu on the program's event loop, from another thread.

    For code in threads that may block: a plain `def` endpoint of FastAPI, a function
    under `asyncio.to_thread`, a thread pool.

    Args:
        call: the function to call on the loop: `f.remote`, `actor.method.remote`,
            `f.map`, `aiogpu.status`.
        *args: its positional arguments.
        **named: its keyword arguments.

    Returns:
        An `aiogpu.sync.Handle`, whose `result(timeout)` waits, instead of a `Handle`; a
        plain iterator instead of a stream or the results of `map`; the result of any
        other awaitable, which is awaited; any other object unchanged.

    Raises:
        MisuseError: an event loop is running in this thread.
        NoLoopError: no event loop of the program has a node, or several have one.
        Exception: an error of the call.

    Example:
        `score = aiogpu.from_thread(predict.remote, image).result(timeout=5)`
    """
    what = "aiogpu.from_thread()"
    if is_in_task():
        return call(*args, **named)
    if is_loop_running():
        raise blocks_loop(what)
    portal = portal_to_program(what)
    if portal is None:
        raise NoLoopError(
            f"{what} needs a node that an event loop of this program has opened by "
            f"aiogpu.init(). In a program without an event loop use `aiogpu.sync`."
        )
    returned = call_on(portal, call, args, named)
    if isinstance(returned, Proxy) or not isawaitable(returned):
        return returned
    result = portal.run(what, lambda: returned)
    return portal.call(portal.wrap, result)
