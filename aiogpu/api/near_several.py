"""A call of a method that has several results, in a program's own process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from aiogpu.errors import InternalError

if TYPE_CHECKING:
    from aiogpu.api.actor_link import ActorLink
    from aiogpu.api.several import Several
    from aiogpu.engines.base import ActorPort
    from aiogpu.engines.family import Host


class NearSeveral(NamedTuple):
    """A call with several results, in a program's process; see `several.Start`.

    Attributes:
        link: the tie to the actor.
        method: what is called.
        payload: the pickled arguments.
    """

    link: ActorLink
    method: str
    payload: bytes

    def in_program(self, _session: object, several: Several) -> None:
        """Make it on the program's node."""
        several.stop, several.ask = self.link.cancel, self.link.why
        self.link.ask_actor(partial(self._call, several), several.fail)

    def _call(self, several: Several, actor: ActorPort) -> None:
        if not several.done():
            several.note(actor.call(self.method, self.payload, several))

    def by_host(self, host: Host, several: Several) -> None:
        """Make it for a task that shares its program's process."""
        several.stop, several.ask = host.cancel, host.why
        self.link.ask_actor(
            lambda actor: several.note(
                host.call(actor.id, self.method, self.payload, several)
            ),
            several.fail,
        )

    def on_loop(self, _link: object, _several: object) -> NoReturn:
        """No worker has such a tie."""
        raise InternalError(f"{self!r} belongs to a program")

    def in_plain_code(self, _several: object) -> NoReturn:
        """No worker has such a tie."""
        raise InternalError(f"{self!r} belongs to a program")
