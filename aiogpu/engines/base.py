"""The interface of engines, and of values in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from aiogpu.client.interface import ValueStore, Waits
from aiogpu.errors import InfeasibleError
from aiogpu.wire.messages import LARGEST_PAYLOAD

if TYPE_CHECKING:
    import asyncio

    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.core.resources.ledger import Ledger
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.serialization.references import PickledValue


class NodeOptions(NamedTuple):
    """The checked options of `init`.

    Attributes:
        num_cpus: None for what this process may use.
        num_gpus: None for what is detected.
        resources: custom resources, and devices other than GPUs, in whole units.
        accelerator_type: declared for all devices of a logical node.
        gpu_memory: bytes declared for each of them.
        gpu_memory_enforce: whether a task is ended that outgrows what it reserved.
        foreign: "avoid" to place on devices with processes that are none of the node's
            only where nothing else fits, "wait" to wait until these have gone.
        mps: "auto" to use an MPS server where one runs.
        cpu_affinity: "auto" to pin workers to the CPUs near their GPUs.
        preload: modules that the zygote imports.
        learns: whether it imports more, as workers turn out to need them.
        log_to_driver: whether tasks' output is shown.
        cancel_grace: seconds from a cancel to the kill.
        spare_workers: clean workers kept ready.
        memory: bytes to share out; None for what is safe.
        memory_guard: whether a task is ended before memory runs out.
        object_memory: bytes of shared memory for values; None for a part of it.
        spill_directory: where values beyond that go; None for the system's choice.
        only_looks: of a program that joins a node: whether it will run nothing.
    """

    num_cpus: float | None = None
    num_gpus: int | None = None
    resources: Mapping[str, float] = {}
    accelerator_type: str | None = None
    gpu_memory: int | None = None
    gpu_memory_enforce: bool = False
    foreign: str = "ignore"
    mps: str = "off"
    cpu_affinity: str = "auto"
    preload: Sequence[str] = ()
    learns: bool = True
    log_to_driver: bool = True
    cancel_grace: float = 2.0
    spare_workers: int = 2
    memory: int | None = None
    memory_guard: bool = True
    object_memory: int | None = None
    spill_directory: str | None = None
    only_looks: bool = False


class ActorPort(Protocol):
    """One actor, as its calls reach it."""

    @property
    def id(self) -> int:
        """The actor's number."""
        ...

    @property
    def func(self) -> FunctionSpec:
        """The actor's class."""
        ...

    def holder(self) -> object:
        """Return an object that counts as a handle until it is collected.

        Asked for once by whoever was given this actor, who counts already.
        """
        ...

    def pass_on(self, hold: object) -> None:
        """A handle to it is being pickled; `hold` keeps it alive in this process."""
        ...

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; gives the call's number."""
        ...

    def await_ready(self, receiver: Receiver) -> None:
        """Tell it when the constructor has returned, or why it never will."""
        ...

    def await_end(self, receiver: Receiver) -> None:
        """Tell it when the actor's process has ended."""
        ...


Room = tuple[int | None, str]
"""How many actors of a kind can live at once, None for any number; and what each asks
for, in words."""


class ActorsPort(Protocol):
    """All actors of an engine."""

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> ActorPort | asyncio.Future[Any]:
        """Make an actor, or find the one of that name; the caller holds a handle.

        A future where the name has to be looked up on a node of another process.

        Raises:
            ActorNameError: another one has that name.
            InfeasibleError: there will never be enough for it.
            SerializationError: the arguments are too large to be sent.
        """
        ...

    def find(self, key: tuple[str, str]) -> ActorPort | asyncio.Future[Any] | None:
        """The living actor of that name; the caller holds a handle to it.

        A future of the same where a node of another process is asked.
        """
        ...

    def held(self, actor: int, name: str) -> ActorPort:
        """Return an actor for which the caller holds a handle.

        `name` is what its handle is called.

        Raises:
            ActorDiedError: nobody has held one until now.
        """
        ...

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Tell how many actors that ask for what this one does can live at once.

        The answer is a `Room`, pickled; or `ActorDiedError`: nobody knows it any more.
        """
        ...

    def demand(self, actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        ...

    def cancel(self, actor: int, number: int) -> None:
        """Cancel a call."""
        ...

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End its process at once, and the actor unless it may restart."""
        ...

    def terminate(self, actor: int) -> None:
        """Have it end after what it was sent."""
        ...


