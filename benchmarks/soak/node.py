"""What the nodes of the soak have."""

from __future__ import annotations

from typing import Any, Final

CPUS: Final = 3
GPUS: Final = 2
OBJECT_MEMORY: Final = 48 << 20
"""Bytes; little, so that values are spilled."""
GRACE: Final = 0.3
OPTIONS: Final[dict[str, Any]] = {
    "num_cpus": CPUS,
    "num_gpus": GPUS,
    "object_memory": OBJECT_MEMORY,
    "cancel_grace": GRACE,
}
SERVICE: Final = tuple(
    f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()
)
"""The same for the command that starts a service."""
