"""aiogpu, as a node inside the program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import aiogpu
from aiogpu.core.effects import Assign
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Device, Shape, TaskSpec
from aiogpu.core.model.units import CPU, GPU, quantity
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.status import NodeStatus
from benchmarks.environments.aiogpu_paper import AiogpuPaper, request_of
from benchmarks.port import (
    Call,
    Create,
    Gatherer,
    Mapped,
    Need,
    OnBatch,
    OnItem,
    Preload,
    Programs,
    UnsupportedError,
    Use,
)

T = TypeVar("T")

IMAGE: Final = Path(__file__).with_name("aiogpu_image.py")
FIRST_RESULT = """
from time import perf_counter_ns
from aiogpu import init, remote, run

@remote
def noop(number):
    return None

async def main():
    start = perf_counter_ns()
    async with init():
        await noop.remote(1)
        print(perf_counter_ns() - start, flush=True)

run(main())
"""


class AiogpuLocal:
    """An embedded node for each workload."""

    name = "aiogpu"
    libraries = ("aiogpu", "uvloop", "msgpack", "cloudpickle", "nvidia-ml-py")
    lasting: Mapping[str, str] = MappingProxyType(
        {"zygote": "aiogpu-zygote", "keepers": "aiogpu-keep"}
    )
    programs = Programs(
        "import aiogpu", "from aiogpu import init, remote", FIRST_RESULT
    )

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start a node."""
        await aiogpu.init(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            preload="auto" if preload is None else preload,
        )

    def image(self, preload: Preload = None) -> str:
        """The text of `aiogpu_image`, and the call that makes it a zygote."""
        source = IMAGE.read_text(encoding="utf-8")
        return f"{source}\nbecome({list(preload or ())}, {preload is None})"

    async def free_gpus(self) -> float:
        """`available_resources()`."""
        return (await aiogpu.available_resources())["GPU"]

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """`f.remote`, which is what a program calls."""
        return aiogpu.remote(
            num_cpus=need.num_cpus,
            num_gpus=need.num_gpus,
            max_calls=1 if need.is_isolated else 0,
            cancel_grace=need.grace,
        )(function).remote

    def taking(self, function: Callable[..., object]) -> Use:
        """`f.remote`, whose arguments may be handles."""
        if not hasattr(aiogpu, "put"):
            raise UnsupportedError("in this version of aiogpu handles are no arguments")
        return aiogpu.remote(function).remote

    async def keep(self, value: object) -> object:
        """`put`."""
        return await aiogpu.put(value)

    def stream(
        self, function: Callable[[int], Any]
    ) -> Callable[[int], AsyncIterator[int]]:
        """`f.remote`, which is what a program iterates."""
        if not hasattr(aiogpu, "Stream"):
            raise UnsupportedError("this version of aiogpu has no streams")
        start: Callable[[int], AsyncIterator[int]] = aiogpu.remote(function).remote
        return start

    def actor(self, cls: type) -> Create:
        """`A.remote`, which is what a program calls; a handle of it keeps it alive."""
        if not hasattr(aiogpu, "ActorHandle"):
            raise UnsupportedError("this version of aiogpu has no actors")
        remote_class: Any = aiogpu.remote(cls)

        async def create() -> Call[None]:
            handle = await remote_class.remote()
            call: Call[None] = handle.noop.remote
            return call

        return create

    def decision(self, num_gpus: int, need: Need) -> Callable[[int], None]:
        """A scheduler with one paper worker that has run such a task before."""
        gpus = DeviceSet(GPU, [Device(index) for index in range(num_gpus)])
        scheduler = Scheduler(Ledger({CPU: quantity("num_cpus", 4)}, [gpus]))
        spec = TaskSpec("noop", Shape(request_of(need)))
        worker = WorkerId(1)

        def cycle(number: int) -> None:
            task = TaskId(number)
            effects = scheduler.submit(0.0, task, spec)
            assert type(effects[0]) is Assign, effects
            scheduler.finish(0.0, task, worker)

        scheduler.submit(0.0, TaskId(-1), spec)
        scheduler.worker_started(0.0, worker)
        scheduler.finish(0.0, TaskId(-1), worker)
        return cycle

    def paper(self, num_cpus: int, num_gpus: int) -> AiogpuPaper:
        """A scheduler on paper."""
        return AiogpuPaper(num_cpus, num_gpus)

    async def picture(self) -> NodeStatus:
        """`status()`."""
        return await aiogpu.status()

    def tree(self, is_async: bool) -> Call[int]:
        """The tasks of `aiogpu_tree`."""
        if not hasattr(aiogpu, "get"):
            raise UnsupportedError("in this version of aiogpu tasks start no tasks")
        from benchmarks.environments.aiogpu_tree import async_root, root

        return async_root.remote if is_async else root.remote

    def batched(self, function: OnBatch, size: int) -> OnItem:
        """`batch`, with which no call waits for others longer than it must."""
        return aiogpu.batch(max_size=size)(function)

    async def batched_actor(self, function: OnBatch, size: int) -> Gatherer:
        """An async actor with a plain method and one under `batch`."""

        class Batching:
            async def by_hand(self, numbers: list[int]) -> list[int]:
                return await function(numbers)

            @aiogpu.batch(max_size=size)
            async def by_item(self, numbers: list[int]) -> list[int]:
                return await function(numbers)

        remote_class: Any = aiogpu.remote(Batching)
        actor = await remote_class.remote()
        return Gatherer(actor.by_hand.remote, actor.by_item.remote)

    def mapped(
        self,
        function: Callable[[int], int],
        on_list: Callable[[list[int]], list[int]],
    ) -> Mapped:
        """`f.map(..., chunk="auto")`."""
        if not hasattr(aiogpu, "as_completed"):
            raise UnsupportedError("maps of this version of aiogpu have no chunks")
        remote = aiogpu.remote(function)
        return Mapped(aiogpu.remote(on_list).remote, partial(remote.map, chunk="auto"))

    async def close(self) -> None:
        """Shut the node down."""
        await aiogpu.shutdown()
