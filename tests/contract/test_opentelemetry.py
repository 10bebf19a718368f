"""Spans of tasks: under the caller's span, one for the queue and one for the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

import aiogpu
from aiogpu.errors import MisuseError
from aiogpu.opentelemetry import traced
from tests.contract import span_tasks, stream_tasks, tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

OWN = pytest.mark.parametrize("address", ["local", "node"], indirect=True)


def spans_in(directory: Path) -> dict[str, dict[str, Any]]:
    """The spans that workers have written, by name."""
    texts = [path.read_text() for path in directory.iterdir()]
    lines = [line for text in texts for line in text.splitlines()]
    return {span["name"]: span for span in map(json.loads, lines)}


@OWN
async def test_a_task_has_two_spans_under_that_of_its_caller(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOGPU_TEST_SPANS", str(tmp_path))
    tracer = TracerProvider().get_tracer("program")
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        with tracer.start_as_current_span("request") as outer:
            results = await asyncio.gather(
                span_tasks.divide.remote(6, by=2), span_tasks.divide_async.remote(6)
            )
            with pytest.raises(ZeroDivisionError):
                await span_tasks.divide.options(name="broken").remote(1, by=0)
        mapped = [each async for each in span_tasks.divide.map([1, 2])]
    assert (results, mapped) == ([3, 3], [1, 2])
    spans = spans_in(tmp_path)
    context = outer.get_span_context()
    trace, parent = f"{context.trace_id:#034x}", f"{context.span_id:#018x}"
    for name in ("divide_async", "divide_async queue", "broken", "broken queue"):
        assert spans[name]["context"]["trace_id"] == trace
        assert spans[name]["parent_id"] == parent
    run, queue = spans["divide_async"], spans["divide_async queue"]
    assert queue["start_time"] < queue["end_time"] <= run["end_time"]
    assert run["attributes"]["aiogpu.GPU"] == 1
    assert run["attributes"]["aiogpu.GPU.ids"] == ["0"]
    assert spans["broken"]["status"]["status_code"] == "ERROR"
    assert spans["inner"]["parent_id"]


async def test_wrong_arguments_and_functions_are_refused() -> None:
    with pytest.raises(MisuseError, match="wrong arguments"):
        span_tasks.divide.remote(1, 2, 3)
    for function in (stream_tasks.endless, span_tasks.divide, len):
        with pytest.raises(MisuseError, match=r"traced\(\) was given"):
            traced(function)  # type: ignore[arg-type]
    async with aiogpu.init(address="inline", num_cpus=1):
        assert await traced(tasks.add).remote(1, 2) == 3
        mapped = span_tasks.divide.map([1, 2], chunk=2)
        with pytest.raises(MisuseError, match="Leave chunk= out"):
            await anext(mapped)
