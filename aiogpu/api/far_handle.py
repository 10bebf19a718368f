"""Handles of a program whose node is another process.

Others refer to their results by ids of this program's, which the node is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from aiogpu.api.handle import Handle

if TYPE_CHECKING:
    from aiogpu.api.handle import Owner
    from aiogpu.engines.base import Far
    from aiogpu.wire.outgoing import Reference
    from aiogpu.worker.loans import Loan

T = TypeVar("T")


class FarHandle(Handle[T]):
    """See above."""

    __slots__ = ("_far", "_loan")

    def __init__(
        self,
        task_name: str,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        far: Far,
    ) -> None:
        super().__init__(task_name, owner, loop)
        self._far = far
        self._loan: Loan | None = None

    def share(self) -> Reference:
        """What others refer to who are given this handle; it is a holder as well."""
        if self._loan is None:
            # Somebody wants it from here on, whoever withdraws.
            self._callbacks_added += 1
            self._loan = self._far.shares.share(self)
        return self._loan
