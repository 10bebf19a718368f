"""What one function under `@aiogpu.batch` has, before its first call and after it.

Light to import: user modules bring the decorator into every worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from weakref import WeakValueDictionary


class Batching:
    """One decorated function.

    Attributes:
        name: of the function, for messages.
        function: takes a list, and before it the instance if it is a method.
        is_method: whether it does.
        max_size: most items in a batch.
        max_wait: seconds that the first of them waits for others.
        max_concurrency: most batches at once, for each instance and loop.
        gatherings: what goes on now, by the identities of loop and instance.
        join: makes a call; None before the first.
    """

    def __init__(
        self,
        function: Callable[..., Coroutine[Any, Any, Sequence[Any]]],
        max_size: int,
        max_wait: float,
        max_concurrency: int,
    ) -> None:
        self.name = function.__qualname__.rpartition("<locals>.")[2]
        self.function = function
        self.is_method = len(inspect.signature(function).parameters) == 2
        self.max_size = max_size
        self.max_wait = max_wait
        self.max_concurrency = max_concurrency
        self.gatherings: WeakValueDictionary[tuple[int, int], Any]
        self.gatherings = WeakValueDictionary()
        self.join: Callable[[Batching, object, object], Any] | None = None

    def __reduce__(self) -> tuple[type[Batching], tuple[Any, ...]]:
        limits = (self.max_size, self.max_wait, self.max_concurrency)
        return Batching, (self.function, *limits)
