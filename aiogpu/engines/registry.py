"""Which address means which engine; each is imported when it is asked for."""

from __future__ import annotations

import asyncio

from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.errors import OptionError


def create_engine(
    address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
) -> Engine:
    """Make the engine for an address; it is not open yet.

    Args:
        address: None or "local" for a node embedded in this program, "inline" for
            one without processes.
        options: what `init` was asked for.
        loop: the running loop.

    Raises:
        OptionError: no engine is known by that address.
    """
    if address is None or address == "local":
        from aiogpu.engines.local import LocalEngine

        return LocalEngine(options, loop)
    if address == "inline":
        from aiogpu.engines.inline.engine import InlineEngine

        return InlineEngine(options, loop)
    raise OptionError(
        f"init(address={address!r}): this version runs a node inside the program "
        f"only; leave address out, or give address='local', or address='inline' to "
        f"have tasks run in this very process."
    )
