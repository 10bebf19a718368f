"""A function or class with its options, shared by all its calls.

A `FunctionSpec` is built once per function and options, and sent once to each process,
which then knows it by its id. Light to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.errors import OptionError
from aiogpu.serialization.serializer import RETRY_NONE, dump_whole
from aiogpu.wire.messages import SERIAL

if TYPE_CHECKING:
    from aiogpu.serialization.references import ActorReference

_NO_WINDOWS: Final[Mapping[str, int]] = {}


_NO_LIMITS: Final[Mapping[str, float]] = {}


_func_ids: Final = count(1)


_function_ids: Final = count(1)


@dataclass(slots=True, eq=False)
class Function:
    """A pickled function: sent once to each worker, then known by its id.

    Attributes:
        actors: the actors to which it holds handles, in the process that defined it.
        modules: the installed modules that it is known to import.
        name: its name in the program, the same in each run; "" if unknown.
    """

    id: int
    payload: bytes
    actors: tuple[ActorReference, ...] = ()
    modules: tuple[str, ...] = ()
    name: str = ""


def new_function_id() -> int:
    """Return a function id that is unique in this process."""
    return next(_function_ids)


class ActorTerms(NamedTuple):
    """The options that all actors of a class share.

    Attributes:
        mode: how calls run; see `wire.messages`.
        limits: number of calls that run at once, by group.
        groups: group of each method that is not in the default group.
        windows: for methods that are generators, how many items they may be ahead.
        run_limits: for methods with a `run_timeout`, its seconds.
        max_task_retries: how often a call is retried after the death of its process.
        keeps_cpus: the actor holds its CPUs as long as it lives.
        evict_after: seconds after which the idle actor leaves if others need its
            resources; None for never.
        keeps_state: the class has a method `on_evict`.
        interface: from this, handles are made: the program's own object, or bytes
            pickled by another process, which are not read here.
    """

    mode: str
    limits: Mapping[str, int]
    groups: Mapping[str, str]
    max_task_retries: int = 0
    keeps_cpus: bool = False
    interface: object = None
    windows: Mapping[str, int] = _NO_WINDOWS
    run_limits: Mapping[str, float] = _NO_LIMITS
    evict_after: float | None = None
    keeps_state: bool = False

    def packed_interface(self) -> bytes:
        """Return the interface, pickled for other processes."""
        return (
            self.interface
            if type(self.interface) is bytes
            else dump_whole(self.interface)
        )


@dataclass(slots=True, eq=False)
class FunctionSpec:
    """A function or class with its options, shared by all its calls.

    Attributes:
        id: number by which workers know it.
        function: the function or class.
        spec: the request to the scheduler.
        resources: the request in the user's terms, for `get_runtime_context`.
        environ: variables of `runtime_env`.
        is_coroutine: a cancel sends a message first.
        retried: the option `retry_exceptions`, pickled; see `worker.invoke.RetryRules`.
        checked_by: the node that last checked that the request can be met.
        actor: the options of actors, for a class.
        window: for a generator, how many items it may be ahead; else 0.
        ray_options: options of `scheduling_strategy` and `label_selector`, for Ray.
        choices: the specs of the option `any_of`; `spec` is made of those that the node
            can meet. Empty for a single request.
    """

    id: int
    function: Function
    spec: TaskSpec
    resources: Mapping[str, float]
    environ: Mapping[str, str]
    is_coroutine: bool
    retried: bytes = RETRY_NONE
    checked_by: object = None
    actor: ActorTerms | None = None
    window: int = 0
    ray_options: Mapping[str, object] = field(default_factory=dict)
    choices: tuple[TaskSpec, ...] = ()
    _holding: dict[Request, FunctionSpec] = field(default_factory=dict)

    def holding(self, request: Request) -> FunctionSpec:
        """Return the spec for a call that got other resources than its first request.

        A call gets more when device memory has run out, or by another of its requests.
        """
        func = self._holding.get(request)
        if func is None:
            resources = request.as_numbers()
            func = replace(self, id=new_func_id(), resources=resources)
            self._holding[request] = func
        return func

    def choose(self, choices: Sequence[TaskSpec]) -> None:
        """Let calls take the first of these requests that is free."""
        self.spec = TaskSpec.any_of(choices)
        self.resources = choices[0].shape.request.as_numbers()
        self._holding.clear()

    def check_one_machine(self) -> None:
        """Check that it does not choose among the nodes of a Ray cluster.

        Raises:
            OptionError: it does; every other engine has one machine.
        """
        if self.ray_options:
            asked = self.ray_options.items()
            given = ", ".join(f"{name}={value!r}" for name, value in asked)
            raise OptionError(
                f"{self.spec.name} asks for {given}, which chooses among the nodes of "
                f"a Ray cluster, and this node is one machine. Leave it out, or run by "
                f"aiogpu.init(address='ray'). gpu_strategy='spread' chooses among GPUs."
            )


def new_func_id() -> int:
    """Return an id of a function spec that is unique in this process."""
    return next(_func_ids)


def placeholder_func(name: str, interface: object = None) -> FunctionSpec:
    """Return a spec for the class of an actor that another process has made.

    Args:
        name: the name in errors.
        interface: the source of handles; None if the handles were received.
    """
    spec = TaskSpec(name, Shape(Request()))
    terms = ActorTerms(SERIAL, {}, {}, interface=interface)
    return FunctionSpec(0, Function(0, b""), spec, {}, {}, False, actor=terms)
