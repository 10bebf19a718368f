"""Handles of a program whose node is another process.

Others refer to their results by ids of this program's, which the node is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from aiogpu.api.handle import Handle
from aiogpu.errors import TaskCancelledError
from aiogpu.serialization.exceptions import STOPPED

if TYPE_CHECKING:
    from aiogpu.api.handle import Owner
    from aiogpu.client.interface import ValueStore
    from aiogpu.serialization.references import Reference
    from aiogpu.wire.messages import Failed


T = TypeVar("T")


class FarHandle(Handle[T]):
    """See above.

    Others may refer to it before its task is started, while the node is joined; they
    are told which task it is as soon as that has a number.
    """

    __slots__ = ("_far", "_is_promised", "_loan", "_number")

    def __init__(
        self,
        task_name: str,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        far: ValueStore,
    ) -> None:
        self._far = far
        self._loan: Reference | None = None
        self._is_promised = False
        super().__init__(task_name, owner, loop)

    @property
    def task_id(self) -> int:
        """Number of its task, 0 before that is started."""
        return self._number

    @task_id.setter
    def task_id(self, number: int) -> None:
        """It is started; what was promised of it is named."""
        self._number = number
        if number and self._is_promised and self._loan is not None:
            self._is_promised = False
            self._far.shares.keep(self._loan, self)

    @property
    def far(self) -> ValueStore | None:
        """Who knows its value; see `Handle.far`."""
        return self._far

    def share(self) -> Reference:
        """What others refer to who are given this handle; it is a holder as well."""
        if self._loan is None:
            # Somebody wants it from here on, whoever withdraws.
            self._callbacks_added += 1
            shares = self._far.shares
            self._is_promised = not self._number and not self.done()
            self._loan = shares.promise() if self._is_promised else shares.share(self)
        return self._loan

    def reject(self, failed: Failed) -> None:
        """Take what is said of its failure; called by the engine."""
        if failed.kind == STOPPED:
            self.cancel()  # somebody has done so who was given it
        else:
            super().reject(failed)

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by the engine."""
        self._break(error)
        super().fail(error)
        if self._loan is not None and not self.cancelled():
            self.exception()  # whoever needs it tells of it

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the handle and stop the work; see `Handle.cancel`."""
        if not super().cancel(msg):
            return False
        if self._loan is not None and self.part >= 0:
            # Its call may go on for the others.
            self._far.shares.drop(self.child, self._loan)
        self._break(TaskCancelledError(f"{self.task_name} was cancelled."))
        return True

    def _break(self, error: Exception) -> None:
        """What was promised of it will not come."""
        if self._is_promised and self._loan is not None:
            self._is_promised = False
            self._far.shares.fail(self._loan, error)
