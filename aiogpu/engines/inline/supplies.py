"""Arguments of jobs that are results of others, as one process has them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from aiogpu.runtime.objects.store import filled
from aiogpu.runtime.objects.values import is_complete
from aiogpu.serialization.payload import Payload

if TYPE_CHECKING:
    from aiogpu.engines.inline.job import Job
    from aiogpu.runtime.objects.values import Value


class Expected(Enum):
    """When the arguments of a job come."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


def expect(job: Job) -> None:
    """Have a job looked at again when its arguments come."""
    payload = job.call.payload
    if type(payload) is Payload and not is_complete(payload):
        for value in dict.fromkeys(payload.needs):
            value.watch(lambda _: job.runner.wake())


def needed_by(job: Job) -> tuple[Value, ...]:
    """The arguments of a job that are still to come, each once."""
    payload = job.call.payload
    if type(payload) is not Payload:
        return ()
    return tuple(value for value in dict.fromkeys(payload.needs) if value.is_pending)


def expected(job: Job) -> Expected:
    """When the arguments of a job come; if never, who waits for it is told why."""
    payload = job.call.payload
    if type(payload) is not Payload or is_complete(payload):
        return Expected.NOW
    for value in payload.needs:
        if value.has_failed:
            receiver, job.call.receiver = job.call.receiver, None
            if receiver is not None:
                value.tell(receiver)
            return Expected.NEVER
    return Expected.LATER


def supplied(payload: bytes) -> bytes:
    """The payload of a call that begins, with the values that it needs."""
    return filled(payload) if type(payload) is Payload else payload
