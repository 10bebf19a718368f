"""From a lease to what its worker is told: devices, limits, CPUs.

Knows accelerators and device sets, not what a task is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import CPU, GPU, UNIT
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.runtime import mps as multi_process
from aiogpu.runtime.affinity import Affinity
from aiogpu.runtime.gpu_limits import held_of, limits_of, variables_of
from aiogpu.wire.messages import Bind

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator

_log: Final = logging.getLogger(__name__)
AUTO: Final = "auto"


class Assignment:
    """The node's accelerators, and how each is told what it may use.

    Attributes:
        accelerators: one for each kind.
    """

    def __init__(
        self,
        accelerators: Sequence[Accelerator],
        ledger: Ledger,
        environ: Mapping[str, str],
        *,
        cpu_affinity: str = "off",
        mps: str = "off",
    ) -> None:
        self.accelerators = tuple(accelerators)
        self._ledger = ledger
        self._environ = dict(environ)
        self._gpus = ledger.device_sets.get(GPU)
        devices = self._gpus.devices if self._gpus is not None else ()
        self._affinity = Affinity(devices if cpu_affinity == AUTO else ())
        self._has_mps = mps == AUTO and _has_mps(devices, environ)

    def bind(self, lease: Lease, environ: Mapping[str, str]) -> Bind:
        """What a worker that serves this lease is told before anything else.

        Args:
            lease: names the devices.
            environ: variables of the task's own, set as well.
        """
        held: dict[str, tuple[int | str, ...]] = {
            kind: tuple(
                self._ledger.device_sets[kind].devices[share[0]].id for share in shares
            )
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=True
            )
        }
        shares = held_of(lease, GPU) if held else {}
        variables = dict(environ)
        seen = {**self._environ, **environ}
        for accelerator in self.accelerators:
            kind = accelerator.kind
            ids = held.setdefault(kind, ())
            if self._has_mps and kind == GPU:
                ids = tuple(gpu.uuid or gpu.id for gpu in self._named(shares))
            variables |= accelerator.assignment(ids, seen)
        if not shares:
            return Bind(variables, held)
        limits = limits_of(lease, self._gpus)
        if limits:
            capacities = [gpu.memory for gpu in self._named(shares)]
            variables |= variables_of(limits, capacities, seen)
        if self._has_mps:
            part = min(shares.values())
            variables |= multi_process.variables(part, limits, seen)
        return Bind(variables, held, limits, self._cpus_for(lease, shares))

    def _cpus_for(self, lease: Lease, gpus: Iterable[int]) -> tuple[int, ...]:
        """The CPUs near a worker's GPUs, unless its task asks for more than these."""
        cpus = self._affinity.near(gpus)
        if not cpus:
            return ()
        asked = dict(lease.request.scalars).get(CPU, 0)
        return cpus if asked <= len(cpus) * UNIT else ()

    def _named(self, indices: Iterable[int]) -> list[Device]:
        devices = self._ledger.device_sets[GPU].devices
        return [devices[index] for index in indices]


def _has_mps(devices: Sequence[Device], environ: Mapping[str, str]) -> bool:
    if not devices:
        return False
    if not multi_process.runs(environ):
        _log.info("mps='auto': no MPS server runs here; shares of GPUs are not limited")
        return False
    return True
