"""The interface of engines, and checks that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from aiogpu.client.current import decorated
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
        num_cpus: None for the CPUs that this process may use.
        num_gpus: None for the detected GPUs.
        resources: custom resources, and devices other than GPUs, in whole units.
        accelerator_type: declared for all devices of a logical node.
        gpu_memory: bytes declared for each of these devices.
        gpu_memory_enforce: end a task that uses more memory than it reserved.
        foreign: "avoid" to use devices with processes of other programs only if nothing
            else fits, "wait" to wait until these processes have ended.
        mps: "auto" to use an MPS server if one runs.
        cpu_affinity: "auto" to pin workers to the CPUs near their GPUs.
        preload: modules that the zygote imports.
        learns: the zygote also imports modules that workers turn out to need.
        log_to_driver: show the output of tasks.
        cancel_grace: seconds from a cancel to the kill.
        spare_workers: number of clean workers kept ready.
        memory: bytes to share out; None for a safe amount.
        memory_guard: end a task before memory runs out.
        object_memory: bytes of shared memory for values; None for a part of the memory.
        spill_directory: directory of values beyond that; None for the system's choice.
        only_looks: the program joins a node only to query it.
        runtime_env: Ray's runtime environment of the program's tasks; None for none.
        dashboard: serve the dashboard beside the program.
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
    runtime_env: Mapping[str, Any] | None = None
    dashboard: bool = False


class ActorPort(Protocol):
    """The interface of an actor for its callers."""

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

        Called once by the receiver of this actor, which already counts as a handle.
        """
        ...

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; return the number of the call."""
        ...

    def ask(self, query: str, receiver: Receiver) -> int:
        """Settle a receiver with the answer to a query; see `wire.messages.QUERIES`.

        The receiver does not keep the actor alive.

        Returns:
            The number by which `ActorsPort.cancel` withdraws a `LOST`; else any number.
        """
        ...


Room = tuple[int | None, str]
"""The answer to `CAPACITY`: number of actors of a class that can live at once, None for
any number; and the resources of each, as text."""


class ActorsPort(Protocol):
    """All actors of an engine."""

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
    ) -> ActorPort | asyncio.Future[Any]:
        """Create an actor, or find an actor by its name; the caller holds a handle.

        Returns a future if another process must look the name up. `public` is an id
        that `Engine.promise_actor` returned for it, 0 for none.

        Raises:
            ActorNameError: another actor has the name.
            InfeasibleError: the node can never meet the request.
            SerializationError: the arguments are too large to send.
        """
        ...

    def find(self, key: tuple[str, str]) -> ActorPort | asyncio.Future[Any] | None:
        """Find a living actor by its name; the caller holds a handle to it.

        Returns a future if another process must look the name up.
        """
        ...

    def held(self, actor: int, name: str) -> ActorPort:
        """Return an actor for which the caller holds a handle.

        Args:
            actor: number of the actor.
            name: name of the handle, for errors.

        Raises:
            ActorDiedError: the actor had no handle left.
        """
        ...

    def pass_on(self, actor: int, hold: object) -> None:
        """Note that a handle is being pickled; `hold` keeps the actor alive here."""
        ...

    def demand(self, actor: int, number: int, limit: int) -> None:
        """Set the number of items that a call's stream may yield in all."""
        ...

    def cancel(self, actor: int, number: int) -> None:
        """Cancel a call."""
        ...

    def stop(self, actor: int, how: str) -> None:
        """End an actor; `how` is explained at `wire.messages.Stop`."""
        ...


class Engine(Protocol):
    """Runs tasks and actors. Made for the running loop, and used only on it.

    Attributes:
        runs_together: tasks run at the same time, in processes of this machine.
        node_socket: the path of the node's socket, for commands; "" without one.
    """

    runs_together: bool

    @property
    def node_socket(self) -> str:
        """See `Attributes`."""
        ...

    @property
    def waits(self) -> Waits | None:
        """The observer of waits; None if the engine needs none."""
        ...

    @property
    def has_gone(self) -> bool:
        """True if the node has died, so that another node may replace it."""
        ...

    @property
    def home(self) -> str:
        """Name of the node, to tell its actors from others; "" if not needed."""
        ...

    @property
    def remote_values(self) -> ValueStore | None:
        """The store of values if the node is another process; else None."""
        ...

    @property
    def actors(self) -> ActorsPort:
        """The actors of the node.

        Raises:
            NodeError: the node supports no actors.
        """
        ...

    def promise_actor(self) -> int:
        """Return the id of an actor that will be created; 0 if this cannot be known.

        May be called before `open`.
        """
        ...

    async def open(self) -> None:
        """Open the node, to be ready for `submit`.

        Raises:
            NodeError: the node cannot be opened.
            DeviceError: requested devices do not exist.
        """
        ...

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value; may be called before `open`.

        Raises:
            SerializationError: the value is too large.
            ObjectMemoryError: there is not enough memory for it.
        """
        ...

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; return its id.

        Raises:
            InfeasibleError: the node can never meet the request.
            SerializationError: the arguments are too large to send.
        """
        ...

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Request a lease; return its id, by which `cancel` withdraws or returns it.

        For a placement group, `func.spec.shape.request.placement_group` is the
        `PlacementGroupSpec`: its key, bundles and strategy. Tasks that run in the group
        have a `BundleRef` there, with the same key and a bundle's index. The receiver
        gets an empty payload once all bundles are held.

        Raises:
            InfeasibleError: the node can never meet the request.
        """
        ...

    def demand(self, task: int, limit: int) -> None:
        """Set the number of items that a task's stream may yield in all."""
        ...

    def cancel(self, task: int) -> None:
        """Cancel a task; its receiver gets no outcome."""
        ...

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        ...

    async def available(self) -> dict[str, float]:
        """Return the free amount of each resource."""
        ...

    async def status(self) -> NodeStatus:
        """Return the held resources, the waiting tasks and the reasons."""
        ...

    async def why(self, task: int) -> Why | None:
        """Return why a task waits, or its state; None if it is unknown."""
        ...

    async def why_task(self, number: int) -> Why | None:
        """Return the same for any program's task, by its number in `status`."""
        ...

    def announce_stop(self) -> None:
        """Inform tasks that their program is about to stop."""
        ...

    async def close(self) -> None:
        """Stop all tasks and release all resources. May be called twice."""
        ...

    def force_close(self) -> None:
        """Close without a grace period; `close` is running, or comes next."""
        ...

    def close_now(self) -> None:
        """Close at once, without an event loop."""
        ...

    def after_fork(self) -> None:
        """Disable the engine in a fork of the process that opened it."""
        ...


