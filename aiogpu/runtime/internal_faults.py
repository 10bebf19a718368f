"""Handles steps in which aiogpu itself fails.

A bug in aiogpu affects only the task concerned: its owner gets an `InternalError` with
the cause, and its resources become free. Its worker goes on if the worker's state is
certain, else it is ended. The traceback is logged. Loaded with the first fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core import effects
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.scheduler.scheduler import Feed, Scheduler, Step
from aiogpu.runtime.callers.caller import Child
from aiogpu.runtime.pending_tasks import internal_error, settle
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.wire.messages import Ask, Fetch, Find, Inquire, Message, Submit, TakeLease

if TYPE_CHECKING:
    from aiogpu.core.effects import Effect
    from aiogpu.core.queue.sharded_dict import ShardedDict
    from aiogpu.runtime.callers.caller import Caller
    from aiogpu.runtime.pending_tasks import Call
    from aiogpu.runtime.workers.pool import Pool
    from aiogpu.runtime.workers.slots import LiveWorker


_log: Final = logging.getLogger(__name__)


_QUESTIONS: Final = (Submit, Ask, Find, Fetch, Inquire, TakeLease)
"""The messages that get an answer, under the number `child`."""


class Faults:
    """Fails the tasks, and ends the workers, that a failed step has affected."""

    def __init__(
        self,
        calls: ShardedDict[Call],
        pool: Pool,
        send_alone: Callable[[WorkerId, TaskId], None],
        feed: Feed,
    ) -> None:
        self._calls = calls
        self._pool = pool
        self._send_alone = send_alone
        self._feed = feed

    def on_effect(self, effect: Effect, error: Exception) -> None:
        """Handle that an effect was not, or only partly, carried out."""
        about = {k: getattr(effect, k, None) for k in ("task", "worker", "tasks")}
        what = _brief(type(effect).__name__, about)
        with _settling(f"carry out {what}", f"carried out {what}", error) as fault:
            if isinstance(effect, effects.Assign):
                self._on_unassigned(effect, fault)
            elif isinstance(effect, effects.Ahead):
                self._send_one_by_one(effect)
            elif isinstance(effect, effects.Spawn):
                self._pool.give_up(effect.worker, fault)
            else:
                self._end(about["task"], about["worker"], fault)

    def on_event(self, step: Step, args: tuple[object, ...], error: Exception) -> None:
        """Handle that a step of the core has failed."""
        own = ("self", "now", "effects")
        named = [n for n in signature(step).parameters if n.strip("_") not in own]
        about: dict[str, Any] = dict(
            zip(filter(lambda n: n.strip("_"), named), args, strict=False)
        )
        what = _brief(step.__name__, about)
        with _settling(f"handle {what}", f"handled {what}", error) as fault:
            is_cancelled = step is Scheduler.cancel
            self._end(about.get("task"), about.get("worker"), fault, is_cancelled)

    def on_message(
        self, worker: LiveWorker, message: Message, error: Exception
    ) -> None:
        """Handle that aiogpu has failed to handle a worker's message."""
        what = f"{type(message).__name__} of worker {worker.id}"
        with _settling(f"handle {what}", f"handled {what}", error) as fault:
            if not fail_request(worker, message, fault):
                task = TaskId(getattr(message, "task", 0))
                call = self._calls.get(task)
                runs_here = call is not None and call.worker == worker.id
                self._end(task if runs_here else None, WorkerId(worker.id), fault)

    def _on_unassigned(self, effect: effects.Assign, fault: Exception) -> None:
        """Fail a task that was not sent; a worker that ran tasks before goes on."""
        call, worker = self._calls[effect.task], self._pool.workers.get(effect.worker)
        is_bound = not (effect.is_first or effect.is_last or call.func.actor)
        if worker is None or call.receiver is None or not is_bound:
            # The worker may not know its environment, or that it has to end.
            self._end(effect.task, effect.worker, fault)
            return
        worker.unlearn(call.func)
        call.answer = pack_own_error(fault)._replace(task=effect.task)
        self._feed(Scheduler.finish, effect.task, effect.worker)

    def _send_one_by_one(self, effect: effects.Ahead) -> None:
        """Send tasks one by one that could not be sent together."""
        worker = self._pool.workers[effect.worker]
        for task in effect.tasks:
            try:
                worker.unlearn(self._calls[task].func)
                self._send_alone(effect.worker, task)
            except Exception as error:  # noqa: BLE001 - passed to the owner
                fault = internal_error("sent a task to a worker", error)
                self._end(task, None, fault)

    def _end(
        self,
        task: TaskId | None,
        worker: WorkerId | None,
        fault: Exception,
        is_cancelled: bool = False,
    ) -> None:
        """Fail the task, and end a worker whose state is unknown."""
        call = None if task is None else self._calls.get(task)
        if task is not None and call is not None:
            call.fail(fault)
            if not is_cancelled:
                self._feed(Scheduler.cancel, task)
        if worker is not None and worker in self._pool.workers:
            self._pool.end_for_fault(worker, str(fault))


@contextmanager
def _settling(doing: str, done: str, error: Exception) -> Iterator[Exception]:
    """Log a fault and yield its error; log an exception of the block as well."""
    _log.error("! failed to %s", doing, exc_info=error)
    try:
        yield internal_error(done, error)
    except Exception:  # noqa: BLE001 - nothing more can be done than to log
        _log.exception("! failed to report that aiogpu failed to %s", doing)


def _brief(name: str, about: dict[str, Any]) -> str:
    """Name a step with its task and worker only: its `repr` may fill pages."""
    named = {key: about.get(key) for key in ("task", "worker", "tasks")}
    shown = ", ".join(f"{k} {v}" for k, v in named.items() if v is not None)
    return f"{name}({shown})"


def fail_request(caller: Caller, message: Message, fault: Exception) -> bool:
    """Answer a request with an error; False if the message needs no answer."""
    if not isinstance(message, _QUESTIONS):
        return False
    settle(Child(caller, message.child), fault)
    return True
