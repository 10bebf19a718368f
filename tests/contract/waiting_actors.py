"""Actors and tasks that call each other and wait. Light to import."""

from __future__ import annotations

from typing import Any

import aiogpu
from tests.support.gate import pass_gate


class Plain:
    """Passes a call on along a list of actors, and waits for it."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def answer(self) -> str:
        return self.name

    def relay(self, others: list[Any]) -> str:
        if not others:
            return self.name
        return self.name + str(aiogpu.get(others[0].relay.remote(others[1:])))

    def ask_for_a_while(self, others: list[Any]) -> str:
        try:
            aiogpu.get(others[0].relay.remote(others[1:]), timeout=0.1)
        except aiogpu.TaskTimeoutError:
            return "too late"
        return "in time"

    def meet_and_ask(self, others: list[Any], path: str) -> str:
        pass_gate(path, self.name)
        return str(aiogpu.get(others[0].answer.remote()))

    def ask_by_task(self, me: list[Any]) -> str:
        return str(aiogpu.get(ask.remote(me)))

    def ask_by_maker(self, me: list[Any]) -> str:
        return str(aiogpu.get(Asking.remote(me).answer.remote()))


@aiogpu.remote
class Player(Plain):
    """One call at a time."""


@aiogpu.remote(max_concurrency=2)
class Pair(Plain):
    """Two at a time."""


@aiogpu.remote
class Soft:
    """Any number at a time."""

    async def relay(self, others: list[Any]) -> str:
        if not others:
            return "s"
        return "s" + str(await others[0].relay.remote(others[1:]))


@aiogpu.remote
class Asking:
    """Waits in its constructor."""

    def __init__(self, others: list[Any]) -> None:
        self.told = aiogpu.get(others[0].answer.remote())

    def answer(self) -> str:
        return str(self.told)


@aiogpu.remote
def ask(others: list[Any]) -> str:
    return str(aiogpu.get(others[0].answer.remote()))
