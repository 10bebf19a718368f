"""A `FunctionSpec` as bytes, without pickle: a caller declares its functions with it.

The user's objects stay pickled and are not read here: the function, its exception
classes, the interface of its actors. Amounts are checked, since all programs of a node
share its resources.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from aiogpu.client.function_spec import ActorTerms, Function, FunctionSpec, new_func_id
from aiogpu.core.model.ids import is_of_program
from aiogpu.core.model.request import (
    BundleRef,
    DeviceSelector,
    Environment,
    PlacementGroupSpec,
    Request,
    Shape,
    TaskSpec,
)
from aiogpu.core.model.units import CPU
from aiogpu.wire.codec import RecordCodec
from aiogpu.wire.messages import ProtocolError

_codec: Final = RecordCodec(TaskSpec, Shape, Request, DeviceSelector)


def dump_spec(func: FunctionSpec) -> bytes:
    """Return a function's spec as bytes."""
    actor = func.actor
    if actor is not None:
        actor = actor._replace(interface=actor.packed_interface())
    spec = replace(func.spec, function=0)  # the id is valid in this process only
    return _codec.dump((spec, func.is_coroutine, func.retried, actor, func.window))


def load_spec(
    data: bytes, function: Function, program: Environment = ()
) -> FunctionSpec:
    """Undo `dump_spec`: return a function of this process.

    Args:
        data: the bytes.
        function: the function or class.
        program: the variables of the only program whose workers may run it; empty for
            any worker.

    Raises:
        ProtocolError: the bytes are invalid, or the request is one that `@remote` would
            refuse.
    """
    try:
        spec, is_coroutine, retried, actor, window = _codec.load(data)
        spec = _restored(spec, function, program)
        actor = None if actor is None else ActorTerms(*actor)
        is_possible = _is_possible(spec) and _has_possible_terms(spec, actor)
        environ = dict(spec.shape.environment)
        resources = spec.shape.request.as_numbers()
        if actor is not None and not actor.keeps_cpus:
            # The CPU of its placement is given back after the start.
            resources.pop(CPU, None)
    except (AttributeError, TypeError, ValueError) as error:
        raise ProtocolError(f"a function's spec cannot be read: {error}") from None
    if not is_possible or window < 0:
        raise ProtocolError("a function's spec has options that @remote would refuse")
    return FunctionSpec(
        id=new_func_id(),
        function=function,
        spec=spec,
        resources=resources,
        environ=environ,
        is_coroutine=is_coroutine,
        retried=retried,
        actor=actor,
        window=window,
        choices=spec.choices(),
    )


def _has_possible_terms(spec: TaskSpec, actor: ActorTerms | None) -> bool:
    """Return whether `@method` would accept the options of an actor."""
    if actor is None:
        return True
    limits = [*actor.run_limits.values()]
    if actor.evict_after is not None:
        limits.append(actor.evict_after or 1.0)  # 0 is allowed
    return not spec.is_lease and all(0 < limit < float("inf") for limit in limits)


def _restored(spec: TaskSpec, function: Function, program: Environment) -> TaskSpec:
    """Return the spec with its named tuples, sent as plain tuples, and its program."""
    shape = spec.shape
    request, environment = shape.request, shape.environment
    group: Any = request.placement_group
    if group is not None:
        if len(group) == len(PlacementGroupSpec._fields):
            key, name, strategy, bundles = group
            group = PlacementGroupSpec(key, name, strategy, tuple(bundles))
        else:
            group = BundleRef(*group)
        request = replace(request, placement_group=group)
    if program:
        others = (pair for pair in environment if not is_of_program(pair[0]))
        environment = tuple(sorted((*others, *program)))
    choices = tuple(_restored(each, function, program) for each in spec.alternatives)
    return replace(
        spec,
        shape=Shape(request, environment),
        function=function.id,
        alternatives=choices,
    )


def _is_possible(spec: TaskSpec) -> bool:
    """Return whether `@remote` would accept the amounts and times."""
    request = spec.shape.request
    tables = [request.scalars, request.devices]
    if isinstance(request.placement_group, PlacementGroupSpec):
        for bundle in request.placement_group.bundles:
            tables += bundle.scalars, bundle.devices
    times = spec.timeout, spec.run_timeout, spec.cancel_grace, spec.stop_grace
    limits = [seconds for seconds in times if seconds is not None]
    return (
        all(list(dict(table)) == sorted(name for name, _ in table) for table in tables)
        and all(amount >= 0 for table in tables for _, amount in table)
        and all(0 <= seconds < float("inf") for seconds in limits)
        and spec.max_calls >= 0
        and min(request.gpu_memory, spec.max_retries) >= -1
        and (spec.is_endless or not spec.is_lease)
        and request.alternatives == tuple(e.shape.request for e in spec.alternatives)
        and not (spec.alternatives and (spec.is_endless or request.placement_group))
        and all(not e.alternatives and _is_possible(e) for e in spec.alternatives)
    )
