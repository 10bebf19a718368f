"""What user code may ask about where it runs.

One value per process, since a worker runs one task at a time; its threads and
coroutines see the same.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu.worker.children import Children
    from aiogpu.worker.loans import Loans


class ActorExit(BaseException):
    """Raised by `exit_actor()`; no `Exception`, so that no method swallows it."""


class Context:
    """The worker's and its current task's facts.

    Attributes:
        is_actor: whether this process is an actor.
        loader: the thread that unpickles a function, a class or arguments, which may
            import their modules, or preloads some; 0 for none.
        children: what the task has started; None in a process that is no worker.
        loans: what this worker was lent; None in a process that is no worker.
        node: id of the node, empty in a process that is no worker.
        home: the node whose actors' numbers are meant here; "" where none has others'.
        worker: id of the worker, 0 in a process that is none.
        task: id of the running task, 0 between tasks.
        name: the running task's name.
        resources: what it holds, `{"CPU": 1.0, "GPU": 0.25}`.
        accelerators: device ids by kind, `{"GPU": (0,)}`.
    """

    __slots__ = (
        "accelerators",
        "children",
        "home",
        "is_actor",
        "loader",
        "loans",
        "name",
        "node",
        "resources",
        "task",
        "worker",
    )

    def __init__(self) -> None:
        self.children: Children | None = None
        self.is_actor = False
        self.loader = 0
        self.loans: Loans | None = None
        self.node = ""
        self.home = ""
        self.worker = 0
        self.task = 0
        self.name = ""
        self.resources: Mapping[str, float] = {}
        self.accelerators: Mapping[str, tuple[int | str, ...]] = {}

    @property
    def is_loading(self) -> bool:
        """Whether this thread imports modules, or may, for a task that is to begin."""
        return self.loader == get_ident()


passing: dict[int, list[int]] = {}
"""By thread, actors to which it has pickled handles that it has not sent yet."""
kept: dict[int, list[object]] = {}
"""By thread, what keeps these actors alive, in a program."""


def note_passed(actor: int, tie: object = None) -> None:
    """This thread pickles a handle to an actor, for what it sends next.

    Args:
        actor: its id.
        tie: what keeps it alive until that was sent; None in a worker.
    """
    me = get_ident()
    passing.setdefault(me, []).append(actor)
    if tie is not None:
        kept.setdefault(me, []).append(tie)


def take_kept() -> list[object]:
    """What keeps the actors alive whose handles are in what this thread sends next."""
    me = get_ident()
    passing.pop(me, None)
    return kept.pop(me, [])


def take_passing() -> tuple[int, ...]:
    """The actors to which what this thread sends next holds handles."""
    return tuple(passing.pop(get_ident(), ()))


current = Context()
"""The context of this process."""
