"""The actors of a cluster, as a program or a task reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.engines.cluster.engine import RayEngine


class ClusterActors:
    """See `ActorsPort`."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine

    def create(self, *_args: object) -> NoReturn:
        raise MisuseError("no actors yet")

    def close(self) -> None:
        pass
