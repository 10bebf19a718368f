"""How much device memory a lease lets its worker use, and who is told how: pure.

The variables are those of JAX ("GPU memory allocation"; `jaxlib.xla_client`), of CuPy
("Environment variables"; read when a GPU's pool is first used, so one that was loaded
before hears of it too) and of TensorFlow ("Use a GPU"). PyTorch is told by the worker,
in `worker.gpu_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.core.model.units import BY_SHARE, GPU, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease

JAX_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_FRACTION_TOO: Final = "XLA_CLIENT_MEM_FRACTION"
JAX_PREALLOCATES: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
CUPY_LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"
TENSORFLOW_GROWS: Final = "TF_FORCE_GPU_ALLOW_GROWTH"


def held_of(lease: Lease, kind: str) -> dict[int, int]:
    """What a lease has of one kind: parts of each device, by index, in its order."""
    for (held, _), shares in zip(lease.request.devices, lease.shares, strict=True):
        if held == kind:
            return {share[0]: share[1] for share in shares}
    return {}


def limits_of(lease: Lease, gpus: DeviceSet | None) -> tuple[int, ...]:
    """Bytes that a worker with this lease may use of each of its GPUs, in order.

    Empty where it may use all that there is: nothing was asked for, or a share of
    GPUs whose memory nobody knows. Who has a whole GPU by its share has all of it.

    Args:
        lease: what the worker holds.
        gpus: all of the node's, None if it has none.
    """
    asked = lease.request.gpu_memory
    if not asked or gpus is None:
        return ()
    if lease.home is not None:
        # In a bundle that names bytes, a share stands for its part of these.
        gpus = lease.home.device_sets[GPU]
    held = held_of(lease, GPU)
    if asked != BY_SHARE:
        return (asked,) * len(held)
    limits = tuple(
        gpus.devices[index].memory * part // UNIT if part < UNIT else 0
        for index, part in held.items()
    )
    return limits if any(limits) else ()


def variables_of(
    limits: Sequence[int], capacities: Sequence[int], environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables by which frameworks learn a worker's limits, save PyTorch.

    What the user has set stays as it is. JAX takes one fraction for all GPUs and CuPy
    one number of bytes, so the least of them counts. TensorFlow knows no such
    variable; it is told to take no more than it needs.

    Args:
        limits: bytes of each of its GPUs, 0 for no limit.
        capacities: bytes that each of these has, 0 where unknown.
        environ: the worker's environment otherwise.
    """
    least = min((limit for limit in limits if limit), default=0)
    if not least:
        return {}
    wanted = {
        JAX_PREALLOCATES: "false",
        CUPY_LIMIT: str(least),
        TENSORFLOW_GROWS: "true",
    }
    # With both of its names set, JAX refuses to start.
    if all(capacities) and not environ.get(JAX_FRACTION_TOO):
        pairs = zip(limits, capacities, strict=True)
        parts = min(limit * UNIT // there for limit, there in pairs if limit)
        wanted[JAX_FRACTION] = f"{min(max(parts, 1), UNIT) / UNIT:g}"
    return {name: value for name, value in wanted.items() if name not in environ}
