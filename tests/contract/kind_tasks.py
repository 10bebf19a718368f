"""Tasks that say which devices of which kinds they have."""

from __future__ import annotations

import os
from typing import Any

import aiogpu

VARIABLES = ("CUDA_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES", "FPGA_VISIBLE")


@aiogpu.remote
def seen() -> dict[str, Any]:
    """Its devices by kind, those it has, and the variables that say so."""
    context = aiogpu.get_runtime_context()
    ids = context.get_accelerator_ids()
    return {
        "ids": {kind: held for kind, held in ids.items() if held},
        "resources": dict(context.assigned_resources),
        "knows": sorted(ids),
        "pid": os.getpid(),
        **{name: os.environ.get(name) for name in VARIABLES},
    }


@aiogpu.remote
class Holder:
    """An actor with devices."""

    def seen(self) -> list[str]:
        return aiogpu.get_runtime_context().get_accelerator_ids()["neuron_cores"]


@aiogpu.remote
def starts_another() -> dict[str, list[str]]:
    """A task of which only the node knows the kind that it asks for."""

    @aiogpu.remote(num_cpus=0, resources={"FPGA": 1})
    def inner() -> dict[str, list[str]]:
        return aiogpu.get_runtime_context().get_accelerator_ids()

    ids = aiogpu.get(inner.remote())
    return {kind: held for kind, held in ids.items() if held}
