"""The runtime context: a task's own ids, resources and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.client.current import current, method_called
from aiogpu.wire.messages import plain_name


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """Facts about the running task; zeros and empty values outside a task.

    Attributes:
        node_id: the node's id.
        worker_id: the worker's number.
        task_id: the task's number.
        task_name: the task's name; `Actor.method` in a method, `Actor` in the actor's
            constructor and in threads that a method started.
        actor_id: the actor's number, None in a task.
        assigned_resources: resources that the task holds, `{"CPU": 1.0, "GPU": 0.25}`.
    """

    node_id: str
    worker_id: int
    task_id: int
    task_name: str
    actor_id: int | None
    assigned_resources: Mapping[str, float]
    _accelerators: Mapping[str, tuple[int | str, ...]]

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Raise an error that names the attribute for a getter of Ray's."""
            hint = name.removeprefix("get_")
            if name == "current_actor":
                hint = "actor_id"
            elif name == "is_canceled":
                hint = "is_stopping"
            is_known = hint != name and hint in (*type(self).__slots__, "is_stopping")
            advice = f"; use the attribute {hint!r}" if is_known else ""
            raise AttributeError(f"the runtime context has no {name!r}{advice}.")

    @property
    def is_stopping(self) -> bool:
        """True once the task should end, because its program or its node stops.

        That is when the program gets SIGTERM under `aiogpu.run`, closes its node or
        leaves a shared node, when a shared node is stopped, and when the task is
        cancelled. The task may go on for the time of its option `stop_grace`. Each
        access reads one word of shared memory. False outside tasks.

        Example:
            `for step in range(steps): ...; if context.is_stopping: save(); return`
        """
        return self.task_id != 0 and current.is_stopping(self.task_id)

    def get_assigned_resources(self) -> dict[str, float]:
        """Return the resources that the task or actor holds, as in Ray.

        An actor without `num_cpus` needs a CPU only to start, so it has no "CPU".
        """
        return dict(self.assigned_resources)

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return the ids of the task's devices as texts, by kind, for every known kind.

        Kinds that the program has registered are included if the node has them.
        """
        from aiogpu.accelerators.registry import kinds

        assigned = dict.fromkeys(kinds(), ()) | dict(self._accelerators)
        return {kind: [str(id_) for id_ in ids] for kind, ids in assigned.items()}


def get_runtime_context() -> RuntimeContext:
    """Return the context of the running task at the moment of the call."""
    name = current.name
    if method := method_called.get()[0]:
        name += f".{plain_name(method)}"
    return RuntimeContext(
        current.node,
        current.worker,
        current.task,
        name,
        current.actor,
        dict(current.resources),
        dict(current.accelerators),
    )


def get_gpu_ids() -> list[int | str]:
    """Return the ids of the GPUs that the running task may use; empty outside a task.

    An id is an index (int), or a UUID or MIG id (str), as the machine numbers its GPUs.
    Frameworks in the task number the same GPUs from 0: the first is `cuda:0`.
    """
    return list(current.accelerators.get("GPU", ()))
