"""[B12] Tasks of tasks where all run in one process, and one at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

import aiogpu
from tests.contract import tasks

pytestmark = pytest.mark.usefixtures("no_leaks")

seen: list[object] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.types.Node]:
    async with aiogpu.init(
        address="inline", num_cpus=1, num_gpus=2, cancel_grace=0.1
    ) as session:
        yield session


@aiogpu.remote
def note(what: object) -> object:
    seen.append(what)
    return what


@aiogpu.remote
async def note_softly(what: object) -> None:
    seen.append(("begin", what))
    await asyncio.sleep(0)
    seen.append(("end", what))


@aiogpu.remote
async def parent() -> object:
    seen.append("parent begins")
    first = note.remote("child")
    second = note_softly.remote("child")
    await first
    await second
    seen.append("parent ends")
    return "parent"


async def test_children_run_before_others_that_wait(node: aiogpu.types.Node) -> None:
    handles = [parent.remote(), note.remote("other")]
    assert await asyncio.gather(*handles) == ["parent", "other"]
    assert seen == [
        "parent begins",
        "child",
        ("begin", "child"),
        ("end", "child"),
        "parent ends",
        "other",
    ]


@aiogpu.remote
async def deep(depth: int) -> int:
    return 0 if depth == 0 else 1 + await deep.remote(depth - 1)


@pytest.mark.parametrize("depth", [1, 30])
async def test_children_have_children(depth: int, node: aiogpu.types.Node) -> None:
    """With one CPU: a task that waits lends its own."""
    assert await deep.remote(depth) == depth
    assert (await aiogpu.available_resources())["CPU"] == 1.0


@aiogpu.remote
async def parent_of_a_group() -> list[object]:
    async def helper(name: str) -> object:
        return await note.remote(name)

    async with asyncio.TaskGroup() as group:
        helpers = [group.create_task(helper(name)) for name in "ab"]
        gathered = await asyncio.gather(note.remote("c"), helper("d"))
    return [helper.result() for helper in helpers] + list(gathered)


async def test_asyncio_tasks_of_a_task_start_its_children(
    node: aiogpu.types.Node,
) -> None:
    handles = [parent_of_a_group.remote(), note.remote("other")]
    results = await asyncio.gather(*handles)
    assert results == [["a", "b", "c", "d"], "other"]
    assert seen[-1] == "other"


@aiogpu.remote(num_gpus=1)
async def parent_with_gpu() -> list[object]:
    before = facts()
    child = await tasks.where.options(num_gpus=0.5, name="child").remote()
    return [before, (child["ids"], child["visible"], child["name"]), facts()]


def facts() -> tuple[object, ...]:
    name = aiogpu.get_runtime_context().task_name
    return aiogpu.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"], name


async def test_a_parent_finds_its_surroundings_again(node: aiogpu.types.Node) -> None:
    own = ([0], "0", "parent_with_gpu")
    assert await parent_with_gpu.remote() == [own, ([1], "1", "child"), own]


@aiogpu.remote(num_gpus=2)
async def greedy_parent() -> str:
    try:
        await note.options(num_gpus=0.5).remote("never")
    except aiogpu.errors.DeadlockError as error:
        return str(error)
    return "it ran"


async def test_what_its_ancestors_hold_can_never_be_had(
    node: aiogpu.types.Node,
) -> None:
    said = await greedy_parent.remote()
    assert "note asks for {CPU: 1, GPU: 0.5}" in said
    assert "greedy_parent holds {CPU: 1, GPU: 2} and waits for note" in said
    assert await note.options(num_gpus=2).remote("after") == "after"


@aiogpu.remote
async def careless_parent() -> str:
    seen.extend([note.remote("orphan"), note_softly.remote("orphan")])
    return "has ended"


async def test_children_end_with_their_parent(node: aiogpu.types.Node) -> None:
    """What has not begun never runs."""
    handles = [careless_parent.remote(), note.remote("other")]
    assert await asyncio.gather(*handles) == ["has ended", "other"]
    orphans, seen[:2] = seen[:2], []
    for orphan in orphans:
        assert isinstance(orphan, aiogpu.Handle)
        with pytest.raises(aiogpu.TaskCancelledError, match="had started it has ended"):
            await orphan
    assert seen == ["other"]


@aiogpu.remote
async def wait_for_ever() -> None:
    seen.append("child begins")
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        seen.append("child ends")


@aiogpu.remote(num_gpus=1)
async def waiting_parent() -> None:
    try:
        await wait_for_ever.options(num_gpus=1).remote()
    finally:
        seen.append("parent ends")


async def test_cancelling_a_parent_cancels_the_child_it_awaits(
    node: aiogpu.types.Node,
) -> None:
    before = dict(os.environ)
    handle = waiting_parent.remote()
    while not seen:
        await asyncio.sleep(0)
    status = await aiogpu.status()
    assert [worker.task for worker in status.workers] == [
        "waiting_parent",
        "wait_for_ever",
    ]
    handle.cancel()
    assert await note.options(num_gpus=2).remote("after") == "after"
    assert seen == ["child begins", "parent ends", "child ends", "after"]
    assert dict(os.environ) == before


@aiogpu.remote
async def leaving_parent() -> str:
    """Ends while its child runs, and tells of itself in its own asyncio task."""
    child = wait_for_ever.remote()
    child.add_done_callback(lambda _: None)
    while not seen:
        await asyncio.sleep(0)
    return "left"


async def test_a_child_that_runs_ends_with_its_parent(node: aiogpu.types.Node) -> None:
    assert await leaving_parent.remote() == "left"
    assert aiogpu.get_runtime_context().worker_id == 2, "its child still runs"
    assert await note.remote("after") == "after"
    assert seen == ["child begins", "child ends", "after"]


async def test_a_shutdown_ends_parents_and_children() -> None:
    before = dict(os.environ)
    async with aiogpu.init(address="inline", num_cpus=1, num_gpus=2):
        handle = waiting_parent.remote()
        while not seen:
            await asyncio.sleep(0)
        waiting = note.remote("never")
    for ended in (handle, waiting):
        with pytest.raises(aiogpu.errors.NodeClosedError):
            await ended  # type: ignore[misc]
    assert "never" not in seen
    assert dict(os.environ) == before
    assert aiogpu.get_runtime_context().worker_id == 0


@aiogpu.remote
async def open_a_node() -> None:
    await aiogpu.init(address="inline")


async def test_a_task_opens_no_node(node: aiogpu.types.Node) -> None:
    with pytest.raises(aiogpu.errors.NodeError, match="inside a task"):
        await open_a_node.remote()
