"""What keeps something alive between a worker and its driver, and says when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu.worker.loans import Loans


class Loan:
    """One thing that was lent to this process. It is over when this object is.

    Attributes:
        id: of the thing.
        count: how often it came.
    """

    __slots__ = ("__weakref__", "_loans", "count", "id")

    def __init__(self, loans: Loans, identity: int, count: int = 1) -> None:
        self.id = identity
        self.count = count
        self._loans = loans

    def __repr__(self) -> str:
        return f"<Loan of {self.id}, {self.count} times>"

    def __del__(self) -> None:
        # Wherever the collector runs: in another thread, or amid user code.
        self._loans.end(self.id, self.count)


class Written:
    """A segment that this process has written for a payload, which this is part of.

    Should the payload go without having been sent, the driver is told: it has the
    segment's descriptor by then, and would wait to hear of it.

    Attributes:
        id: of the segment.
    """

    __slots__ = ("_loans", "id")

    def __init__(self, loans: Loans, identity: int) -> None:
        self.id = identity
        self._loans = loans

    def __repr__(self) -> str:
        return f"<Written {self.id}>"

    def __del__(self) -> None:
        if self.id in self._loans.unnamed:
            self._loans.end(self.id, 1)
