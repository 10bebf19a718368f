"""Which address means which engine."""

from __future__ import annotations

import asyncio

import pytest

import aiogpu
from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.engines.inline.engine import InlineEngine
from aiogpu.engines.local import LocalEngine
from aiogpu.engines.registry import create_engine
from aiogpu.errors import NodeClosedError, NodeDiedError, OptionError


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
        await engine.total()
    engine.cancel(1)
    await engine.close()


@pytest.mark.parametrize("address", ["auto", "/run/x.sock", "unix:/run/x.sock"])
async def test_a_node_of_another_process(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/nowhere")
    loop = asyncio.get_running_loop()
    engine = create_engine(address, NodeOptions(log_to_driver=False), loop)
    path = "/run/nowhere/aiogpu/node.sock" if address == "auto" else "/run/x.sock"
    assert repr(engine) == f"<RemoteEngine {path}>"
    with pytest.raises(NodeDiedError, match=rf"{path}.*`aiogpu start --head`"):
        await engine.open()
    await engine.close()
    await engine.close()


async def test_the_variable_is_named_where_it_gave_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setenv("AIOGPU_ADDRESS", "nowhere")
    with pytest.raises(OptionError, match=r"^AIOGPU_ADDRESS='nowhere': no node is"):
        create_engine("nowhere", NodeOptions(), loop)
    with pytest.raises(OptionError, match=r"^init\(address='elsewhere'\): no node is"):
        create_engine("elsewhere", NodeOptions(), loop)


@pytest.mark.ray
async def test_a_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    for named in ("", "head:6379"):
        monkeypatch.setenv("RAY_ADDRESS", named)
        engine = create_engine("ray", NodeOptions(), asyncio.get_running_loop())
        assert repr(engine) == "<RayEngine <Calls 0 live, 0 ending>>"
        await engine.close()


@pytest.mark.parametrize("address", ["ray://localhost:1", "ray://"])
async def test_ray_client_is_refused_with_what_to_do(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Ray is not installed."""
    told = r"node of the cluster with address='ray'.*`ray job submit"
    with pytest.raises(OptionError, match=told) as caught:
        await aiogpu.init(address=address)
    assert str(caught.value).startswith(f"init(address={address!r}): ")
    monkeypatch.setenv("AIOGPU_ADDRESS", address)
    with pytest.raises(OptionError, match=told) as caught:
        await aiogpu.init()
    assert str(caught.value).startswith(f"AIOGPU_ADDRESS={address!r}: ")


@pytest.mark.parametrize("address", ["raylet://host:1", "Auto", ""])
async def test_what_this_version_does_not_know(address: str) -> None:
    with pytest.raises(OptionError, match=repr(address)):
        create_engine(address, NodeOptions(), asyncio.get_running_loop())
