"""What workers are sent, as the core says: tasks, and what takes them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiogpu.core import effects
from aiogpu.core.effects import Effect

if TYPE_CHECKING:
    from aiogpu.core.model.ids import TaskId, WorkerId
    from aiogpu.core.queue.sharded_dict import ShardedDict
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.runtime.actors.registry import Actors
    from aiogpu.runtime.devices.binding import Assignment, NullDeviceRelease
    from aiogpu.runtime.devices.release import DeviceRelease
    from aiogpu.runtime.memory_monitor import MemoryGuard
    from aiogpu.runtime.pending_tasks import Call
    from aiogpu.runtime.workers.commands import QueueRevoker
    from aiogpu.runtime.workers.pool import Pool


class TaskDispatcher:
    """The way from decisions about tasks to their workers.

    Attributes:
        ways: how each of the core's effects is carried out that concerns this.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        calls: ShardedDict[Call],
        pool: Pool,
        actors: Actors,
        assignment: Assignment,
        device_release: DeviceRelease | NullDeviceRelease,
        guard: MemoryGuard,
        taking_back: QueueRevoker,
    ) -> None:
        self._scheduler = scheduler
        self._calls = calls
        self._pool = pool
        self._commands = pool.commands
        self._actors = actors
        self._assignment = assignment
        self._device_release = device_release
        self._guard = guard
        self._taking_back = taking_back
        self._last_number = 0
        self.ways: dict[type[Effect], Callable[..., None]] = {
            effects.Assign: self._assign,
            effects.Ahead: self._send_ahead,
            effects.Revoke: self.revoke,
            effects.Interrupt: self._interrupt,
        }

    def _assign(self, effect: effects.Assign) -> None:
        call = self._calls[effect.task]
        self._last_number += 1
        call.send_to(effect.worker, self._last_number)
        self._guard.wake()
        if effect.lease.request is not call.func.spec.shape.request:
            call.func = call.func.holding(effect.lease.request)
        bind = None
        if effect.is_first:
            bind = self._assignment.bind(effect.lease, call.func.environ)
            self._device_release.begin(effect.worker, effect.lease)
        if call.func.actor is not None:
            creation = self._actors.creation(
                self._pool.workers[effect.worker], effect.task, call
            )
            self._commands.create(effect.worker, call, bind, creation)
            return
        if effect.worker in self._actors.workers:
            self._actors.disown(effect.worker)
        self._commands.assign(effect.worker, effect.task, call, bind, effect.is_last)

    def _send_ahead(self, effect: effects.Ahead) -> None:
        worker, tasks = effect.worker, effect.tasks
        number = self._last_number
        sent: list[tuple[TaskId, Call]] = []
        for task, call in zip(tasks, self._calls.some(tasks), strict=True):
            assert call is not None, task
            number += 1
            call.worker, call.number, call.answer = worker, number, None
            sent.append((task, call))
        self._last_number = number
        self._commands.send_ahead(worker, sent)

    def send_alone(self, worker: WorkerId, task: TaskId) -> None:
        """Send one task ahead, where several could not be sent together."""
        call = self._calls[task]
        self._last_number += 1
        call.send_to(worker, self._last_number)
        self._commands.send_ahead(worker, [(task, call)])

    def revoke(self, effect: effects.Revoke) -> None:
        """Take back what a worker has not begun."""
        self._taking_back.revoke(effect.worker, effect.number, self._last_number + 1)

    def _interrupt(self, effect: effects.Interrupt) -> None:
        func, task = self._calls[effect.task].func, int(effect.task)
        if func.actor is not None and self._scheduler.is_closing:
            task = self._actors.call_off(effect.worker, effect.attempt) or task
        self._commands.interrupt(effect.worker, task, effect.attempt, func.is_coroutine)
