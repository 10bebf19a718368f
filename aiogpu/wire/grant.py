"""What the holder of a lease is told: plain JSON, so that nothing is unpickled."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from aiogpu.errors import ProtocolError

MARK: Final = "AIOGPU_LEASE"
"""The variable that all processes inherit that a lease is for; by it they are found."""


class Grant(NamedTuple):
    """What a lease gives.

    Attributes:
        environ: the variables to set: what assigns devices, what limits the use of
            their memory, and `MARK`.
        accelerators: device ids by kind, as integers or strings.
        gpu_memory: bytes that may be used of each GPU, in their order, 0 where no limit
            is set; empty without any.
        cpus: those that are near the GPUs, empty where that is of no use.
    """

    environ: dict[str, str]
    accelerators: dict[str, tuple[int | str, ...]]
    gpu_memory: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """The grant as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Grant:
        """The grant that `pack` has made.

        Raises:
            ProtocolError: it is something else.
        """
        try:
            environ, accelerators, gpu_memory, cpus = json.loads(data)
            return cls(
                dict(environ),
                {kind: tuple(ids) for kind, ids in accelerators.items()},
                tuple(gpu_memory),
                tuple(cpus),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ProtocolError(f"this is no grant of a lease: {error}") from error
