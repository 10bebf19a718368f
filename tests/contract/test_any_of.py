"""The option `any_of`: the first of several requests that is free."""

from __future__ import annotations

import asyncio

import pytest

import aiogpu
from aiogpu.errors import InfeasibleError, OptionError
from aiogpu.types import Node
from tests.contract import option_tasks
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=4, num_gpus=1),
]

OWN = pytest.mark.parametrize("address", ["local", "node"], indirect=True)

EITHER = option_tasks.held.options(any_of=[{"num_gpus": 1}, {"num_cpus": 2}])


@OWN
async def test_a_task_gets_the_first_request_that_is_free(
    node: Node, gate: Gate
) -> None:
    calls = [EITHER.remote(gate.path, name) for name in ("a", "b", "c")]
    await gate.entered("a", "b")
    why = str(await calls[2].why())
    assert "GPU 1: 0 of 1 free" in why
    assert "or {CPU: 2}, for which it waits for CPU 2 (free: 1)" in why
    gate.release("a")
    assert await calls[0] == {"CPU": 1, "GPU": 1}
    await gate.entered("c")
    gate.release("b", "c")
    assert await calls[1] == {"CPU": 2}
    assert await calls[2] in ({"CPU": 1, "GPU": 1}, {"CPU": 2})


@OWN
async def test_a_nested_task_has_several_requests(node: Node) -> None:
    gpus, cpus = {"num_gpus": 8}, {"num_cpus": 1}
    assert await option_tasks.start_held.remote([gpus, cpus]) == {"CPU": 1}


@pytest.mark.parametrize("address", ["local", "node", "inline"], indirect=True)
async def test_requests_that_the_node_can_never_give_are_left_out(
    node: Node,
) -> None:
    gpus, cpus = {"num_gpus": 8}, {"num_cpus": 3}
    for entries in ([gpus, cpus], [cpus, gpus], [cpus]):
        held = option_tasks.held.options(any_of=entries)
        assert await held.remote() == {"CPU": 3}
    with pytest.raises(InfeasibleError, match=r"GPU: 8}: it lacks GPU 8 of 1; {CPU: 9"):
        option_tasks.held.options(any_of=[gpus, {"num_cpus": 9}]).remote()


@OWN
async def test_many_short_tasks_use_both(node: Node) -> None:
    calls = [EITHER.remote() for _ in range(40)]
    found = await asyncio.gather(*calls)
    assert {"CPU": 2} in found
    assert {"CPU": 1, "GPU": 1} in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"any_of": []}, "must be a list of 1 to 8 dicts"),
        ({"any_of": {"num_gpus": 1}}, "must be a list of 1 to 8 dicts"),
        ({"any_of": [{"priority": 1}]}, "an entry may have num_cpus, num_gpus"),
        ({"any_of": [{"num_gpus": -1}]}, "num_gpus=-1"),
    ],
)
def test_an_invalid_list_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        option_tasks.held.options(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["inline"], indirect=True)
async def test_resources_beside_it_are_refused(node: Node) -> None:
    with pytest.raises(OptionError, match="num_gpus is given beside it"):
        EITHER.options(num_gpus=1).remote()
    with pytest.raises(OptionError, match="placement is given beside it"):
        async with aiogpu.placement([{"CPU": 1}]) as group:
            EITHER.options(placement=group).remote()
