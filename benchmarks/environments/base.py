"""A system that can do nothing: each environment holds only what its own can do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from benchmarks.port import (
    Call,
    Create,
    Gatherer,
    Mapped,
    Need,
    OnBatch,
    OnItem,
    Paper,
    Preload,
    Programs,
    UnsupportedError,
    Use,
)

T = TypeVar("T")


class Bare:
    """Says of every question why it cannot be answered.

    Attributes:
        title: the system as the subject of a sentence, such as "an executor".
    """

    name = "bare"
    title = "a bare environment"
    libraries: tuple[str, ...] = ()
    lasting: Mapping[str, str] = MappingProxyType({})

    def _lacks(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{self.title} {what}")

    @property
    def programs(self) -> Programs:
        """Never possible."""
        self._lacks("starts no programs")

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start nothing."""
        if preload:
            self._lacks("imports nothing beforehand")

    def image(self, preload: Preload = None) -> str:
        """Never possible."""
        self._lacks("forks no isolated tasks")

    async def free_gpus(self) -> float:
        """Never possible."""
        self._lacks("shares out no GPUs")

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """Never possible."""
        self._lacks("runs no tasks")

    def taking(self, function: Callable[..., object]) -> Use:
        """Never possible."""
        self._lacks("gives its tasks no handles")

    async def keep(self, value: object) -> object:
        """Never possible."""
        self._lacks("keeps no values")

    def stream(
        self, function: Callable[[int], Any]
    ) -> Callable[[int], AsyncIterator[int]]:
        """Never possible."""
        self._lacks("has calls of one result, and no streams")

    def actor(self, cls: type) -> Create:
        """Never possible."""
        self._lacks("has no actors")

    def decision(self, num_gpus: int, need: Need) -> Callable[[int], None]:
        """Never possible."""
        self._lacks("has no scheduler that can be had alone")

    def paper(self, num_cpus: int, num_gpus: int) -> Paper:
        """Never possible."""
        self._lacks("has no scheduler that can be had alone")

    async def picture(self) -> object:
        """Never possible."""
        self._lacks("does not tell what waits")

    def tree(self, is_async: bool) -> Call[int]:
        """Never possible."""
        self._lacks("has tasks that start no tasks")

    def batched(self, function: OnBatch, size: int) -> OnItem:
        """Never possible."""
        self._lacks("gathers no calls")

    async def batched_actor(self, function: OnBatch, size: int) -> Gatherer:
        """Never possible."""
        self._lacks("gathers no calls of actors")

    def mapped(
        self,
        function: Callable[[int], int],
        on_list: Callable[[list[int]], list[int]],
    ) -> Mapped:
        """Never possible."""
        self._lacks("does not find out how many items make a task")

    async def close(self) -> None:
        """Stop nothing."""
