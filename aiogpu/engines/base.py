"""The port: what the faces ask of an engine, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aiogpu.errors import NodeError

if TYPE_CHECKING:
    from aiogpu.core.snapshot import NodeStatus
    from aiogpu.core.why import Why
    from aiogpu.runtime.call import Receiver, Site


class NodeOptions(NamedTuple):
    """What `init` was asked for, checked.

    Attributes:
        num_cpus: None for what this process may use.
        num_gpus: None for what is detected.
        resources: custom resources in whole units.
        accelerator_type: declared for all devices of a logical node.
        preload: modules that the zygote imports.
        learns: whether it imports more, as workers turn out to need them.
        log_to_driver: whether tasks' output is shown.
        cancel_grace: seconds from a cancel to the kill.
        spare_workers: clean workers kept ready.
        memory: bytes to share out; None for what is safe.
        memory_guard: whether a task is ended before memory runs out.
    """

    num_cpus: float | None = None
    num_gpus: int | None = None
    resources: Mapping[str, float] = {}
    accelerator_type: str | None = None
    preload: Sequence[str] = ()
    learns: bool = True
    log_to_driver: bool = True
    cancel_grace: float = 2.0
    spare_workers: int = 2
    memory: int | None = None
    memory_guard: bool = True


class Waits(Protocol):
    """Hears who waits on an event loop, and for which task."""

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task now."""
        ...

    def end_wait(self, task: int) -> None:
        """It waits no longer, although the task has not ended."""
        ...

    def settle(self, task: int) -> None:
        """A task has ended; nobody waits for it any more."""
        ...


class Engine(Protocol):
    """Runs tasks somewhere. Made for the running loop, used on it alone."""

    @property
    def waits(self) -> Waits | None:
        """Who is to be told of waits, None if nobody wants to know."""
        ...

    async def open(self) -> None:
        """Be ready for `submit`.

        Raises:
            NodeError: it cannot be.
            DeviceError: the devices asked for are not there.
        """
        ...

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task; gives its id.

        Raises:
            InfeasibleError: there will never be enough for it.
            SerializationError: the arguments are too large to be sent.
        """
        ...

    def cancel(self, task: int) -> None:
        """Stop a task; its receiver is told nothing any more."""
        ...

    def total(self) -> dict[str, float]:
        """All resources by name."""
        ...

    def available(self) -> dict[str, float]:
        """What is free of each; 0.0 where nothing is."""
        ...

    def status(self) -> NodeStatus:
        """Who holds what, what waits and why."""
        ...

    def why(self, task: int) -> Why | None:
        """Why a task waits, or what it does; None if it is not known any more."""
        ...

    async def close(self) -> None:
        """Stop all tasks and leave nothing behind. May be called twice."""
        ...

    def abandon(self) -> None:
        """The same in haste, where no loop runs any more."""
        ...


def error_inside_task(what: str) -> NodeError:
    """The error for what only a program may ask of its node."""
    return NodeError(
        f"{what} was called inside a task; only the program that has opened the node "
        f"can ask it. Inside a task, aiogpu.get_runtime_context() tells what it holds."
    )
