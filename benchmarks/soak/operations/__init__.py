"""All operations of the load, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from benchmarks.soak.operation import Operation
from benchmarks.soak.operations import actors, flowing, plain, reserved, values

OPERATIONS: Final[dict[Callable[[Operation], Awaitable[None]], int]] = {
    plain.on_cpus: 300,
    plain.on_gpus: 100,
    plain.leaving_a_daemon: 3,
    plain.tried_once: 60,
    plain.gone_wild: 6,
    plain.together: 10,
    plain.several: 15,
    plain.nested: 40,
    plain.bloated: 2,
    flowing.stream: 40,
    flowing.mapped: 12,
    values.shared: 20,
    values.passed_on: 20,
    values.sent_along: 15,
    values.given_up: 8,
    values.hoarded: 3,
    actors.resident: 50,
    actors.named: 15,
    actors.pooled: 3,
    reserved.leased: 15,
    reserved.placed: 10,
}
