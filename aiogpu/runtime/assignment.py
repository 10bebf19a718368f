"""From a lease to a worker's environment: which variables say which devices.

Knows accelerators and device sets, not what a task is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiogpu.accelerators.base import Accelerator
from aiogpu.core.ledger import Lease, Ledger
from aiogpu.wire.messages import Bind


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
    ) -> None:
        self.accelerators = tuple(accelerators)
        self._ledger = ledger
        self._environ = dict(environ)

    def bind(self, lease: Lease, environ: Mapping[str, str]) -> Bind:
        """What a worker that serves this lease is told before anything else.

        Args:
            lease: names the devices.
            environ: variables of the task's own, set as well.
        """
        held = {
            kind: tuple(
                self._ledger.device_sets[kind].devices[index].id for index, _ in shares
            )
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=True
            )
        }
        variables = dict(environ)
        seen = {**self._environ, **environ}
        for accelerator in self.accelerators:
            ids = held.setdefault(accelerator.kind, ())
            variables |= accelerator.assignment(ids, seen)
        return Bind(variables, held)
