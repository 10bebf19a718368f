"""Tasks that tell where they are in a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import aiogpu
from tests.support.gate import pass_gate


def _node() -> str:
    return str(aiogpu.get_runtime_context().node_id)


@aiogpu.remote
def node() -> str:
    return _node()


@aiogpu.remote
def gated_node(path: str, name: str) -> str:
    pass_gate(path, name)
    return _node()


@aiogpu.remote
def told_node(path: str, name: str) -> str:
    pass_gate(path, f"{name}@{_node()}")
    return _node()


@aiogpu.remote
def gpus() -> tuple[str, list[Any], str | None]:
    return _node(), aiogpu.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")


@aiogpu.remote
def count(number: int) -> Iterator[int]:
    yield from range(number)


@aiogpu.remote
def wait_for_ever() -> None:
    while True:
        signal.pause()
