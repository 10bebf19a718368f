"""Why an actor is dead, as it is told to each who asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.errors import ActorDiedError, ActorNameError, NodeClosedError
from aiogpu.serialization.exceptions import DIED

if TYPE_CHECKING:
    from aiogpu.runtime.call import Receiver
    from aiogpu.wire.messages import Failed


class ActorEnd:
    """An error of ours, or what its process has told of its constructor's.

    That is the user's, and is unpickled only by who asks.
    """

    def __init__(self, why: Exception | Failed) -> None:
        self._why = why

    def tell(self, receiver: Receiver) -> None:
        """Tell one more who asks."""
        if isinstance(self._why, Exception):
            receiver.fail(_again(self._why))
        else:
            receiver.reject(self._why)


def died(name: str, why: str) -> ActorDiedError:
    """The error of an actor that is dead."""
    return ActorDiedError(f"{name} is dead: {why}", name)


def leaving(name: str) -> ActorDiedError:
    """The error of a call to an actor that ends after those before it."""
    return ActorDiedError(
        f"{name} takes no more calls: it ends when it has answered those that it was "
        f"sent.",
        name,
    )


def name_taken(name: str) -> ActorNameError:
    """The error for a name that a living actor has."""
    return ActorNameError(
        f"an actor named {name!r} lives already. Give another name, or say "
        f"get_if_exists=True to have that one."
    )


def not_made(name: str, failed: Failed) -> Failed:
    """What is told of an actor whose constructor has failed so."""
    return failed._replace(task=0, kind=f"{DIED}:{failed.kind}:{name}")


def _again(end: Exception) -> Exception:
    """The same error once more: raised twice, one would grow."""
    if not isinstance(end, ActorDiedError):
        return NodeClosedError(str(end))
    told = ActorDiedError(str(end), end.actor)
    told.__cause__ = end.__cause__
    return told
