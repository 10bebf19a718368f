"""Whether a failure is one after which its task is to be tried again.

Decided here, where the user's classes are, and only once something has failed.
"""

from __future__ import annotations

import sys

from aiogpu.serialization.exceptions import safe_text
from aiogpu.serialization.serializer import Retried, is_retried, load_retried
from aiogpu.wire.messages import Define


class Retrying:
    """What the sites of one worker say of it."""

    def __init__(self) -> None:
        self._wanted: dict[bytes, Retried] = {}

    def forget(self) -> None:
        """Drop all that was learnt."""
        self._wanted.clear()

    def wants(
        self, site: Define, error: BaseException, *told: type[BaseException]
    ) -> bool:
        """Whether a failure is one of those that the site names.

        Args:
            site: what has failed.
            error: what it has raised.
            told: classes as one of which the task's owner is told of it.
        """
        retried = site.retried
        try:
            wanted = self._wanted.get(retried)
            if wanted is None:
                wanted = self._wanted[retried] = load_retried(retried)
            if isinstance(wanted, bool) or is_retried(wanted, error):
                return bool(wanted)
            return any(issubclass(kind, wanted) for kind in told)
        except BaseException as odd:  # noqa: BLE001 - foreign code may raise anything
            self._wanted[retried] = False
            sys.stderr.write(
                f"aiogpu: {site.name} is not tried again, whatever it raises: its "
                f"retry_exceptions cannot be asked: {type(odd).__name__}: "
                f"{safe_text(odd)}\n"
            )
            return False
