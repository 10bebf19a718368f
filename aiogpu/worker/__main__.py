"""Where the zygote's interpreter begins; the driver's `runtime.zygote` calls it."""

from __future__ import annotations

from aiogpu.wire.setup import Setup
from aiogpu.worker.zygote import Zygote


def main(fields: dict[str, object]) -> None:
    """Be the zygote until the node closes or the driver dies.

    Args:
        fields: the values of `Setup`, by name.
    """
    Zygote(Setup(**fields)).run()  # type: ignore[arg-type]
