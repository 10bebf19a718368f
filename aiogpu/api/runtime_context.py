"""What a task may ask about where it runs: its ids, its resources, its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiogpu.client.current import current, method_called
from aiogpu.worker.chunk import plain_name


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """The facts of the running task; zeros and empty ones outside of any.

    Attributes:
        node_id: the node's id.
        worker_id: the worker's number.
        task_id: the task's number.
        task_name: its name; in an actor's method `Actor.method`, and in the actor's
            constructor and in threads that a method has started `Actor`.
        actor_id: the actor's number, None in a task.
        assigned_resources: what it holds, `{"CPU": 1.0, "GPU": 0.25}`.
    """

    node_id: str
    worker_id: int
    task_id: int
    task_name: str
    actor_id: int | None
    assigned_resources: Mapping[str, float]
    _accelerators: Mapping[str, tuple[int | str, ...]]

    def get_assigned_resources(self) -> dict[str, float]:
        """Return what the task or actor holds, `{"CPU": 1.0, "GPU": 0.25}`; as Ray's.

        An actor that was placed by the usual one CPU, and gave it back, has no "CPU".
        """
        return dict(self.assigned_resources)

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """The ids of its devices as texts, by kind; every known kind is there.

        Those that its node has too, so that a worker knows kinds that the program has
        registered.
        """
        from aiogpu.accelerators.registry import kinds

        held = dict.fromkeys(kinds(), ()) | dict(self._accelerators)
        return {kind: [str(id_) for id_ in ids] for kind, ids in held.items()}


def get_runtime_context() -> RuntimeContext:
    """The context of the running task, at the moment of the call."""
    name = current.name
    if method := method_called.get():
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
    """The GPUs that the running task may use; empty outside of any.

    Integers where they are indices of the box, texts where they are UUIDs or MIG
    ids. In the task itself the first of them is `cuda:0`.
    """
    return list(current.accelerators.get("GPU", ()))
