"""Running out of device memory in this process: told as a worker's is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.engines.inline.outcome import Outcome
from aiogpu.runtime.devices.memory_shortage import told_instead
from aiogpu.worker.gpu import has_run_out, peak_memory

if TYPE_CHECKING:
    from aiogpu.engines.inline.job import Job


def with_shortage(job: Job, outcome: Outcome) -> Outcome:
    """The outcome, told otherwise if its error is that of a task with devices."""
    worker, failed = job.at_work, outcome.answer
    is_ours = worker is not None and worker.lease is not None and worker.lease.shares
    error = None if outcome.is_ctrl_c else outcome.error
    if worker is None or not is_ours or error is None or not has_run_out(error):
        return outcome
    node = job.runner.node
    told = told_instead(job.name, worker, node, failed, peak_memory())  # type: ignore[arg-type]
    return outcome._replace(answer=told, original=failed)  # type: ignore[arg-type]
