"""What is refused at `.remote()`: more than the node has, more than a call carries."""

from __future__ import annotations

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.core.model.text import terms
from aiogpu.core.model.units import GPU_MEMORY, MEMORY
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.resources.placement_group import why_infeasible
from aiogpu.errors import InfeasibleError
from aiogpu.wire.codec import LARGEST_PAYLOAD


def check_func(func: FunctionSpec, ledger: Ledger) -> None:
    """Check what is the same for all calls of a function.

    Raises:
        InfeasibleError: the node lacks, even when idle, what the function asks for.
        SerializationError: the function is too large to be sent.
    """
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
        raise InfeasibleError(
            f"{spec.name} asks for {spec.shape.request}, which this node can never "
            f"give: {reason}. It has {has}. Ask for less, or start the node with more."
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
