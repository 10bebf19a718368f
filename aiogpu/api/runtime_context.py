"""What a task can ask about itself: its ids, resources and devices."""

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
            constructor and in threads that a method has started.
        actor_id: the actor's number, None in a task.
        assigned_resources: resources that it holds, `{"CPU": 1.0, "GPU": 0.25}`.
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
            """Tell what to write in place of a getter of Ray's."""
            hint = name.removeprefix("get_")
            if name == "current_actor":
                hint = "actor_id"
            is_here = hint != name and hint in type(self).__slots__
            told = f"; it is the attribute {hint!r}" if is_here else ""
            raise AttributeError(f"the runtime context has no {name!r}{told}.")

    @property
    def is_stopping(self) -> bool:
        """True once the task is to end, because its program or its node stops.

        So it is when the program gets SIGTERM under `aiogpu.run`, closes its node or
        leaves it, when a node that runs as a service is stopped, and for a task that
        is being cancelled. Asked anew each time, by reading a word of shared memory.
        The option `stop_grace` says how long the task may go on then. False outside of
        tasks.

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
        """Return the ids of its devices as texts, by kind, for every known kind.

        Kinds that the program has registered are included if the node has them.
        """
        from aiogpu.accelerators.registry import kinds

        held = dict.fromkeys(kinds(), ()) | dict(self._accelerators)
        return {kind: [str(id_) for id_ in ids] for kind, ids in held.items()}


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
    """Return the GPUs that the running task may use; empty outside a task.

    Indices of the machine are integers; UUIDs and MIG ids are texts. In the task
    itself the first GPU is `cuda:0`.
    """
    return list(current.accelerators.get("GPU", ()))
