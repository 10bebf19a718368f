"""A tree of tasks has as many as the workload counts."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.environments import aiogpu_tree
from benchmarks.method import FULL
from benchmarks.workloads import nested


def here(function):
    """A remote function that runs at once, in this process."""
    return SimpleNamespace(remote=function)


@pytest.fixture
def at_once(monkeypatch):
    """aiogpu's tree without aiogpu: a handle is its value."""
    monkeypatch.setattr(aiogpu_tree, "_get", lambda handles: handles)
    branch = aiogpu_tree.branch.__wrapped__
    monkeypatch.setattr(aiogpu_tree, "leaf", here(aiogpu_tree.leaf.__wrapped__))
    monkeypatch.setattr(aiogpu_tree, "branch", here(branch))


@pytest.mark.usefixtures("at_once")
def test_a_plain_tree_counts_what_is_below():
    assert aiogpu_tree.root.__wrapped__(5) == 5 + 5 * 4


@pytest.mark.usefixtures("at_once")
async def test_a_tree_of_coroutines_counts_what_is_below(monkeypatch):
    async def leaf(_number):
        return 0

    branch = aiogpu_tree.async_branch.__wrapped__
    monkeypatch.setattr(aiogpu_tree, "leaf", here(leaf))
    monkeypatch.setattr(aiogpu_tree, "async_branch", here(branch))
    assert await aiogpu_tree.async_root.__wrapped__(5) == 5 + 5 * 4


class Grove:
    """An environment whose tasks are coroutines of this loop."""

    def __init__(self):
        self.asked = []

    async def open(self, num_cpus, num_gpus=0):
        self.asked.append((num_cpus, num_gpus))

    async def close(self):
        self.asked.append("closed")

    def task(self, function, _need):
        async def run(number):
            return function(number)

        return lambda number: asyncio.ensure_future(run(number))

    def tree(self, is_async):
        self.asked.append(is_async)

        async def root(width):
            return width + width * (width - 1)

        return lambda width: asyncio.ensure_future(root(width))


async def test_a_tree_is_measured_beside_as_many_flat_calls():
    grove = Grove()
    rows = await nested.measure(grove, replace(FULL, width=3, trees=2))
    assert [row.name for row in rows] == ["nested: plain", "nested: coroutines"]
    assert grove.asked == [False, (1, 0), "closed", True, (1, 0), "closed"]
    for row in rows:
        assert row.verdict in {"met", "not met"}
        assert len(row.samples) == len(row.floor_samples) == 2