class Engine(Protocol):
    """Runs tasks somewhere. Made for the running loop, used on it alone."""

    @property
    def waits(self) -> Waits | None:
        """The observer of waits; None if there is none."""
        ...

    @property
    def has_gone(self) -> bool:
        """True if the node has died, so that another may replace it."""
        ...

    @property
    def home(self) -> str:
        """Tells its node from others; "" where numbers of actors do so already."""
        ...

    @property
    def remote_values(self) -> ValueStore | None:
        """The store of values if the node is another process; else None."""
        ...

    @property
    def actors(self) -> ActorsPort:
        """The actors of the node.

        Raises:
            NodeError: it can have none.
        """
        ...

    async def open(self) -> None:
        """Be ready for `submit`.

        Raises:
            NodeError: it cannot be.
            DeviceError: the devices asked for are not there.
        """
        ...

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload of what is to be sent; may be asked before it is open.

        Raises:
            SerializationError: it is too large.
            ObjectMemoryError: there is no room for it.
        """
        ...

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; gives its id.

        Raises:
            InfeasibleError: there will never be enough for it.
            SerializationError: the arguments are too large to be sent.
        """
        ...

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a lease; gives its id, with which `cancel` gives it up, or back.

        For a placement, `func.spec.shape.request.placement_group` is the
        `PlacementGroupSpec`: its key, bundles and strategy. Tasks that run in it have
        a `BundleRef` there, with the same key and a bundle's index. Its receiver is
        told an empty payload once all bundles are held.

        Raises:
            InfeasibleError: there will never be enough for it.
        """
        ...

    def demand(self, task: int, limit: int) -> None:
        """Let a task that is a stream yield so many items in all."""
        ...

    def cancel(self, task: int) -> None:
        """Cancel a task; its receiver gets no outcome."""
        ...

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        ...

    async def available(self) -> dict[str, float]:
        """Return what is free of each; 0.0 where nothing is."""
        ...

    async def status(self) -> NodeStatus:
        """Return who holds what, what waits and why."""
        ...

    async def why(self, task: int) -> Why | None:
        """Return why a task waits, or its state; None if it is unknown."""
        ...

    async def why_task(self, number: int) -> Why | None:
        """Return the same by the number that `status` shows, for any program's task."""
        ...

    def announce_stop(self) -> None:
        """Let tasks know that their program stops, which stops them in a moment."""
        ...

    async def close(self) -> None:
        """Stop all tasks and leave nothing behind. May be called twice."""
        ...

    def force_close(self) -> None:
        """Close without a grace period; `close` is running, or comes next."""
        ...

    def close_now(self) -> None:
        """Close at once, without an event loop."""
        ...

    def after_fork(self) -> None:
        """This process is a fork of the one that has opened it, and must not speak."""
        ...


def check_func(func: FunctionSpec, ledger: Ledger) -> None:
    """Check what is the same for all calls of a function.

    Raises:
        InfeasibleError: the node lacks, even when idle, what the function asks for.
        SerializationError: the function is too large to be sent.
    """
    # Late: a program that joins no node yet needs none of it.
    from aiogpu.core.model.text import terms
    from aiogpu.core.model.units import GPU, GPU_MEMORY, MEMORY
    from aiogpu.core.resources.placement_group import why_infeasible

    spec = func.spec
    reason = why_infeasible(ledger, spec.shape.request)
    if reason is not None:
        asked = spec.shape.request.as_numbers()
        # Of memory everybody has some; who asks for none need not hear of it.
        has = terms(
            (name, had)
            for name, had in ledger.totals().items()
            if name not in (MEMORY, GPU_MEMORY) or name in asked
        )
        advice = "Ask for less, or start the node with more."
        if GPU in asked and not ledger.totals().get(GPU):
            advice = (
                "Ask for none, or start the node with num_gpus=, which may be more "
                "GPUs than the machine has."
            )
        raise InfeasibleError(
            f"{spec.name} asks for {spec.shape.request}, which this node can never "
            f"give: {reason}. It has {has}. {advice}"
        )
    _check_size(f"the function {spec.name}", func.function.payload)


def check_arguments(func: FunctionSpec, payload: bytes) -> None:
    """Check the arguments of one call.

    Raises:
        SerializationError: they are too large to be sent.
    """
    _check_size(f"the arguments of {func.spec.name}.remote()", payload)


def _check_size(what: str, payload: bytes) -> None:
    if len(payload) > LARGEST_PAYLOAD:
        # Late: a program with a node of its own has no client of another.
        from aiogpu.client.node_client import too_large

        raise too_large(what, payload)


CLIENT: Final = "ray://"
"""The start of addresses of Ray Client."""


def no_client(said: str) -> str:
    """Return the message for an address of Ray Client; `said`: where it came from."""
    return (
        f"{said}: aiogpu does not use Ray Client (ray://). Run the program on a node "
        f"of the cluster with address='ray', or submit it as a Ray job: `ray job "
        f"submit --address http://HEAD:8265 -- python program.py`, with "
        f"AIOGPU_ADDRESS=ray in the job's environment."
    )
