"""What a worker offers to the code that runs in it; light to import anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu.worker.nested import Children
    from aiogpu.worker.objects import Loans


class Services:
    """Both are None in a process that is no worker.

    Attributes:
        children: what the running task has started.
        loans: what this worker was lent.
    """

    __slots__ = ("children", "loans")

    def __init__(self) -> None:
        self.children: Children | None = None
        self.loans: Loans | None = None


services = Services()
"""The services of this process."""
