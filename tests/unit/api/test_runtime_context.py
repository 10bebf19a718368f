"""What a task may ask, here outside of any."""

from __future__ import annotations

import pytest

import aiogpu
from aiogpu.client.current import Context, current

KINDS = ("GPU", "neuron_cores", "TPU", "HPU", "NPU")


def test_outside_of_a_task() -> None:
    context = aiogpu.get_runtime_context()
    assert (context.task_id, context.worker_id, context.node_id) == (0, 0, "")
    assert context.actor_id is None
    assert context.assigned_resources == {}
    assert context.get_accelerator_ids() == {key: [] for key in KINDS}
    assert aiogpu.get_gpu_ids() == []


def test_inside_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "task": 7,
        "name": "train",
        "resources": {"GPU": 0.5},
        "accelerators": {"GPU": (3, "GPU-abc"), "FPGA": (0,)},
    }.items():
        monkeypatch.setattr(current, name, value)
    context = aiogpu.get_runtime_context()
    assert (context.task_id, context.task_name) == (7, "train")
    ids = {"GPU": ["3", "GPU-abc"], "FPGA": ["0"]}
    assert context.get_accelerator_ids() == {key: [] for key in KINDS} | ids
    assert aiogpu.get_gpu_ids() == [3, "GPU-abc"]
    monkeypatch.setattr(current, "task", 8)
    assert context.task_id == 7, "it is of the moment that it was asked for"


def test_a_fresh_one_is_empty() -> None:
    assert {getattr(Context(), name) or None for name in ("node", "task")} == {None}
