"""What becomes of a step in which aiogpu itself fails.

A bug of ours costs what it concerns, and no more: whoever waits is told an
`InternalError` with the cause, what the task held becomes free, and its worker goes on
where it is certain what that has been told. The traceback is logged besides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
"""The messages that are answered, under the number `child`."""


class Faults:
    """Makes good what has failed on one node."""

    def __init__(
        self,
        scheduler: Scheduler,
        calls: ShardedDict[Call],
        pool: Pool,
        send_alone: Callable[[WorkerId, TaskId], None],
        feed: Feed,
    ) -> None:
        self._scheduler = scheduler
        self._calls = calls
        self._pool = pool
        self._send_alone = send_alone
        self._feed = feed
        self._ways: Final[dict[type[Effect], Callable[..., None]]] = {
            effects.Assign: self._not_assigned,
            effects.Ahead: self._not_sent_ahead,
            effects.Spawn: lambda it, fault: self._pool.give_up(it.worker, fault),
            effects.Granted: lambda it, fault: self._cancel(it.task, fault),
        }

    def on_effect(self, effect: Effect, error: Exception) -> None:
        """An effect was not carried out, or not all of it."""
        about = {k: getattr(effect, k, None) for k in ("task", "worker", "tasks")}
        name = type(effect).__name__
        _log.error("! failed to carry out %s", _brief(name, about), exc_info=error)
        fault = internal_error(f"carried out {name}", error)
        way = self._ways.get(type(effect))
        if way is None:
            self._make_good(self._end, about, fault)
        else:
            self._make_good(way, effect, fault)

    def on_event(self, step: Step, args: tuple[object, ...], error: Exception) -> None:
        """The core has failed to take in an event: this step, with these arguments."""
        own = ("self", "now", "effects")
        named = [n for n in signature(step).parameters if n.strip("_") not in own]
        about = dict(zip(filter(lambda n: n.strip("_"), named), args, strict=False))
        _log.error(
            "! failed to take in %s", _brief(step.__name__, about), exc_info=error
        )
        fault = internal_error(f"took in {step.__name__}", error)
        self._make_good(self._end, about, fault, step is Scheduler.cancel)

    def on_message(
        self, worker: LiveWorker, message: Message, error: Exception
    ) -> None:
        """What a worker says was not taken in, for no fault of its own."""
        what = type(message).__name__
        _log.error(
            "! failed to take in %s of worker %d", what, worker.id, exc_info=error
        )
        fault = internal_error(f"took in {what} of a worker", error)
        self._make_good(self._not_heard, worker, message, fault)

    def _make_good(self, way: Callable[..., None], *what: object) -> None:
        try:
            way(*what)
        except Exception:  # noqa: BLE001 - there is nobody left to be told
            _log.exception("! could not make good %r", what)

    def _not_assigned(self, effect: effects.Assign, fault: Exception) -> None:
        """End a task that was not sent; a worker that has run others goes on."""
        call, worker = self._calls[effect.task], self._pool.workers.get(effect.worker)
        is_bound = not (effect.is_first or effect.is_last or call.func.actor)
        if worker is None or call.receiver is None or not is_bound:
            # Nobody knows whether it has its environment, or that it is to end.
            self._cancel(effect.task, fault)
            self._end_worker(effect.worker, fault)
            return
        worker.unlearn(call.func)
        call.answer = pack_own_error(fault)._replace(task=effect.task)
        self._feed(Scheduler.finish, effect.task, effect.worker)

    def _not_sent_ahead(self, effect: effects.Ahead, fault: Exception) -> None:
        """Send tasks one by one that were not sent together."""
        worker = self._pool.workers[effect.worker]
        for task in effect.tasks:
            try:
                worker.unlearn(self._calls[task].func)
                self._send_alone(effect.worker, task)
            except Exception as error:  # noqa: BLE001 - it is told to who waits
                self._cancel(task, internal_error("sent a task to a worker", error))

    def _not_heard(
        self, worker: LiveWorker, message: Message, fault: Exception
    ) -> None:
        if tell_asker(worker, message, fault):
            return
        task = TaskId(getattr(message, "task", 0))
        call = self._calls.get(task)
        if call is not None and call.worker == worker.id:
            self._cancel(task, fault)
        self._end_worker(WorkerId(worker.id), fault)

    def _end(
        self, about: dict[str, Any], fault: Exception, is_cancelled: bool = False
    ) -> None:
        """Tell the owner of the task that something was about, and end the worker."""
        task, worker = about.get("task"), about.get("worker")
        if task is not None and (call := self._calls.get(task)) is not None:
            call.tell(fault)
            if not is_cancelled:
                self._feed(Scheduler.cancel, task)
        if worker is not None:
            self._end_worker(worker, fault)

    def _cancel(self, task: TaskId, fault: Exception) -> None:
        self._calls[task].tell(fault)
        self._feed(Scheduler.cancel, task)

    def _end_worker(self, worker: WorkerId, fault: Exception) -> None:
        """End a worker of which nobody knows any more what it was told."""
        try:
            if worker in self._pool.workers:
                self._pool.end_for_fault(worker, str(fault))
        except Exception:
            record = self._scheduler.workers.get(worker)
            tasks = [] if record is None else [record.task, *record.queue]
            for one in tasks:
                if one is not None:
                    self._calls[one.id].tell(fault)
            raise


def _brief(name: str, about: dict[str, Any]) -> str:
    """Return what it is, and about which task and worker; its `repr` may fill pages."""
    named = {key: about.get(key) for key in ("task", "worker", "tasks")}
    told = ", ".join(f"{k} {v}" for k, v in named.items() if v is not None)
    return f"{name}({told})"


def tell_asker(caller: Caller, message: Message, fault: Exception) -> bool:
    """Tell who has asked something by a message; False if nobody waits for it."""
    if not isinstance(message, _QUESTIONS):
        return False
    settle(Child(caller, message.child), fault)
    return True
