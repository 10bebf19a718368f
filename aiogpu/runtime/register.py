"""Who is known of a node's actors: by id, by name, and how many hold a handle."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiogpu.errors import ActorDiedError
from aiogpu.runtime.actor import Actor
from aiogpu.runtime.actor_end import name_taken
from aiogpu.runtime.actor_state import ActorState


class Register:
    """The actors that live, or of which somebody has a handle."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._actors: dict[int, Actor] = {}
        self._named: dict[tuple[str, str], Actor] = {}
        self._refused: dict[int, Exception] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._actors)}>"

    def check_name(self, key: tuple[str, str] | None) -> None:
        """Raise `ActorNameError` if a living actor has that name."""
        if key is not None and key in self._named:
            raise name_taken(key[1])

    def name(self, actor: Actor) -> None:
        """Let it be found by its name, if it has one."""
        if actor.key is not None:
            self._named[actor.key] = actor

    def add(self, actor: Actor, public: int) -> None:
        """Let it be found by its id, and by the one that a worker has given it."""
        self._actors[actor.id] = actor
        if public:
            self._actors[public] = actor
            actor.aliases.append(public)

    def get(self, actor: int) -> Actor | None:
        """An actor to which somebody holds a handle."""
        return self._actors.get(actor)

    def all(self) -> list[Actor]:
        """All that live, or to which somebody holds a handle, each once."""
        return [one for known_as, one in self._actors.items() if known_as == one.id]

    def held(self, actor: int, _name: str = "") -> Actor:
        """See `ActorsPort.held`."""
        if not self.hold(actor):
            raise self.unknown(actor)
        return self._actors[actor]

    def unknown(self, actor: int) -> Exception:
        """The error for one that never was, or to which nobody has a handle."""
        refused = self._refused.get(actor)
        return refused or ActorDiedError(
            f"the actor {actor} has ended with its last handle."
        )

    def refuse(self, public: int, error: Exception) -> None:
        """Note why one is not made that a worker wanted."""
        self._refused[public] = error

    def find(self, key: tuple[str, str]) -> Actor | None:
        """The actor of that name, if it lives; whoever asks holds one handle more."""
        actor = self._named.get(key)
        if actor is not None:
            actor.holders += 1
        return actor

    def hold(self, actor: int) -> bool:
        """One more holds a handle; False if nobody has until now."""
        found = self._actors.get(actor)
        if found is None:
            return False
        found.holders += 1
        return True

    def release(self, actor: int) -> None:
        """One who held a handle has gone."""
        found = self._actors.get(actor)
        if found is None:
            self._refused.pop(actor, None)
        else:
            found.release()
            self.forget(found)

    def release_soon(self, actor: int) -> None:
        """The same from wherever objects are dropped."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.release, actor)

    def forget(self, actor: Actor) -> None:
        """Keep it no more, if it is dead and nobody has a handle."""
        if not actor.holders and actor.state is ActorState.DEAD:
            for known_as in (actor.id, *actor.aliases):
                self._actors.pop(known_as, None)

    def free_name(self, actor: Actor) -> None:
        """Another one may have its name."""
        if actor.key is not None and self._named.get(actor.key) is actor:
            del self._named[actor.key]
