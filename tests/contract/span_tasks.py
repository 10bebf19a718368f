"""Traced tasks that write their spans to a file. Light to import."""

from __future__ import annotations

import os

import aiogpu
from aiogpu.opentelemetry import traced


def export() -> None:
    """Write each ended span of this process to a file, one line a span."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    out = open(f"{os.environ['AIOGPU_TEST_SPANS']}/{os.getpid()}", "w")  # noqa: SIM115
    exporter = ConsoleSpanExporter(
        out=out, formatter=lambda span: span.to_json(None) + "\n"
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


@traced
@aiogpu.remote(setup=export)
def divide(number: float, by: float = 1.0) -> float:
    """Divide, in a span of its own."""
    from opentelemetry import trace

    with trace.get_tracer("test").start_as_current_span("inner"):
        return number / by


@traced
@aiogpu.remote(setup=export, num_gpus=1)
async def divide_async(number: float) -> float:
    """Divide in a coroutine."""
    return number / 2
