"""An engine that runs nothing: it notes what is asked of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiogpu.client.function_spec import (
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.client.interface import Receiver
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.errors import InfeasibleError
from aiogpu.observe.why import Why


def func(name: str = "train") -> FunctionSpec:
    """A function of a function that nobody runs."""
    request = Request.of({"CPU": UNIT}, {})
    return FunctionSpec(
        id=new_func_id(),
        function=Function(new_function_id(), b"pickled"),
        spec=TaskSpec(name, Shape(request)),
        resources=request.as_numbers(),
        environ={},
        is_coroutine=False,
    )


@dataclass(eq=False)
class PaperEngine:
    """Opens and closes when the test lets it; `story` tells what it was asked.

    Attributes:
        may_open: set when `open` may end.
        may_close: set when `close` may end.
        open_error: what `open` raises in the end.
        close_error: what `close` raises in the end.
        infeasible: names of tasks that are refused.
        ended: numbers of tasks that it does not know any more.
    """

    may_open: asyncio.Event = field(default_factory=asyncio.Event)
    may_close: asyncio.Event = field(default_factory=asyncio.Event)
    open_error: BaseException | None = None
    close_error: BaseException | None = None
    infeasible: set[str] = field(default_factory=set)
    story: list[str] = field(default_factory=list)
    receivers: dict[int, Receiver] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    waits = None
    home = "paper"
    remote_values = None
    has_gone = False

    def __post_init__(self) -> None:
        self.may_open.set()
        self.may_close.set()

    def __repr__(self) -> str:
        return "<PaperEngine>"

    async def open(self) -> None:
        self.story.append("open")
        await self.may_open.wait()
        if self.open_error is not None:
            raise self.open_error
        self.story.append("opened")

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        if func.spec.name in self.infeasible:
            raise InfeasibleError(f"{func.spec.name} asks for too much.")
        task = len(self.receivers) + 1
        self.receivers[task] = receiver
        self.story.append(f"submit {func.spec.name}")
        return task

    def cancel(self, task: int) -> None:
        self.story.append(f"cancel {task}")

    async def total(self) -> dict[str, float]:
        return {"CPU": 4.0}

    async def available(self) -> dict[str, float]:
        return {"CPU": 3.0}

    async def status(self) -> str:
        return "status"

    async def why(self, task: int) -> Why | None:
        self.story.append(f"why {task}")
        return None if task in self.ended else Why("train", task, "running")

    async def close(self) -> None:
        self.story.append("close")
        await self.may_close.wait()
        if self.close_error is not None:
            raise self.close_error
        self.story.append("closed")

    def force_close(self) -> None:
        self.story.append("force_close")

    def close_now(self) -> None:
        self.story.append("close_now")

    def after_fork(self) -> None:
        """A fork of its program says nothing."""