def check_func(func: FunctionSpec, ledger: Ledger) -> None:
    """Check a function once for all its calls.

    Raises:
        InfeasibleError: the node can never meet the function's request.
        OptionError: the function chooses among the nodes of a Ray cluster.
        SerializationError: the function is too large to send.
    """
    # Late: not needed before a program has a node.
    from aiogpu.core.model.text import terms
    from aiogpu.core.model.units import GPU, GPU_MEMORY, MEMORY
    from aiogpu.core.resources.placement_group import why_infeasible

    func.check_one_machine()
    if func.choices:
        _choose(func, ledger)
    spec = func.spec
    reason = why_infeasible(ledger, spec.shape.request)
    if reason is not None:
        requested = spec.shape.request.as_numbers()
        # Every node has memory; do not list it if the request has none.
        has = terms(
            (name, amount)
            for name, amount in ledger.totals().items()
            if name not in (MEMORY, GPU_MEMORY) or name in requested
        )
        advice = "Ask for less, or start the node with more."
        if GPU in requested and not ledger.totals().get(GPU):
            advice = (
                "Ask for none, or start the node with num_gpus=, which may be more "
                "GPUs than the machine has. If the machine has GPUs, `aiogpu doctor` "
                "says why they were not found."
            )
        gpus = ledger.device_sets.get(GPU)
        if GPU_MEMORY in requested and gpus is not None and not all(gpus.capacity):
            advice = ""  # the reason says what to do
        raise InfeasibleError(
            f"{spec.name} asks for {spec.shape.request}, which this node can never "
            f"give: {reason}. It has {has}. {advice}".rstrip()
        )
    _check_size(f"the function {spec.name}", func.function.payload)


def _choose(func: FunctionSpec, ledger: Ledger) -> None:
    """Leave out the requests of `any_of` that the node can never meet.

    Raises:
        InfeasibleError: it can meet none.
    """
    from aiogpu.core.resources.placement_group import why_infeasible

    requests = [spec.shape.request for spec in func.choices]
    reasons = [why_infeasible(ledger, request) for request in requests]
    if None in reasons:
        pairs = zip(func.choices, reasons, strict=True)
        func.choose([spec for spec, reason in pairs if reason is None])
        return
    told = "; ".join(f"{r}: {why}" for r, why in zip(requests, reasons, strict=True))
    raise InfeasibleError(
        f"{func.spec.name} asks for any of several requests, and this node can never "
        f"give one of them: {told}. Add a request that it can give."
    )


def check_arguments(func: FunctionSpec, payload: bytes) -> None:
    """Check the arguments of one call.

    Raises:
        SerializationError: the arguments are too large to send.
    """
    _check_size(f"the arguments of {func.spec.name}.remote()", payload)


def _check_size(what: str, payload: bytes) -> None:
    if len(payload) > LARGEST_PAYLOAD:
        # Late: a program with its own node does not need this module.
        from aiogpu.client.node_client import too_large

        raise too_large(what, payload)


CLIENT: Final = "ray://"
"""Prefix of addresses of Ray Client."""


def expected_modules(options: NodeOptions) -> tuple[str, ...]:
    """Return what the decorated functions of the program's script will need.

    Functions of other modules, such as a library's, are perhaps never called.
    """
    if not options.learns:
        return ()
    functions = [each.function for each in list(decorated)]
    own = [each for each in functions if getattr(each, "__module__", "") == "__main__"]
    if not own:
        return ()
    from aiogpu.serialization.modules import needed_modules

    return needed_modules(*own)


def no_client(source: str) -> str:
    """Return the message for an address of Ray Client; `source` names its origin."""
    return (
        f"{source}: aiogpu does not use Ray Client (ray://). Run the program on a node "
        f"of the cluster with address='ray', or submit it as a Ray job: `ray job "
        f"submit --address http://HEAD:8265 -- python program.py`, with "
        f"AIOGPU_ADDRESS=ray in the job's environment."
    )
