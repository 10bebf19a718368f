"""What a chunk of a `map` gives: results, and what the item after them has raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """See above.

    Attributes:
        values: the results so far.
        seconds: that they took.
        failure: the fields of a `Failed`, if the item after them has failed.
    """

    values: list[Any]
    seconds: float
    failure: tuple[Any, ...] | None

    def before_culprit(self, dump: Callable[[object], object]) -> Outcome:
        """The same up to the first value that cannot be pickled; that one has failed.

        Args:
            dump: raises for such a value.
        """
        # Only a failure pays for the import.
        from aiogpu.wire.failure import UNSENDABLE, pack_failure

        for number, value in enumerate(self.values):
            try:
                dump(value)
            except Exception as error:  # noqa: BLE001 - it travels
                failed = pack_failure(0, UNSENDABLE, error, "")
                return Outcome(self.values[:number], self.seconds, tuple(failed))
        return self
