"""A function or class with its options, as all its calls share them.

A `FunctionSpec` is built once per function and options, and known by its id to every
process that has been told of it. Light to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.core.model.request import Request, Shape, TaskSpec
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
    """A function as workers get it: sent once to each, known by its id.

    Attributes:
        actors: those to which it holds handles, in the process that has defined it.
    """

    id: int
    payload: bytes
    actors: tuple[ActorReference, ...] = ()


def new_function_id() -> int:
    """An id for a function; no two functions of this process share one."""
    return next(_function_ids)


class ActorTerms(NamedTuple):
    """The terms that all actors of a class with its options share.

    Attributes:
        mode: how calls are run; see `wire.acting`.
        limits: by group, how many calls run at once.
        groups: by method, its group, where it is not the default one.
        windows: by method that is a generator, how many items it may be ahead.
        run_limits: by method, the seconds of its `run_timeout`, where it has one.
        max_task_retries: how often a call is tried again whose process has died.
        keeps_cpus: whether it holds its CPUs for as long as it lives.
        interface: what handles to it are made of: the program's own, or pickled by
            another process; nobody here looks at it.
    """

    mode: str
    limits: Mapping[str, int]
    groups: Mapping[str, str]
    max_task_retries: int = 0
    keeps_cpus: bool = False
    interface: object = None
    windows: Mapping[str, int] = _NO_WINDOWS
    run_limits: Mapping[str, float] = _NO_LIMITS

    def packed_interface(self) -> bytes:
        """The interface as other processes get it."""
        return (
            self.interface
            if type(self.interface) is bytes
            else dump_whole(self.interface)
        )


@dataclass(slots=True, eq=False)
class FunctionSpec:
    """A function with its options, as all its calls share it.

    Attributes:
        id: known to workers by this.
        function: what is run.
        spec: what the core is asked for.
        resources: the request in the user's terms, for the task to ask about.
        environ: variables of `runtime_env`.
        is_coroutine: whether it is cancelled by a message first.
        retried: the option `retry_exceptions`, pickled; see `worker.invoke.RetryRules`.
        checked_by: who has found last that the request can be met.
        actor: how its calls are run, if it is a class.
        window: if it is a generator, how many items it may be ahead; else 0.
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

    def holding(self, request: Request) -> FunctionSpec:
        """Return the specification for a call that holds more than it asked for."""
        return replace(self, id=new_func_id(), resources=request.as_numbers())


def new_func_id() -> int:
    """An id for a function; no two functions of this process share one."""
    return next(_func_ids)


def placeholder_func(name: str, interface: object = None) -> FunctionSpec:
    """Return what is known of the class of such an actor.

    Args:
        name: how errors call it.
        interface: what handles are made of, None where they have come.
    """
    spec = TaskSpec(name, Shape(Request()))
    terms = ActorTerms(SERIAL, {}, {}, interface=interface)
    return FunctionSpec(0, Function(0, b""), spec, {}, {}, False, actor=terms)
