"""Which address means which engine."""

from __future__ import annotations

import asyncio

import pytest

from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.engines.inline.engine import InlineEngine
from aiogpu.engines.local import LocalEngine
from aiogpu.engines.registry import create_engine
from aiogpu.errors import NodeClosedError, OptionError


@pytest.mark.parametrize(
    ("address", "kind"),
    [(None, LocalEngine), ("local", LocalEngine), ("inline", InlineEngine)],
)
async def test_a_node_inside_the_program(
    address: str | None, kind: type[Engine]
) -> None:
    engine = create_engine(address, NodeOptions(), asyncio.get_running_loop())
    assert isinstance(engine, kind)
    with pytest.raises(NodeClosedError):
        engine.total()
    engine.cancel(1)
    await engine.close()


@pytest.mark.parametrize("address", ["auto", "ray", "ray://host:1", "/run/x.sock"])
async def test_what_this_version_does_not_know(address: str) -> None:
    with pytest.raises(OptionError, match=repr(address)):
        create_engine(address, NodeOptions(), asyncio.get_running_loop())
